"""Conversions between the scheduler's events and the messages of the transfer process.

Called by the step loop only. Never keeps state.
"""

from __future__ import annotations

from typing import Protocol

from pdserve.contracts.step import ModelLimits
from pdserve.engine.scheduler import (
    AbortPullEvent,
    FirstToken,
    GrantEvent,
    OfferEvent,
    PullResult,
    StartPullEvent,
    WithdrawEvent,
)
from pdserve.proto.codec import WireError, finish_from_proto, finish_to_proto, source_to_proto
from pdserve.proto.v1 import kv_pb2, transfer_pb2, worker_pb2

REFUSED = "refused"
"""Stage of a pull's failure: the source refused it."""

TransferEvent = OfferEvent | GrantEvent | WithdrawEvent | StartPullEvent | AbortPullEvent
"""The events that are orders for the transfer process."""


class TransferLink(Protocol):
    """The engine's end of the pipe to its transfer process."""

    @property
    def address(self) -> str:
        """``host:port`` where peers pull from."""
        ...

    def send(self, message: transfer_pb2.EngineToTransfer) -> None: ...

    def close(self) -> None: ...


def order_to_proto(event: TransferEvent, min_duration_s: float = 0.0) -> transfer_pb2.EngineToTransfer:
    """``min_duration_s`` is for a `StartPullEvent`: how long an emulated pull lasts at least."""
    match event:
        case OfferEvent():
            return transfer_pb2.EngineToTransfer(offer=transfer_pb2.Offer(handle=event.handle))
        case GrantEvent():
            grant = transfer_pb2.OfferedGrant(handle=event.handle, grant=_grant_to_proto(event))
            return transfer_pb2.EngineToTransfer(grant=grant)
        case WithdrawEvent():
            return transfer_pb2.EngineToTransfer(withdraw=transfer_pb2.Withdraw(handle=event.handle))
        case StartPullEvent():
            return transfer_pb2.EngineToTransfer(start_pull=_start_pull_to_proto(event, min_duration_s))
        case AbortPullEvent():
            return transfer_pb2.EngineToTransfer(abort_pull=transfer_pb2.AbortPull(pull_id=event.pull_id))


def _grant_to_proto(event: GrantEvent) -> kv_pb2.Grant:
    grant = kv_pb2.Grant(
        first_index=event.first_index,
        block_ids=event.block_ids,
        generations=event.generations,
        final=event.final,
        num_tokens=event.num_tokens,
    )
    for first in event.first_tokens:
        grant.first_tokens.add(token=first.token, finish=finish_to_proto(first.finish))
    return grant


def _start_pull_to_proto(event: StartPullEvent, min_duration_s: float) -> transfer_pb2.StartPull:
    return transfer_pb2.StartPull(
        pull_id=event.pull_id,
        source=source_to_proto(event.source),
        num_cached_blocks=event.num_cached_blocks,
        block_ids=event.block_ids,
        deadline_s=event.deadline_s,
        min_duration_s=min_duration_s,
    )


def pull_result(done: transfer_pb2.PullDone, limits: ModelLimits) -> PullResult:
    """What the scheduler is told of a pull's end. The peer's words are checked: a token that cannot be is a failure."""
    if done.failure_stage:
        is_refused = done.failure_stage == REFUSED
        failure = f"{done.failure_stage}: {done.message}"
        return PullResult(pull_id=done.pull_id, failure=failure, is_refused=is_refused)
    is_possible = all(first.token < limits.vocab_size for first in done.first_tokens)
    if not is_possible or done.num_tokens > limits.max_model_len:
        return PullResult(pull_id=done.pull_id, failure="verify: the source's answer is outside the model's limits")
    try:
        first_tokens = tuple(FirstToken(first.token, finish_from_proto(first.finish)) for first in done.first_tokens)
    except WireError as error:
        return PullResult(pull_id=done.pull_id, failure=f"verify: {error}")
    return PullResult(pull_id=done.pull_id, num_tokens=done.num_tokens, first_tokens=first_tokens)


def transfer_report(done: transfer_pb2.PullDone) -> worker_pb2.TransferReport:
    """What the routers are told of a pull's end."""
    return worker_pb2.TransferReport(
        transport=done.transport, seconds=done.seconds, bytes=done.bytes, failure_stage=done.failure_stage
    )
