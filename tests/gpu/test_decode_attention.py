"""Decode attention on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.triton.configs import kv_split
from pdserve.kernels.triton.decode_attention import decode_attention
from tests.gpu.attention_cases import (
    BF16,
    CASES,
    DECODE_ROWS,
    FP8,
    INT8,
    Case,
    assert_attends,
    assert_reaches_beyond_32_bits,
    batch_of,
    each_of,
    launched,
)
from tests.gpu.device import some
from tests.kernels.paged_batch import PagedBatch


@each_of(some(CASES))
def test_decode(case: Case) -> None:
    batch, rule = batch_of(case, DECODE_ROWS)
    assert_attends(launched(decode_attention, batch, rule), batch, rule)


@each_of(some(CASES[:3], 1))
def test_fixed_chunks_make_a_row_independent_of_its_neighbours(case: Case) -> None:
    batch, rule = batch_of(case, DECODE_ROWS)
    split = kv_split(batch.queries, batch.kv_pool, is_fixed=True)
    attend = partial(decode_attention, split=split)
    together = launched(attend, batch, rule)
    starts = [sum(row.new for row in batch.rows[:index]) for index in range(len(batch.rows))]
    for row, table, start in list(zip(batch.rows, batch.block_tables, starts, strict=True))[::-2]:
        metadata = AttentionMetadata.build(
            [row.new], [row.cached], [table], num_blocks=batch.kv_pool.shape.num_blocks, block_size=case.block_size
        )
        tokens = slice(start, start + row.new)
        alone = PagedBatch((row,), batch.queries[tokens], batch.kv_pool, [table], metadata)
        assert torch.equal(launched(attend, alone, rule), together[tokens])


@pytest.mark.parametrize("dtype", some((INT8, BF16, FP8), 1), ids=str)
def test_blocks_beyond_32_bits(dtype: torch.dtype) -> None:
    assert_reaches_beyond_32_bits(decode_attention, dtype)
