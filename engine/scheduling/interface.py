"""Contract between the step loop and a phase's scheduler, and the events a scheduler emits.

A scheduler is pure: no I/O, no torch, no clock. ``now_s`` is an argument, monotonic, with any origin. The live step
loop drives the scheduler with real time; the planner's simulator drives the same class with virtual time. Results
may arrive one step late: `Scheduler.plan` may be called once more before `Scheduler.complete` of the previous step.

Everything that leaves the scheduler (tokens for the router, orders for the transfer process) is an event, collected
in order with `Scheduler.take_events`. Every attempt ends with one: a token with a finish reason, or a terminal
`RequestEvent`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pdserve.contracts.events import ClientEvent, RequestKey, SchedulerLoad
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource
from pdserve.contracts.step import StepBatch, StepOutput


class FirstToken(NamedTuple):
    """Token 0 of a handed-off prompt."""

    token: int
    finish: FinishReason = FinishReason.NONE
    """NONE unless token 0 completes the answer."""


@dataclass(frozen=True, slots=True)
class OfferEvent:
    """Prefill: the prompt may be pulled from now on. Grants follow."""

    handle: bytes


class GrantEvent(NamedTuple):
    """Prefill: blocks with complete KV, in prompt order."""

    handle: bytes
    first_index: int
    """Index in the prompt of the first of ``block_ids``."""
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    num_tokens: int = 0
    """Final grant only: tokens whose KV the prompt's blocks hold."""
    first_token: FirstToken | None = None
    """Final grant only: the token sampled after the prompt."""

    @property
    def final(self) -> bool:
        return self.first_token is not None


@dataclass(frozen=True, slots=True)
class WithdrawEvent:
    """Prefill: the prompt's blocks are about to be reused. Abort any pull of them."""

    handle: bytes


class StartPullEvent(NamedTuple):
    """Decode: blocks are reserved. Pull the prompt's KV into them."""

    pull_id: int
    source: KvSource
    num_cached_blocks: int
    """Leading blocks of the prompt already cached here."""
    block_ids: tuple[int, ...]
    """Targets of the remaining blocks of the prompt."""
    num_tokens: int
    """Tokens whose KV the prompt's blocks hold, including cached ones."""
    deadline_s: float
    """Seconds from now until the pull times out."""


@dataclass(frozen=True, slots=True)
class AbortPullEvent:
    """Decode: stop a pull. Its targets stay reserved until `Scheduler.pull_done`; nothing writes to them after that."""

    pull_id: int


TransferEvent = OfferEvent | GrantEvent | WithdrawEvent | StartPullEvent | AbortPullEvent
"""Orders for the transfer process."""

Event = ClientEvent | TransferEvent


class PullResult(NamedTuple):
    """End of a pull, as reported by the transfer process."""

    pull_id: int
    failure: str = ""
    """Empty on success."""
    failure_stage: str = ""
    """Empty on success; see `PullDone.failure_stage` of transfer.proto."""
    num_tokens: int = 0
    first_token: FirstToken | None = None
    """``None`` on failure."""
    transport: str = ""
    source: str = ""
    """Address that was pulled from; set by the live loop."""
    seconds: float = 0.0
    num_bytes: int = 0


class Scheduler(Protocol):
    """Decides what each step computes. Not thread-safe: one loop owns it."""

    def add(self, key: RequestKey, request: GenerationRequest, now_s: float) -> None:
        """Add a request to prefill here. A request that can never run gets a REJECTED event.

        Args:
            now_s: time the worker received the request; may be earlier than that of previous calls.
        """
        ...

    def prepare(self, key: RequestKey, request: GenerationRequest, source: KvSource, now_s: float) -> None:
        """Add a request whose prompt another worker prefills: reserve blocks, pull, decode."""
        ...

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Drop a request in any state and emit CANCELLED. Unknown keys are ignored."""
        ...

    def plan(self, now_s: float) -> StepBatch | None:
        """Schedule the next step; ``None`` when nothing can run now. Expires requests past their deadline."""
        ...

    def complete(self, output: StepOutput, now_s: float) -> None:
        """Process the results of the oldest planned step that is not completed."""
        ...

    def fail_step(self, step_id: int, message: str, now_s: float) -> None:
        """Handle an exception in the oldest planned step: its requests emit FAILED, and their blocks are freed, not
        cached."""
        ...

    def pull_done(self, result: PullResult, now_s: float) -> None:
        """Handle the end of a pull. Called exactly once per StartPullEvent."""
        ...

    def set_leased(self, handle: bytes, is_leased: bool) -> None:
        """A decode worker began to pull the parked prompt, which does not time out meanwhile, or it left without
        releasing the prompt, and another may come until the park timeout."""
        ...

    def released(self, handle: bytes) -> None:
        """The puller has every block: demote the local ones to cached."""
        ...

    def next_deadline_s(self) -> float | None:
        """Time at which `plan` has something to expire; ``None`` if never."""
        ...

    def take_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        ...

    def load(self) -> SchedulerLoad: ...
