"""The contract between the step loop and a phase's scheduler, and the events a scheduler emits.

A scheduler is pure: no I/O, no torch, no clock; ``now_s`` is an argument, monotonic, of any origin. The live step loop
drives it with real time and the planner's simulator drives the same class with a virtual clock. It tolerates results
one step late: `Scheduler.plan` may be called once more before `Scheduler.complete` of the step before.

Everything that must leave the scheduler (tokens for the router, orders for the transfer process) is an event, taken in
order with `Scheduler.take_events`. Every attempt ends with one: a token with a finish reason, or a terminal
`RequestEvent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pdserve.contracts.events import (
    ClientEvent,
    RequestKey,
    SchedulerLoad,
)
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource
from pdserve.contracts.step import StepBatch, StepOutput


class FirstToken(NamedTuple):
    """Token 0 of a prompt that is handed off."""

    token: int
    finish: FinishReason = FinishReason.NONE
    """Not NONE: the answer is complete."""


@dataclass(frozen=True, slots=True)
class OfferEvent:
    """Prefill: a prompt may be pulled from now on; grants follow."""

    handle: bytes


class GrantEvent(NamedTuple):
    """Prefill: blocks whose KV is complete, in prompt order."""

    handle: bytes
    first_index: int
    """Position in the prompt of the first of ``block_ids``."""
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    num_tokens: int = 0
    """Final: tokens whose KV the prompt's blocks hold."""
    first_token: FirstToken | None = None
    """The token sampled after the prompt, in the final grant only."""

    @property
    def final(self) -> bool:
        return self.first_token is not None


@dataclass(frozen=True, slots=True)
class WithdrawEvent:
    """Prefill: the prompt's blocks are about to be reused; break any pull of them."""

    handle: bytes


class StartPullEvent(NamedTuple):
    """Decode: blocks are reserved; fetch the prompt's KV into them."""

    pull_id: int
    source: KvSource
    num_cached_blocks: int
    """Leading blocks of the prompt that are already here."""
    block_ids: tuple[int, ...]
    """Targets of the prompt's blocks after those."""
    num_tokens: int
    """Tokens whose KV the prompt's blocks hold, cached ones included."""
    deadline_s: float
    """Seconds from now after which the pull is given up."""


@dataclass(frozen=True, slots=True)
class AbortPullEvent:
    """Decode: stop a pull. Its targets stay reserved until `Scheduler.pull_done`: nothing writes to them then."""

    pull_id: int


TransferEvent = OfferEvent | GrantEvent | WithdrawEvent | StartPullEvent | AbortPullEvent
"""Orders for the transfer process."""

Event = ClientEvent | TransferEvent


class PullResult(NamedTuple):
    """The end of a pull, as the transfer process reports it."""

    pull_id: int
    failure: str = ""
    """Empty on success."""
    is_refused: bool = False
    """The source refused: nobody else could pull the prompt either."""
    num_tokens: int = 0
    first_token: FirstToken | None = None
    """``None`` after a failure."""


class Scheduler(Protocol):
    """Decides what each step computes. Not thread-safe: one loop owns it."""

    def add(self, key: RequestKey, request: GenerationRequest, now_s: float) -> None:
        """Take a request to prefill here. One that can never run gets a REJECTED event.

        Args:
            now_s: when the worker received it, which may be before the instants of calls that came first.
        """
        ...

    def prepare(self, key: RequestKey, request: GenerationRequest, source: KvSource, now_s: float) -> None:
        """Take a request whose prompt is being prefilled elsewhere: reserve, pull, decode."""
        ...

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Drop a request in any state and emit CANCELLED; unknown keys are ignored."""
        ...

    def plan(self, now_s: float) -> StepBatch | None:
        """Decide the next step, or ``None`` when nothing can run now. Expires what is past its deadline."""
        ...

    def complete(self, output: StepOutput, now_s: float) -> None:
        """Take the results of the oldest planned step that is not completed."""
        ...

    def fail_step(self, step_id: int, message: str, now_s: float) -> None:
        """The oldest planned step raised: every request in it FAILS, and its blocks are freed, never cached."""
        ...

    def pull_done(self, result: PullResult, now_s: float) -> None:
        """A pull ended; exactly one call per StartPullEvent."""
        ...

    def lease_opened(self, handle: bytes, now_s: float) -> None:
        """A decode worker is pulling the parked prompt: it does not time out meanwhile."""
        ...

    def lease_lost(self, handle: bytes, now_s: float) -> None:
        """The puller went away without release: another may come until the park time is over."""
        ...

    def released(self, handle: bytes, now_s: float) -> None:
        """The puller has every block: demote ours to cached."""
        ...

    def next_deadline_s(self) -> float | None:
        """The instant at which `plan` has something to expire; ``None`` for none."""
        ...

    def take_events(self) -> list[Event]:
        """Events since the last call, in order."""
        ...

    def load(self) -> SchedulerLoad: ...
