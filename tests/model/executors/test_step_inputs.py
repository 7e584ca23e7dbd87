"""Packed steps are read on the device as they were meant on the host."""

from __future__ import annotations

import numpy as np
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepRow
from pdserve.model.executors.step_inputs import (
    OutputRows,
    StepShape,
    StepTensors,
    decode_shape,
    num_input_words,
    pack_step,
)

LAYOUT = KvLayout(
    num_blocks=9, num_kv_heads=1, num_layers=1, block_size=4, head_dim=8, dtype="float32", model_hash="hash"
)


def row(
    tokens: list[int], cached: int, table: list[int], *, previous_row: int = -1, samples: bool = True, targets: int = 0
) -> StepRow:
    return StepRow(
        sequence_id=0,
        tokens=tokens,
        previous_row=previous_row,
        cached_length=cached,
        block_table=table,
        sample=SamplingParams() if samples else None,
        prompt_targets=[7] * targets,
    )


def test_a_ragged_step_comes_out_as_it_went_in() -> None:
    rows = [
        row([11, 12, 13], 2, [3, 8], samples=False, targets=3),
        row([], 4, [5, 6], previous_row=1),
        row([14], 0, [7]),
    ]
    outputs = OutputRows.of(rows)
    assert outputs == ([1, 2], [0], False)
    indices = outputs.tokens(rows)
    assert indices == [3, 4, 0, 1, 2]
    words = pack_step(rows, [-1, 2, -1], indices, LAYOUT, vocab_size=15)
    shape = StepShape(3, 5, 5, 1, 3, 3)
    assert len(words) == num_input_words(shape, 5)
    step = StepTensors.of(torch.from_numpy(words), shape)
    sampled_P = torch.tensor([20, 21, 22])
    assert step.known_tokens(sampled_P).tolist() == [11, 12, 13, 22, 14]
    assert step.outputs.tolist() == [3, 4, 0, 1, 2]
    assert step.metadata.query_starts.tolist() == [0, 3, 4, 5]
    assert step.metadata.kv_lengths.tolist() == [5, 5, 1]
    assert step.metadata.block_ids.tolist() == [3, 8, 5, 6, 7]
    assert (step.metadata.min_new_tokens, step.metadata.max_new_tokens) == (1, 3)


def test_padding_is_nothing_that_was_asked_for() -> None:
    rows = [row([], 4, [5, 6], previous_row=0), row([9], 0, [7])]
    words = pack_step(rows, [1, -1], (), LAYOUT, vocab_size=15, num_padding=2)
    assert len(words) == num_input_words(decode_shape(4), 3)
    room = torch.cat((torch.from_numpy(words), torch.tensor([8, 8], dtype=torch.int32)))
    step = StepTensors.of(room[: num_input_words(decode_shape(4), 5)], decode_shape(4))
    assert step.known_tokens(torch.tensor([13, 14])).tolist() == [14, 9, 0, 0]
    assert step.metadata.query_starts.tolist() == [0, 1, 2, 2, 2]
    assert step.metadata.block_ids.tolist() == [5, 6, 7, 8, 8]


def test_a_step_in_which_nothing_is_outputs() -> None:
    rows = [row([1, 2], 0, [0], samples=False)]
    assert OutputRows.of(rows).tokens(rows) == []


def test_a_decode_step_returns_every_token_and_draws_begin_at_8_bytes() -> None:
    rows = [row([9], 4, [5, 6]), row([8], 0, [7])]
    outputs = OutputRows.of(rows)
    assert (outputs.is_decode, list(outputs.tokens(rows))) == (True, [])
    for rows_packed in (rows, rows[:1]):
        draws = np.array([3, 4], np.int32)
        words = pack_step(rows_packed, [-1] * len(rows_packed), (), LAYOUT, vocab_size=15, draws=draws)
        assert words[-2:].tolist() == [3, 4]
        assert len(words) % 2 == 0
        step = StepTensors.of(torch.from_numpy(words), decode_shape(len(rows_packed)))
        assert step.tokens.tolist() == [9, 8][: len(rows_packed)]
        assert step.metadata.positions.tolist() == [4, 0][: len(rows_packed)]
