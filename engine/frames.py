"""Token frames: what one step says to one router, packed into one message, and unpacked again.

The worker's service packs; the router unpacks. Tokens travel as columns of equal length, and log probabilities only for
the entries that asked for them. Never keeps state, never imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.contracts.request import FinishReason, KvSource
from pdserve.contracts.step import TokenLogprobs
from pdserve.engine.scheduler import (
    ClientEvent,
    PromptLogprobsEvent,
    RequestEvent,
    RequestEventKind,
    SchedulerLoad,
    TokenEvent,
)
from pdserve.engine.wire import (
    WireError,
    finish_from_proto,
    finish_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    source_to_proto,
)
from pdserve.proto.v1 import worker_pb2


class KvOrigin(NamedTuple):
    """The part of a `KvSource` that is the same for every prompt parked on a worker."""

    address: str
    worker_epoch: int


@dataclass(slots=True)
class ReceivedToken:
    """One entry of a frame's token columns. Not frozen, as `TokenEvent` is not."""

    request_id: int
    attempt: int
    choice: int
    index: int
    token: int
    logprobs: TokenLogprobs | None
    finish: FinishReason


def pack_frames(events: Iterable[ClientEvent], origin: KvOrigin) -> dict[int, worker_pb2.StepFrame]:
    """One frame per session that the events speak to, by session number; order within a session is kept."""
    tokens: defaultdict[int, list[TokenEvent]] = defaultdict(list)
    frames: defaultdict[int, worker_pb2.StepFrame] = defaultdict(worker_pb2.StepFrame)
    for event in events:
        if isinstance(event, TokenEvent):
            tokens[event.key.session].append(event)
        elif isinstance(event, PromptLogprobsEvent):
            frames[event.key.session].prompt_logprobs.append(_prompt_logprobs_to_proto(event))
        else:
            frames[event.key.session].events.append(event_to_proto(event, origin))
    for session, column in tokens.items():
        frames[session].tokens.CopyFrom(pack_tokens(column))
    return dict(frames)


def pack_tokens(events: list[TokenEvent]) -> worker_pb2.Tokens:
    with_logprobs = [(entry, event.logprobs) for entry, event in enumerate(events) if event.logprobs is not None]
    return worker_pb2.Tokens(
        request_id=[event.key.request_id for event in events],
        attempt=[event.key.attempt for event in events],
        choice=[event.choice for event in events],
        index=[event.index for event in events],
        token=[event.token for event in events],
        finish=[finish_to_proto(event.finish) for event in events],
        logprobs=[logprobs_to_proto(logprobs) for _, logprobs in with_logprobs],
        logprobs_entry=[entry for entry, _ in with_logprobs],
    )


def _prompt_logprobs_to_proto(event: PromptLogprobsEvent) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        request_id=event.key.request_id,
        attempt=event.key.attempt,
        first_position=event.first_position,
        entries=[logprobs_to_proto(entry) for entry in event.entries],
    )


def unpack_tokens(tokens: worker_pb2.Tokens) -> Iterator[ReceivedToken]:
    """The entries of a frame's token columns, in order.

    Raises:
        WireError: the columns differ in length, or a value is unknown.
    """
    columns = (tokens.request_id, tokens.attempt, tokens.choice, tokens.index, tokens.token, tokens.finish)
    if len({len(column) for column in columns}) != 1:
        raise WireError("the token columns of a frame differ in length")
    if len(tokens.logprobs) != len(tokens.logprobs_entry):
        raise WireError("logprobs and logprobs_entry of a frame differ in length")
    logprobs = {
        entry: logprobs_from_proto(message)
        for entry, message in zip(tokens.logprobs_entry, tokens.logprobs, strict=True)
    }
    for entry, (request_id, attempt, choice, index, token, finish) in enumerate(zip(*columns, strict=True)):
        yield ReceivedToken(request_id, attempt, choice, index, token, logprobs.get(entry), finish_from_proto(finish))


def event_to_proto(event: RequestEvent, origin: KvOrigin) -> worker_pb2.RequestEvent:
    """A LAST_CHUNK event carries the source that a decode worker will pull from."""
    message = worker_pb2.RequestEvent(
        request_id=event.key.request_id,
        attempt=event.key.attempt,
        kind=worker_pb2.RequestEvent.Kind.ValueType(event.kind),
        message=event.message,
        num_cached_tokens=event.num_cached_tokens,
        waited_s=event.waited_s,
    )
    if event.kind is RequestEventKind.LAST_CHUNK and event.handle:
        source = KvSource(address=origin.address, worker_epoch=origin.worker_epoch, handle=event.handle)
        message.source.CopyFrom(source_to_proto(source))
    return message


def load_to_proto(load: SchedulerLoad) -> worker_pb2.Load:
    """The scheduler's part of a load message; the step loop adds times and corrections."""
    return worker_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_parked=load.num_parked,
        num_blocks_free=load.num_blocks_free,
        num_blocks_cached=load.num_blocks_cached,
        num_blocks_referenced=load.num_blocks_referenced,
        num_waiting_tokens=load.num_waiting_tokens,
        num_started_tokens=load.num_started_tokens,
        num_context_tokens=load.num_context_tokens,
        num_preemptions=load.num_preemptions,
        num_swap_outs=load.num_swap_outs,
        num_swap_ins=load.num_swap_ins,
        num_swap_slots_used=load.num_swap_slots_used,
    )
