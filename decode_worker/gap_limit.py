"""Prefill chunks that fit into a step beside answers which bound the gap between their tokens.

Used by `pdserve.engine.worker.scheduler`. A step is as long as the cost model predicts, corrected by steps so far.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MixedSeconds = Callable[[Iterable[tuple[int, int]], int, int], float]
"""Predicted seconds of a step: `pdserve.engine.worker.step_times.StepTimes.mixed_s`."""


@dataclass(slots=True)
class GapLimit:
    """Chunks of one step so far, and how much of the next one fits."""

    mixed_s: MixedSeconds
    max_gap_s: float
    """The step is to take no longer."""
    num_rows: int
    """Decode rows of the step."""
    num_context_tokens: int
    """Cached tokens of those."""
    num_left: int
    """Tokens that fit in any case, because prompts wait for the answers' sake, but not for ever."""
    chunks: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, num_tokens: int, num_cached: int) -> int:
        """Add as many of ``num_tokens``, after ``num_cached``, as fit, and return their number."""

        def step_s(num_taken: int) -> float:
            return self.mixed_s([*self.chunks, (num_taken, num_cached)], self.num_rows, self.num_context_tokens)

        num_fitting = bisect_right(range(1, num_tokens + 1), self.max_gap_s, key=step_s)
        num_taken = max(num_fitting, min(num_tokens, self.num_left))
        self.num_left = max(0, self.num_left - num_taken)
        if num_taken:
            self.chunks.append((num_taken, num_cached))
        return num_taken
