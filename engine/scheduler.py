"""The contract between the step loop and a phase's scheduler, and the events a scheduler emits.

A scheduler is pure: no I/O, no torch, no clock; ``now_s`` is an argument, monotonic, of any origin. The live step loop
drives it with real time and the planner's simulator drives the same class with a virtual clock. It tolerates results
one step late: `Scheduler.plan` may be called once more before `Scheduler.complete` of the step before.

Everything that must leave the scheduler (tokens for the router, orders for the transfer process) is an event, taken in
order with `Scheduler.take_events`. Every attempt that it took ends with one: a token that ends the last choice, or a
terminal `RequestEvent`. By it the step loop knows which attempts are alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pdserve.contracts.events import ClientEvent as ClientEvent
from pdserve.contracts.events import PromptLogprobsEvent as PromptLogprobsEvent
from pdserve.contracts.events import RequestEvent as RequestEvent
from pdserve.contracts.events import RequestEventKind as RequestEventKind
from pdserve.contracts.events import RequestKey as RequestKey
from pdserve.contracts.events import SchedulerLoad as SchedulerLoad
from pdserve.contracts.events import TokenEvent as TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource
from pdserve.contracts.step import StepBatch, StepOutput


class FirstToken(NamedTuple):
    """Token 0 of a choice, as the worker that sampled it tells the one that goes on with it."""

    token: int
    finish: FinishReason = FinishReason.NONE
    """Not NONE: the choice is over."""


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
    final: bool
    num_tokens: int = 0
    """Final: tokens whose KV the prompt's blocks hold."""
    first_tokens: tuple[FirstToken, ...] = ()
    """Final: the token sampled after the prompt, of each choice in order."""


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
    """Decode: stop a pull. Its targets stay reserved until `Scheduler.pull_done` says that nothing writes to them."""

    pull_id: int


Event = ClientEvent | OfferEvent | GrantEvent | WithdrawEvent | StartPullEvent | AbortPullEvent


class PullResult(NamedTuple):
    """How a pull ended: what the transfer process says of it."""

    pull_id: int
    failure: str = ""
    """Empty on success."""
    is_refused: bool = False
    """The source refused: nobody else could pull the prompt either."""
    num_tokens: int = 0
    first_tokens: tuple[FirstToken, ...] = ()
    """Of each choice in order."""


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

    def cancel(self, key: RequestKey, now_s: float, choices: tuple[int, ...] = ()) -> None:
        """Drop a request in any state, or only some of its choices; unknown ones are ignored. Emits CANCELLED if that
        ended the request.

        Args:
            choices: indices of the choices to drop; empty drops all.
        """
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
