"""Prefill chunks that fit into a step beside answers which bound the gap between their tokens.

Used by `pdserve.engine.worker.scheduler`. A step is as long as the cost model predicts, corrected by steps so far.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

MixedSeconds = Callable[[Iterable[tuple[int, int]], int, int], float]
"""Predicted seconds of a step: `pdserve.engine.worker.step_times.StepTimes.mixed_s`."""


class GapLimit:
    """Chunks of one step so far, and how much of the next one fits.

    Args:
        max_gap_s: the step is to take no longer.
        num_rows: decode rows of the step.
        num_context_tokens: cached tokens of those.
        least_tokens: always fit, because prompts wait for the answers' sake, but not for ever.
    """

    def __init__(
        self, mixed_s: MixedSeconds, max_gap_s: float, num_rows: int, num_context_tokens: int, least_tokens: int
    ) -> None:
        self._mixed_s = mixed_s
        self._max_gap_s = max_gap_s
        self._num_rows = num_rows
        self._num_context_tokens = num_context_tokens
        self._num_left = least_tokens
        self._chunks: list[tuple[int, int]] = []

    def __call__(self, num_tokens: int, num_cached: int) -> int:
        """Add as many of ``num_tokens``, after ``num_cached``, as fit, and return their number."""

        def step_s(num_taken: int) -> float:
            return self._mixed_s([*self._chunks, (num_taken, num_cached)], self._num_rows, self._num_context_tokens)

        num_fitting = bisect_right(range(1, num_tokens + 1), self._max_gap_s, key=step_s)
        num_taken = max(num_fitting, min(num_tokens, self._num_left))
        self._num_left = max(0, self._num_left - num_taken)
        if num_taken:
            self._chunks.append((num_taken, num_cached))
        return num_taken
