"""The blocks that a batch's sequences are expected to need, of all of them in a few array operations.

What `Sequence.num_blocks_expected` says of each grows with its answer, so that asking for the sum is work for every
sequence of the batch, each time. Used by `pdserve.planner.counted_batch`.
"""

from __future__ import annotations

import numpy as np

from pdserve.engine.sequence import LOOKAHEAD_TOKENS, Sequence

_NUM_FIELDS = 4


class ExpectedBlocks:
    """Of sequences with one choice that have a token in each step, until each has its last one."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_lookahead = max(LOOKAHEAD_TOKENS, block_size)
        self._sequences: list[Sequence] = []
        self._rows: dict[Sequence, int] = {}
        self._fields = np.zeros((_NUM_FIELDS, 64), np.int64)
        """Of each row's sequence: known tokens when it joined, by how much these exceed the completed steps from its
        first one on, prompt tokens, and the most tokens whose KV it can need."""

    def add(self, sequence: Sequence, last_step: int) -> None:
        """The sequence has its last token in step ``last_step``."""
        row = len(self._sequences)
        if row == self._fields.shape[1]:
            self._fields = np.concatenate([self._fields, np.zeros_like(self._fields)], axis=1)
        self._fields[:, row] = (
            len(sequence.tokens),
            sequence.max_length - last_step,
            sequence.num_prompt_tokens,
            sequence.num_kv_tokens_max,
        )
        self._sequences.append(sequence)
        self._rows[sequence] = row

    def remove(self, sequence: Sequence) -> None:
        row, last = self._rows.pop(sequence), self._sequences.pop()
        if last is not sequence:
            self._sequences[row] = last
            self._rows[last] = row
            self._fields[:, row] = self._fields[:, len(self._sequences)]

    def total(self, num_completed: int) -> int:
        """Blocks of all sequences together, when ``num_completed`` steps have ended."""
        at_start, ahead_of_steps, num_prompt, num_most = self._fields[:, : len(self._sequences)]
        num_known = np.maximum(at_start, ahead_of_steps + num_completed)
        num_tokens = num_known + np.maximum(num_known - num_prompt, self._num_lookahead)
        num_blocks = (np.minimum(num_tokens, num_most) + (self._block_size - 1)) // self._block_size
        return int(num_blocks.sum())
