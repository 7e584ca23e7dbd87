"""Attention metadata: the geometry of one step's ragged batch.

An executor builds it once per step and all layers share it. Bounds are asserted here, once, so that kernels index
without checks. A batch may be padded to a captured decode size (`pdserve.model.executors.decode_graphs`). Holds no
tokens and no model knowledge.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

SHORT_TOKENS = 8
"""Most new tokens of a row that kernels may attend for as for a decode row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The tokens of each row and the location of its KV. All tensors are int32, on one device.

    Row r's new tokens are ``query_starts[r] .. query_starts[r + 1]`` of the flat batch, at positions
    ``kv_lengths[r] - num_new .. kv_lengths[r]`` of its sequence; token at position p has its KV in block
    ``block_ids[block_starts[r] + p // block_size]`` at offset ``p % block_size``.

    In a padded batch the last rows have no token, and the tokens from ``query_starts[num_rows]`` on belong to no row.
    Kernels write nothing to the pool for padding tokens; their outputs are unspecified.
    """

    words: torch.Tensor
    """``positions``, then ``packed``: the one buffer that is copied to another device."""
    packed: torch.Tensor
    """``num_rows``, then the next four tensors back to back: the batch as the C++ kernels read it."""
    query_starts: torch.Tensor
    """``[num_rows + 1]``, ascending from 0; strictly, except for padding."""
    kv_lengths: torch.Tensor
    """``[num_rows]``: tokens of each sequence after this step, new tokens included; 0 in padding."""
    block_starts: torch.Tensor
    """``[num_rows + 1]``: each row's range in ``block_ids``."""
    block_ids: torch.Tensor
    """``[total]``: pool blocks of every row in sequence order, row after row; may have spare room at the end."""
    positions: torch.Tensor
    """``[num_tokens]``: position of every new token in its sequence; 0 in padding."""
    min_new_tokens: int
    """Fewest new tokens of any row, padding excluded."""
    max_new_tokens: int
    """Most new tokens of any row."""
    most_short_tokens: int
    """Most new tokens of any row that has at most `SHORT_TOKENS`; 0 if none has."""

    @property
    def num_tokens(self) -> int:
        """New tokens of the batch, padding included."""
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
        num_padding: int = 0,
    ) -> AttentionMetadata:
        """Describe rows of ``num_new_tokens`` after ``cached_lengths`` whose KV is in ``block_tables``.

        A table may be longer than its row needs. Asserts that every row has a new token, that every table covers its
        row, and that every block id lies in a pool of ``num_blocks``.

        Args:
            num_padding: rows without a token, and tokens without a row, at the end.
        """
        words = attention_words(
            num_new_tokens,
            cached_lengths,
            block_tables,
            num_blocks=num_blocks,
            block_size=block_size,
            num_padding=num_padding,
        )
        return cls.of_words(
            torch.from_numpy(words),
            num_rows=len(num_new_tokens) + num_padding,
            num_tokens=sum(num_new_tokens) + num_padding,
            min_new_tokens=min(num_new_tokens),
            max_new_tokens=max(num_new_tokens),
            most_short_tokens=most_short(num_new_tokens),
        )

    @classmethod
    def of_words(
        cls,
        words: torch.Tensor,
        *,
        num_rows: int,
        num_tokens: int,
        min_new_tokens: int,
        max_new_tokens: int,
        most_short_tokens: int,
    ) -> AttentionMetadata:
        """View a buffer from `attention_words`, on any device; spare room at its end belongs to ``block_ids``."""
        num_block_ids = len(words) - num_tokens - 1 - 2 * (num_rows + 1) - num_rows
        positions, packed = words.split_with_sizes([num_tokens, len(words) - num_tokens])
        query_starts, kv_lengths, block_starts, block_ids = packed[1:].split_with_sizes(
            [num_rows + 1, num_rows, num_rows + 1, num_block_ids]
        )
        return cls(
            words=words,
            packed=packed,
            query_starts=query_starts,
            kv_lengths=kv_lengths,
            block_starts=block_starts,
            block_ids=block_ids,
            positions=positions,
            min_new_tokens=min_new_tokens,
            max_new_tokens=max_new_tokens,
            most_short_tokens=most_short_tokens,
        )

    def to(self, device: torch.device) -> AttentionMetadata:
        """Copy to ``device`` in one transfer that the host does not wait for."""
        if device == self.words.device:
            return self
        pinned = self.words.pin_memory() if device.type == "cuda" else self.words
        return self.of_words(
            pinned.to(device, non_blocking=True),
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            min_new_tokens=self.min_new_tokens,
            max_new_tokens=self.max_new_tokens,
            most_short_tokens=self.most_short_tokens,
        )


def most_short(num_new_tokens: Sequence[int]) -> int:
    """``AttentionMetadata.most_short_tokens`` of such rows."""
    return max((count for count in num_new_tokens if count <= SHORT_TOKENS), default=0)


def attention_words(
    num_new_tokens: Sequence[int],
    cached_lengths: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    num_blocks: int,
    block_size: int,
    num_padding: int = 0,
) -> npt.NDArray[np.int32]:
    """``AttentionMetadata.words`` on the host, for `AttentionMetadata.of_words`; see `AttentionMetadata.build`."""
    # Plain lists except for the block ids: packs a decode step of few rows in a few microseconds.
    num_rows, num_tokens = len(num_new_tokens), sum(num_new_tokens)
    kv_lengths = [new + cached for new, cached in zip(num_new_tokens, cached_lengths, strict=True)]
    table_lengths = [len(table) for table in block_tables]
    assert num_rows > 0, "a step has at least one row"
    assert min(num_new_tokens) > 0, f"a row without a new token: {num_new_tokens}"
    assert min(cached_lengths) >= 0, f"a negative cached length: {cached_lengths}"
    for kv_length, table_length in zip(kv_lengths, table_lengths, strict=True):
        assert table_length * block_size >= kv_length, f"a block table is short of its tokens: {kv_lengths}"
    num_block_ids = sum(table_lengths)
    tables = (table if isinstance(table, array) else array("i", table) for table in block_tables)
    block_ids = np.frombuffer(b"".join(tables), np.int32)
    assert block_ids.min() >= 0, f"block id {block_ids.min()} is negative"
    assert block_ids.max() < num_blocks, f"block id {block_ids.max()} is outside a pool of {num_blocks} blocks"
    assert max(*kv_lengths, num_tokens, num_block_ids, num_blocks) < 2**31, "a step is counted in 32 bits"
    if num_tokens == num_rows:
        positions: Sequence[int] | npt.NDArray[np.int64] = cached_lengths
    else:
        ends = np.cumsum(num_new_tokens)
        positions = np.arange(num_tokens) + np.repeat(np.array(kv_lengths) - ends, num_new_tokens)
    zeros = [0] * num_padding
    packed = [num_rows + num_padding, 0, *accumulate(num_new_tokens), *[num_tokens] * num_padding]
    packed += [*kv_lengths, *zeros, 0, *accumulate(table_lengths), *[num_block_ids] * num_padding]
    words = np.zeros(num_tokens + num_padding + len(packed) + num_block_ids, np.int32)
    words[:num_tokens] = positions
    words[num_tokens + num_padding : len(words) - num_block_ids] = packed
    words[len(words) - num_block_ids :] = block_ids
    return words
