"""Requests of the simulator: arrival times, lengths and shared prefixes. Made by
`pdserve.planner.workload.workload`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from pdserve.contracts.deployment import DEFAULT_TIER


class Segment(NamedTuple):
    """A named run of prompt tokens: prompts that begin with the same segments share their KV."""

    content: int
    """Equal contents are equal tokens; from 0 to 2**31 - 1."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request of a workload."""

    arrived_s: float
    """From the start of the simulation; for a follow-up, seconds after the last token of the previous turn."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Exact length of the answer, at least 1."""
    segments: tuple[Segment, ...] = ()
    """The whole prompt in order; empty for a prompt that shares nothing with any other."""
    follow_up: SimulatedRequest | None = None
    """Next turn of the conversation. Its prompt is this prompt, this answer, and its own ``segments``, which hold the
    new message alone; its ``num_prompt_tokens`` count all of them."""
    tenant: str = ""
    """Sender, among whom the router is fair."""
    tier: str = DEFAULT_TIER
    """Name of its objectives in ``slo``."""
    max_tokens: int = 0
    """Limit that the client sets, above which the answer's length counts; schedulers know no more of the length. By
    default the length itself, as benchmarks set it."""

    def turns(self) -> Iterator[SimulatedRequest]:
        """This request and all follow-ups, in order."""
        turn: SimulatedRequest | None = self
        while turn is not None:
            yield turn
            turn = turn.follow_up

    def limited(self, max_tokens: int) -> SimulatedRequest:
        """This request and all follow-ups with ``max_tokens``."""
        later: SimulatedRequest | None = None
        for turn in reversed(list(self.turns())):
            later = replace(turn, follow_up=later, max_tokens=max_tokens)
        assert later is not None
        return later


class Clamped(NamedTuple):
    """Requests shortened or dropped to fit the model's length."""

    num_prompts: int = 0
    """Shortened, to leave room for one token."""
    num_answers: int = 0
    """Shortened to the model's length."""
    num_turns: int = 0
    """Dropped: the turns before them fill the model's length."""

    def __str__(self) -> str:
        """Such as ``3 prompts shortened, 1 turn left out``; empty if everything fitted."""
        parts = (
            (self.num_prompts, "prompt", "shortened"),
            (self.num_answers, "answer", "shortened"),
            (self.num_turns, "turn", "left out"),
        )
        return ", ".join(f"{count} {what}{'s' * (count > 1)} {done}" for count, what, done in parts if count)


class DrawnRequests(Protocol):
    """Requests without a rate yet."""

    @property
    def clamped(self) -> Clamped:
        """Requests shortened to the model's length."""
        ...

    def at_rate(self, requests_per_s: float) -> Sequence[SimulatedRequest]:
        """The requests in order of arrival, at this rate."""
        ...
