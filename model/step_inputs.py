"""A step's numbers as one run of 32-bit words, so that one copy takes them to the device.

Packed by the executors on the host, which checks them there; viewed on the device, where the places of all parts follow
from counts alone. Copies nothing itself.

Shape suffixes: T new tokens, W tokens whose hidden states are wanted, R tokens that the step before sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import StepRow
from pdserve.kernels.metadata import AttentionMetadata, attention_words


class Wanted(NamedTuple):
    """Whose hidden states a step has to return."""

    sampling: list[int]
    """Rows that sample."""
    asking: list[int]
    """Rows of which log probabilities of the prompt are wanted."""

    @classmethod
    def by(cls, rows: Sequence[StepRow]) -> Wanted:
        return cls(
            [index for index, row in enumerate(rows) if row.sample is not None],
            [index for index, row in enumerate(rows) if row.prompt_targets],
        )

    def tokens(self, rows: Sequence[StepRow]) -> npt.NDArray[np.int64]:
        """Indices into the new tokens: the last ones of rows that sample, then the runs of those that ask."""
        ends = np.cumsum([row.num_new_tokens for row in rows])
        starts = [ends[index] - rows[index].num_new_tokens for index in self.asking]
        runs = [
            start + np.arange(len(rows[index].prompt_targets)) for start, index in zip(starts, self.asking, strict=True)
        ]
        return np.concatenate((ends[self.sampling] - 1, *runs))

    def split(self, hidden_WE: torch.Tensor, rows: Sequence[StepRow]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What `tokens` asked for: of the rows that sample, and of each row that asks."""
        lengths = [len(rows[index].prompt_targets) for index in self.asking]
        hidden_BE, *prompts = torch.split(hidden_WE, [len(self.sampling), *lengths])
        return hidden_BE, prompts


class StepShape(NamedTuple):
    """What the places in a packed step follow from."""

    num_rows: int
    num_tokens: int
    num_wanted: int
    min_new_tokens: int
    max_new_tokens: int


class StepTensors(NamedTuple):
    """A packed step, viewed on the device. All are int32."""

    tokens: torch.Tensor
    """``[T]``: the new tokens, as far as the host knows them."""
    late: torch.Tensor
    """``[T]``: of a token that it does not know, its place among those that the step before sampled; else -1."""
    wanted: torch.Tensor
    """``[W]``: indices into the new tokens."""
    metadata: AttentionMetadata

    @classmethod
    def of(cls, words: torch.Tensor, shape: StepShape) -> StepTensors:
        """View what `pack_step` returned; what lies behind it is room for ids of blocks."""
        num_tokens = shape.num_tokens
        num_ahead = 2 * num_tokens + shape.num_wanted
        tokens_T, late_T, wanted_W, rest = words.split_with_sizes(
            [num_tokens, num_tokens, shape.num_wanted, len(words) - num_ahead]
        )
        metadata = AttentionMetadata.of_words(
            rest,
            num_rows=shape.num_rows,
            num_tokens=num_tokens,
            min_new_tokens=shape.min_new_tokens,
            max_new_tokens=shape.max_new_tokens,
        )
        return cls(tokens_T, late_T, wanted_W, metadata)

    def known_tokens(self, late_R: torch.Tensor) -> torch.Tensor:
        """int64 ``[T]``: the new tokens, those among them that the step before sampled.

        Args:
            late_R: int64, what it sampled.
        """
        return torch.where(self.late < 0, self.tokens, late_R.index_select(0, self.late.clamp(min=0)))


def decode_shape(num_rows: int) -> StepShape:
    """Of rows with one new token each: no wanted ones are named, because all are."""
    return StepShape(num_rows, num_rows, 0, 1, 1)


def num_step_words(shape: StepShape, num_block_ids: int) -> int:
    """Words of a packed step."""
    return 3 * shape.num_tokens + shape.num_wanted + 1 + 2 * (shape.num_rows + 1) + shape.num_rows + num_block_ids


def pack_step(
    rows: Sequence[StepRow],
    late_places: Sequence[int],
    wanted: npt.NDArray[np.int64],
    layout: KvLayout,
    vocab_size: int,
    num_padding: int = 0,
) -> npt.NDArray[np.int32]:
    """A step for `StepTensors.of`.

    Asserts what kernels rely on: tokens and blocks that exist, tables that cover their rows.

    Args:
        late_places: of each row, ``StepTensors.late`` of its last token.
        wanted: indices into the new tokens.
        num_padding: as of `AttentionMetadata.build`.
    """
    num_new = [row.num_new_tokens for row in rows]
    for row in rows:
        assert row.previous_row < 0 or not row.tokens, "a row has tokens of its own or the previous step's, not both"
    tokens = np.fromiter(
        chain.from_iterable((0,) if row.previous_row >= 0 else row.tokens for row in rows), np.int64, sum(num_new)
    )
    assert tokens.min() >= 0, f"token id {tokens.min()} is negative"
    assert tokens.max() < vocab_size, f"token id {tokens.max()} is outside a vocabulary of {vocab_size}"
    late = np.full(len(tokens) + num_padding, -1, np.int64)
    late[np.cumsum(num_new) - 1] = late_places
    attention = attention_words(
        num_new,
        [row.cached_length for row in rows],
        [row.block_table for row in rows],
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        num_padding=num_padding,
    )
    return np.concatenate((tokens, np.zeros(num_padding), late, wanted, attention), dtype=np.int32, casting="unsafe")
