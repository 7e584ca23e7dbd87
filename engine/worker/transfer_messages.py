"""Converts between the messages of a step loop and those of the transfer process. Keeps no state."""

from __future__ import annotations

from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import ModelLimits
from pdserve.engine.scheduling.interface import (
    AbortPullEvent,
    FirstToken,
    GrantEvent,
    OfferEvent,
    PullResult,
    StartPullEvent,
    TransferEvent,
    WithdrawEvent,
)
from pdserve.engine.worker.messages import LeaseChanged, LendPrefix, Message, PromptReleased
from pdserve.proto.codec import WireError, enum_from_proto, source_to_proto
from pdserve.proto.v1 import kv_pb2, worker_pb2
from pdserve.proto.v1.transfer_pb2 import (
    AbortPull,
    EngineToTransfer,
    Offer,
    OfferedGrant,
    PullDone,
    StartPull,
    TransferToEngine,
    Withdraw,
)


def order_to_proto(order: TransferEvent, min_duration_s: float = 0.0) -> EngineToTransfer:
    """Convert an order. ``min_duration_s`` applies to a `StartPullEvent`: minimum duration of an emulated pull."""
    match order:
        case OfferEvent(handle):
            return EngineToTransfer(offer=Offer(handle=handle))
        case GrantEvent(handle):
            return EngineToTransfer(grant=OfferedGrant(handle=handle, grant=_grant_to_proto(order)))
        case WithdrawEvent(handle):
            return EngineToTransfer(withdraw=Withdraw(handle=handle))
        case StartPullEvent():
            start_pull = StartPull(
                pull_id=order.pull_id,
                source=source_to_proto(order.source),
                num_cached_blocks=order.num_cached_blocks,
                block_ids=order.block_ids,
                deadline_s=order.deadline_s,
                min_duration_s=min_duration_s,
                prefix=order.prefix,
            )
            return EngineToTransfer(start_pull=start_pull)
        case AbortPullEvent(pull_id):
            return EngineToTransfer(abort_pull=AbortPull(pull_id=pull_id))


def _grant_to_proto(event: GrantEvent) -> kv_pb2.Grant:
    first = event.first_token
    return kv_pb2.Grant(
        first_index=event.first_index,
        block_ids=event.block_ids,
        generations=event.generations,
        final=event.final,
        num_tokens=event.num_tokens,
        first_token=first
        and kv_pb2.FirstToken(token=first.token, finish=worker_pb2.FinishReason.ValueType(first.finish)),
    )


def message_from_proto(message: TransferToEngine, limits: ModelLimits) -> Message:
    """Convert a message. Raises ValueError if an engine does not accept it."""
    match message.WhichOneof("body"):
        case "lease_opened":
            return LeaseChanged(message.lease_opened.handle, True)
        case "lease_lost":
            return LeaseChanged(message.lease_lost.handle, False)
        case "released":
            return PromptReleased(message.released.handle)
        case "lend":
            return LendPrefix(message.lend.handle, tuple(message.lend.prefix))
        case "pull_done":
            return _pull_result(message.pull_done, limits)
        case other:
            raise ValueError(f"the transfer process sent an unexpected {other!r}")


def _pull_result(done: PullDone, limits: ModelLimits) -> PullResult:
    """Convert the end of a pull. Values from the peer are validated: an impossible token is a failure."""
    stage, reason, finish = done.failure_stage, done.message, FinishReason.NONE
    if not stage:
        try:
            finish = enum_from_proto(FinishReason, done.first_token.finish)
            if done.first_token.token >= limits.vocab_size or done.num_tokens > limits.max_model_len:
                raise WireError("the source's answer is outside the model's limits")
        except WireError as error:
            stage, reason = "verify", str(error)
    has_token = not stage and done.HasField("first_token")
    return PullResult(
        pull_id=done.pull_id,
        failure=f"{stage}: {reason}" if stage else "",
        failure_stage=stage,
        num_tokens=0 if stage else done.num_tokens,
        first_token=FirstToken(done.first_token.token, finish) if has_token else None,
        transport=done.transport,
        seconds=done.seconds,
        num_bytes=done.bytes,
    )
