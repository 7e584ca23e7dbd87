"""Statistics of a workload: lengths, and the savings possible with a cache.

Read by reports and by the search's closed-form estimates; made by `pdserve.planner.workload.workload`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pdserve.planner.arrays import IntArray
from pdserve.planner.workload.requests import Segment, SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadStatistics:
    """Statistics of N requests; arrays have one entry per request, in the order of conversations and their turns."""

    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    num_cacheable_tokens: IntArray
    """Prompt tokens that an unlimited cache holds if the conversations arrive in order."""

    @property
    def num_requests(self) -> int:
        return len(self.num_prompt_tokens)

    @property
    def mean_prompt_tokens(self) -> float:
        return float(self.num_prompt_tokens.mean())

    @property
    def mean_output_tokens(self) -> float:
        return float(self.num_output_tokens.mean())

    @property
    def cacheable_share(self) -> float:
        """Share of all prompt tokens."""
        return float(self.num_cacheable_tokens.sum() / self.num_prompt_tokens.sum())


def measure(conversations: Iterable[SimulatedRequest]) -> WorkloadStatistics:
    prompts: list[int] = []
    outputs: list[int] = []
    cacheable: list[int] = []
    seen = _PromptTree()
    for conversation in conversations:
        num_cacheable = seen.add(conversation.segments)
        for turn in conversation.turns():
            prompts.append(turn.num_prompt_tokens)
            outputs.append(turn.num_output_tokens)
            cacheable.append(num_cacheable)
            num_cacheable = turn.num_prompt_tokens + turn.num_output_tokens
    return WorkloadStatistics(
        num_prompt_tokens=np.array(prompts),
        num_output_tokens=np.array(outputs),
        num_cacheable_tokens=np.array(cacheable),
    )


class _PromptTree:
    """Prefix tree of the prompts so far. A node is a number that stands for the segments leading to it."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Segment], int] = {}
        self._longest: dict[tuple[int, int], int] = {}
        """Longest run of a content's tokens seen after a node."""

    def add(self, segments: tuple[Segment, ...]) -> int:
        """Add a prompt; returns the number of its tokens seen before."""
        num_seen, node = 0, 0
        for segment in segments:
            # A new node has no successors, so everything after it counts as new.
            place = node, segment.content
            known = self._longest.get(place, 0)
            num_seen += min(known, segment.num_tokens)
            if known < segment.num_tokens:
                self._longest[place] = segment.num_tokens
            node = self._nodes.setdefault((node, segment), len(self._nodes) + 1)
        return num_seen
