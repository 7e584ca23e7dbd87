"""Packs all inputs of a step into one run of 32-bit words, so that one H2D copy transfers them.

The executor packs and checks inputs on the host and views them on the device, where counts alone determine the offsets
of all parts. Copies nothing itself.

Shape suffixes: T new tokens, O tokens whose hidden states are output, P tokens that the previous step sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.step import StepRow
from pdserve.kernels.metadata import AttentionMetadata, attention_words, most_short


class OutputRows(NamedTuple):
    """Rows whose hidden states a step returns."""

    sampling: list[int]
    asking: list[int]
    """Rows with prompt log probabilities to compute."""
    is_decode: bool
    """Every row has one new token, samples, and requests no prompt log probabilities; all hidden states return."""

    @classmethod
    def of(cls, rows: Sequence[StepRow]) -> OutputRows:
        sampling = [index for index, row in enumerate(rows) if row.sample is not None]
        asking = [index for index, row in enumerate(rows) if row.prompt_targets]
        is_decode = len(sampling) == len(rows) and not asking and all(row.num_new_tokens == 1 for row in rows)
        return cls(sampling, asking, is_decode)

    def sampled(self, rows: Sequence[StepRow]) -> list[tuple[StepRow, int]]:
        """What is sampled: after the last token of each sampling row, and after each of its guesses, with the number of
        guesses before."""
        return [(rows[index], number) for index in self.sampling for number in range(1 + len(rows[index].guesses))]

    def tokens(self, rows: Sequence[StepRow]) -> Sequence[int]:
        """Indices into the new tokens: those after which sampling rows sample, then runs for prompt log probabilities;
        empty if every token is output."""
        if self.is_decode:
            return ()
        starts = [0, *accumulate(row.num_new_tokens for row in rows)]
        last = [range(starts[index + 1] - 1 - len(rows[index].guesses), starts[index + 1]) for index in self.sampling]
        runs = [range(starts[index], starts[index] + len(rows[index].prompt_targets)) for index in self.asking]
        return [*chain.from_iterable(last), *chain.from_iterable(runs)]


class StepShape(NamedTuple):
    """Counts that determine the offsets in packed inputs."""

    num_rows: int
    num_tokens: int
    num_outputs: int
    """0 if all new tokens are outputs, or none are."""
    min_new_tokens: int
    max_new_tokens: int
    most_short_tokens: int
    """As in `AttentionMetadata`."""

    @classmethod
    def of(cls, num_new: Sequence[int], num_outputs: int) -> StepShape:
        """Shape of a step of rows with so many new tokens."""
        return cls(len(num_new), sum(num_new), num_outputs, min(num_new), max(num_new), most_short(num_new))


class StepTensors(NamedTuple):
    """Packed inputs, viewed on the device. All are int32."""

    tokens: torch.Tensor
    """``[T]``: the new tokens; 0 where unknown to the host."""
    previous: torch.Tensor
    """``[T]``: index of a token unknown to the host among the tokens of the previous step; else -1."""
    outputs: torch.Tensor
    """``[O]``: indices into the new tokens."""
    metadata: AttentionMetadata

    @classmethod
    def of(cls, inputs: torch.Tensor, shape: StepShape) -> StepTensors:
        """View the inputs of `pack_step`; trailing words are room for block ids."""
        num_tokens = shape.num_tokens
        num_ahead = 2 * num_tokens + shape.num_outputs
        tokens_T, previous_T, outputs_O, rest = inputs.split_with_sizes(
            [num_tokens, num_tokens, shape.num_outputs, len(inputs) - num_ahead]
        )
        metadata = AttentionMetadata.of_words(
            rest,
            num_rows=shape.num_rows,
            num_tokens=num_tokens,
            min_new_tokens=shape.min_new_tokens,
            max_new_tokens=shape.max_new_tokens,
            most_short_tokens=shape.most_short_tokens,
        )
        return cls(tokens_T, previous_T, outputs_O, metadata)

    def known_tokens(self, sampled_P: torch.Tensor) -> torch.Tensor:
        """Return int64 ``[T]``: the new tokens, completed with ``sampled_P``, the int64 tokens of the previous step."""
        return torch.where(self.previous < 0, self.tokens, sampled_P.index_select(0, self.previous.clamp(min=0)))


def decode_shape(num_rows: int) -> StepShape:
    """Shape of a step whose rows all have one new token and sample."""
    return StepShape(num_rows, num_rows, 0, 1, 1, 1)


def num_input_words(shape: StepShape, num_block_ids: int) -> int:
    return 3 * shape.num_tokens + shape.num_outputs + 1 + 2 * (shape.num_rows + 1) + shape.num_rows + num_block_ids


def pack_step(
    rows: Sequence[StepRow],
    previous_indices: Sequence[int],
    outputs: Sequence[int],
    layout: KvLayout,
    vocab_size: int,
    *,
    num_padding: int = 0,
    draws: npt.NDArray[np.int32] | None = None,
) -> npt.NDArray[np.int32]:
    """Pack inputs for `StepTensors.of`, followed by draws, aligned to 8 bytes.

    Asserts the kernels' assumptions: tokens and blocks exist, and block tables cover their rows.

    Args:
        previous_indices: ``StepTensors.previous`` of each row's last token.
        outputs: ``StepTensors.outputs``.
        num_padding: as in `AttentionMetadata.build`.
    """
    num_new = [row.num_new_tokens for row in rows]
    for row in rows:
        assert row.previous_row < 0 or not row.tokens, "a row has tokens of its own or the previous step's, not both"
    num_tokens = sum(num_new)
    tokens = np.fromiter(
        chain.from_iterable((0,) if row.previous_row >= 0 else (*row.tokens, *row.guesses) for row in rows),
        np.int64,
        num_tokens,
    )
    assert tokens.min() >= 0, f"token id {tokens.min()} is negative"
    assert tokens.max() < vocab_size, f"token id {tokens.max()} is outside a vocabulary of {vocab_size}"
    attention = attention_words(
        num_new,
        [row.cached_length for row in rows],
        [row.block_table for row in rows],
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        num_padding=num_padding,
    )
    ahead = 2 * (num_tokens + num_padding) + len(outputs)
    num_inputs = ahead + len(attention)
    num_draw_words = 0 if draws is None else num_inputs % 2 + len(draws)
    words = np.zeros(num_inputs + num_draw_words, np.int32)
    words[:num_tokens] = tokens
    previous = words[num_tokens + num_padding : 2 * (num_tokens + num_padding)]
    previous[:] = -1
    if max(previous_indices) >= 0:
        previous[np.cumsum(num_new) - 1] = previous_indices
    words[ahead - len(outputs) : ahead] = outputs
    words[ahead:num_inputs] = attention
    if draws is not None:
        words[len(words) - len(draws) :] = draws
    return words
