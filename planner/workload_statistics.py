"""Statistics of a workload: lengths, and the savings possible with a cache.

Reports and the search's closed-form bounds read them. Made by `pdserve.planner.workload`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdserve.planner.requests import Segment, SimulatedRequest
from pdserve.planner.simulation import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadStatistics:
    """Of N requests; arrays have one entry for each, turn after turn of one conversation after the other."""

    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    num_cacheable_tokens: IntArray
    """Of the prompt: what a cache that never forgets holds of it, when conversations come in their order."""

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
        """Of all prompt tokens."""
        return float(self.num_cacheable_tokens.sum() / self.num_prompt_tokens.sum())


def measure(conversations: list[SimulatedRequest]) -> WorkloadStatistics:
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
    """The beginnings of the prompts seen. A node is a number, and stands for the segments that lead to it."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Segment], int] = {}
        self._longest: dict[tuple[int, int], int] = {}
        """Tokens seen of a content after a node."""

    def add(self, segments: tuple[Segment, ...]) -> int:
        """Take in a prompt; how many of its tokens had been seen."""
        num_seen, node = 0, 0
        for segment in segments:
            # A node that is new has nothing after it, so that what follows it counts as not seen.
            place = node, segment.content
            known = self._longest.get(place, 0)
            num_seen += min(known, segment.num_tokens)
            if known < segment.num_tokens:
                self._longest[place] = segment.num_tokens
            node = self._nodes.setdefault((node, segment), len(self._nodes) + 1)
        return num_seen
