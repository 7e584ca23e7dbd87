"""Samples the rows of a step while the host waits: every parameter that a request may have.

Used by the executors. Keeps what penalties count from one step to the next; the sampling itself is
`pdserve.model.sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pdserve.contracts.step import SampledToken, StepRow
from pdserve.model.sampling import SamplingRow, sample
from pdserve.model.token_counts import TokenCountCache


class RowSampler:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._token_counts = TokenCountCache()

    def sample(
        self, logits_BV: torch.Tensor, rows: Sequence[StepRow], late_token: Callable[[int], int]
    ) -> list[list[SampledToken]]:
        """A token for each choice of each row; see `pdserve.model.sampling.sample`.

        Args:
            rows: B of them, all of which sample.
            late_token: the token that a row of the step before sampled.
        """
        return sample(logits_BV, [self._sampling_row(row, late_token) for row in rows])

    def _sampling_row(self, row: StepRow, late_token: Callable[[int], int]) -> SamplingRow:
        assert row.sample is not None
        counts = None
        if row.sample.has_penalties:
            late = late_token(row.previous_row) if row.previous_row >= 0 else None
            counts = self._token_counts.counts(row.sequence_id, row.history, row.num_prompt_tokens, late)
        return SamplingRow(row.sample, row.sample_position, row.choice, row.num_choices, row.banned_tokens, counts)
