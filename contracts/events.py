"""Events that a worker reports to the routers: tokens, changes in an attempt's life, and the worker's load.

A scheduler emits them, `pdserve.proto.codec` writes them to the wire and reads them back, and the router's dispatch
core and the planner's simulator receive the same types. Owns the vocabulary only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import TokenLogprobs


class RequestKey(NamedTuple):
    """Names one attempt at a request on one worker."""

    session: int
    """Router session that it came through; 0 in a router, whose events come from one worker at a time."""
    request_id: int
    attempt: int


class RequestEventKind(IntEnum):
    """Changes in an attempt's life. Values are the wire's `RequestEvent.Kind`."""

    STARTED = 1
    LAST_CHUNK = 2
    JOINED = 3
    PREEMPTED = 4
    RESUMED = 5
    CANCELLED = 6
    REJECTED = 7
    FAILED = 8
    KV_UNAVAILABLE = 9
    RELEASED = 10

    @property
    def is_terminal(self) -> bool:
        """Whether the attempt is over on this worker."""
        return self in _TERMINAL_KINDS


_TERMINAL_KINDS = frozenset(
    {
        RequestEventKind.CANCELLED,
        RequestEventKind.REJECTED,
        RequestEventKind.FAILED,
        RequestEventKind.KV_UNAVAILABLE,
        RequestEventKind.RELEASED,
    }
)


class RefusalCode(IntEnum):
    """Reason of a REJECTED or KV_UNAVAILABLE event, by which the router decides whether and where to retry. Values are
    the wire's `RefusalCode`."""

    NONE = 0
    """No refusal: the KV could not be pulled, or expired unpulled."""
    INVALID = 1
    """The request can never run on this worker, nor on another one like it."""
    DRAINING = 2
    """The worker takes no new requests."""
    OVERLOADED = 3
    """The worker holds too many requests."""
    SOURCE = 4
    """The prefill worker refused the pull: no other decode worker could pull the prompt either."""


@dataclass(slots=True)
class TokenEvent:
    """A generated token, from the scheduler to the HTTP edge. Not frozen: there is one per row and step, and freezing
    doubles its cost."""

    key: RequestKey
    choice: int
    """Index of the answer. Not on the wire: the router knows it from the request id."""
    index: int
    """Position in the answer, over all attempts."""
    token: int
    logprobs: TokenLogprobs | None
    finish: FinishReason
    """Not NONE: the attempt is over on this worker."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """Log probabilities of consecutive prompt tokens; all of a prompt's come before its token 0."""

    key: RequestKey
    first_position: int
    """In the prompt, of the first entry."""
    entries: list[TokenLogprobs]


class RequestEvent(NamedTuple):
    """A change in an attempt's life."""

    key: RequestKey
    kind: RequestEventKind
    message: str = ""
    """For people: no decision depends on it."""
    handle: bytes = b""
    """LAST_CHUNK: names the parked prompt."""
    num_cached_tokens: int = 0
    """STARTED: prompt tokens found in the prefix cache."""
    waited_s: float = 0.0
    """STARTED, JOINED: time since the worker received the request."""
    refusal: RefusalCode = RefusalCode.NONE
    """REJECTED, KV_UNAVAILABLE."""


ClientEvent = TokenEvent | PromptLogprobsEvent | RequestEvent
"""Events for routers."""


class SchedulerLoad(NamedTuple):
    """A snapshot for the router's policy and the metrics."""

    num_running: int = 0
    num_waiting: int = 0
    num_parked: int = 0
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_blocks_referenced: int = 0
    num_waiting_tokens: int = 0
    """Of prompts that are not started."""
    num_started_tokens: int = 0
    """Of started prompts: those whose KV is not written yet, in steps in flight too."""
    num_context_tokens: int = 0
    num_preemptions: int = 0
    num_swap_outs: int = 0
    """Preempted sequences whose KV was copied to the host."""
    num_swap_ins: int = 0
    """Of those, whose KV was copied back."""
    num_swap_slots_used: int = 0
