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
    """Key of one attempt at a request on one worker."""

    session: int
    """Router session of the request; 0 in a router, which receives events from one worker at a time."""
    request_id: int
    attempt: int


class RequestEventKind(IntEnum):
    """Changes in an attempt's life. CANCELLED, REJECTED, FAILED, KV_UNAVAILABLE and RELEASED end the attempt on this
    worker only; the router may retry the request. Values are the wire's `RequestEvent.Kind`."""

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
        """True if the event ends the attempt on this worker."""
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
    """Reason of a REJECTED or KV_UNAVAILABLE event; the router decides from it whether and where to retry. Values are
    the wire's `RefusalCode`."""

    NONE = 0
    """No refusal: the pull failed, or the parked prompt expired."""
    INVALID = 1
    """The request can never run on this worker or a similar one."""
    DRAINING = 2
    """The worker takes no new requests."""
    OVERLOADED = 3
    """The worker holds too many requests."""
    SOURCE = 4
    """The prefill worker refused the pull; no other decode worker could pull the prompt either."""


@dataclass(slots=True)
class TokenEvent:
    """A generated token, from the scheduler to the HTTP edge. One per row and step; not frozen, which would double its
    cost."""

    key: RequestKey
    choice: int
    """Index of the answer. Not on the wire: the router knows it from the request id."""
    index: int
    """Position in the answer, over all attempts."""
    token: int
    logprobs: TokenLogprobs | None
    finish: FinishReason
    """Any value but NONE ends the attempt on this worker."""


@dataclass(frozen=True, slots=True)
class PromptLogprobsEvent:
    """Log probabilities of consecutive prompt tokens, all emitted before token 0."""

    key: RequestKey
    first_position: int
    """Position of the first entry in the prompt."""
    entries: list[TokenLogprobs]


class RequestEvent(NamedTuple):
    """A change in an attempt's life."""

    key: RequestKey
    kind: RequestEventKind
    message: str = ""
    """Text for people; no decision depends on it."""
    handle: bytes = b""
    """LAST_CHUNK: handle of the parked prompt."""
    num_cached_tokens: int = 0
    """STARTED: prompt tokens found in the prefix cache."""
    waited_s: float = 0.0
    """STARTED, JOINED: time since the worker received the request."""
    refusal: RefusalCode = RefusalCode.NONE
    """REJECTED, KV_UNAVAILABLE."""


ClientEvent = TokenEvent | PromptLogprobsEvent | RequestEvent
"""Events for routers."""


class SchedulerLoad(NamedTuple):
    """A snapshot for the router's policy and the metrics. The wire's `Load`, field by field."""

    num_running: int = 0
    """Sequences that hold blocks: pulls count before they decode."""
    num_waiting: int = 0
    num_parked: int = 0
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_blocks_referenced: int = 0
    num_waiting_tokens: int = 0
    """Tokens of prompts not started yet."""
    num_started_tokens: int = 0
    """Tokens of started prompts without written KV, including those in flight."""
    num_tokens_in_flight: int = 0
    """Prompt tokens of steps in flight."""
    num_context_tokens: int = 0
    num_preemptions: int = 0
    num_swap_outs: int = 0
    """Preempted sequences copied to the host."""
    num_swap_ins: int = 0
    """Preempted sequences copied back."""
    num_swap_slots_used: int = 0
    num_blocks_parked: int = 0
    """Blocks of parked prompts; one that several share counts for each."""
    num_guesses: int = 0
    """Tokens guessed and computed, since the worker started."""
    num_right_guesses: int = 0
    num_restored_tokens: int = 0
    """Prompt tokens whose KV came from the tier."""
    num_restores: int = 0
    """Prompts that waited for some."""
    num_restores_given_up: int = 0
    """And computed them, because the tier was slower than that."""
    restore_saved_s: float = 0.0
    """Predicted seconds to compute the restored tokens, less those of reading them."""
    tier_failure: str = ""
    """Why the tier is off until the worker starts again; empty while it works, and without one."""
    prefill_correction: float = 1.0
    """Observed over predicted time of steps with prefill rows; by the live driver, as the next two."""
    decode_correction: float = 1.0
    """Observed over predicted time of pure decode steps."""
    draining: bool = False
