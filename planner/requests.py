"""Requests of the simulator: arrival times, lengths and shared prefixes. Made by `pdserve.planner.workload`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Segment(NamedTuple):
    """A run of prompt tokens known by name: prompts that begin with the same segments share their KV."""

    content: int
    """Equal contents are equal tokens; from 0 to 2**31 - 1."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request of a workload."""

    arrived_s: float
    """From the start of the simulation; of a follow-up, seconds from the last token of the turn before."""
    num_prompt_tokens: int
    num_output_tokens: int
    """The answer has exactly so many, at least 1."""
    segments: tuple[Segment, ...] = ()
    """The whole prompt in order, or nothing for a prompt that shares nothing with any other."""
    follow_up: SimulatedRequest | None = None
    """The next turn of its conversation. Its prompt is this prompt, this answer, and its own ``segments``, which are
    the new message alone; its ``num_prompt_tokens`` count all of them."""

    def turns(self) -> Iterator[SimulatedRequest]:
        """This one and all that follow up, in order."""
        turn: SimulatedRequest | None = self
        while turn is not None:
            yield turn
            turn = turn.follow_up
