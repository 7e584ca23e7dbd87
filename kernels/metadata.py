"""The geometry of one step's ragged batch, as every attention kernel takes it.

Built once per step by an executor and shared by all layers. Bounds are asserted here, once, so that kernels index
without checks. Holds no tokens and no model knowledge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Which tokens belong to which row, and where each row's KV lies. All tensors are int32, on one device.

    Row r's new tokens are ``query_starts[r] .. query_starts[r + 1]`` of the flat batch, at positions
    ``kv_lengths[r] - num_new .. kv_lengths[r]`` of its sequence; token at position p has its KV in block
    ``block_ids[block_starts[r] + p // block_size]`` at offset ``p % block_size``.
    """

    packed: torch.Tensor
    """``num_rows``, then the five tensors that follow, one behind the other: all that the C++ kernels are told, and all
    that is copied to another device."""
    query_starts: torch.Tensor
    """``[num_rows + 1]``, ascending strictly from 0."""
    kv_lengths: torch.Tensor
    """``[num_rows]``: tokens of each sequence once this step is done, the new ones included."""
    block_starts: torch.Tensor
    """``[num_rows + 1]``: each row's range in ``block_ids``."""
    block_ids: torch.Tensor
    """``[total]``: pool blocks of every row in sequence order, one row after the other."""
    positions: torch.Tensor
    """``[num_tokens]``: of every new token in its sequence."""
    min_new_tokens: int
    """Of the row that has the fewest."""
    max_new_tokens: int
    """Of the row that has the most."""

    @property
    def num_tokens(self) -> int:
        """New tokens of the batch."""
        return self.positions.shape[0]

    @property
    def num_rows(self) -> int:
        return self.kv_lengths.shape[0]

    @classmethod
    def build(
        cls,
        num_new_tokens: Sequence[int],
        cached_lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        num_blocks: int,
        block_size: int,
    ) -> AttentionMetadata:
        """Describe rows of ``num_new_tokens`` after ``cached_lengths`` whose KV is in ``block_tables``.

        A table may be longer than its row needs. Asserts that every row has a new token, that every table covers its
        row, and that every block id lies in a pool of ``num_blocks``.
        """
        num_rows = len(num_new_tokens)
        new_tokens = np.fromiter(num_new_tokens, np.int64, num_rows)
        kv_lengths = np.fromiter(cached_lengths, np.int64, num_rows) + new_tokens
        table_lengths = np.fromiter(map(len, block_tables), np.int64, num_rows)
        block_ids = np.fromiter(chain.from_iterable(block_tables), np.int64, table_lengths.sum())
        assert num_rows > 0, "a step has at least one row"
        assert (new_tokens > 0).all(), f"a row without a new token: {num_new_tokens}"
        assert (kv_lengths >= new_tokens).all(), f"a negative cached length: {cached_lengths}"
        assert (table_lengths * block_size >= kv_lengths).all(), f"a block table is short of its tokens: {kv_lengths}"
        assert block_ids.min() >= 0, f"block id {block_ids.min()} is negative"
        assert block_ids.max() < num_blocks, f"block id {block_ids.max()} is outside a pool of {num_blocks} blocks"
        ends = new_tokens.cumsum()
        positions = np.arange(ends[-1]) + np.repeat(kv_lengths - ends, new_tokens)
        parts = ([num_rows, 0], ends, kv_lengths, [0], table_lengths.cumsum(), block_ids, positions)
        return cls._of_packed(
            _int32(np.concatenate(parts)),
            num_rows=num_rows,
            num_tokens=int(ends[-1]),
            min_new_tokens=int(new_tokens.min()),
            max_new_tokens=int(new_tokens.max()),
        )

    @classmethod
    def _of_packed(
        cls, packed: torch.Tensor, *, num_rows: int, num_tokens: int, min_new_tokens: int, max_new_tokens: int
    ) -> AttentionMetadata:
        num_block_ids = len(packed) - 1 - 2 * (num_rows + 1) - num_rows - num_tokens
        query_starts, kv_lengths, block_starts, block_ids, positions = packed[1:].split_with_sizes(
            [num_rows + 1, num_rows, num_rows + 1, num_block_ids, num_tokens]
        )
        return cls(
            packed=packed,
            query_starts=query_starts,
            kv_lengths=kv_lengths,
            block_starts=block_starts,
            block_ids=block_ids,
            positions=positions,
            min_new_tokens=min_new_tokens,
            max_new_tokens=max_new_tokens,
        )

    def to(self, device: torch.device) -> AttentionMetadata:
        """The same on ``device``, by one copy that the host does not wait for."""
        if device == self.packed.device:
            return self
        pinned = self.packed.pin_memory() if device.type == "cuda" else self.packed
        return self._of_packed(
            pinned.to(device, non_blocking=True),
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            min_new_tokens=self.min_new_tokens,
            max_new_tokens=self.max_new_tokens,
        )


def _int32(values: np.ndarray) -> torch.Tensor:
    assert values.max() < 2**31, "a step's tokens and blocks are counted in 32 bits"
    return torch.from_numpy(values.astype(np.int32))
