"""Both kernels of attention in the tiles of serving, against float64 by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch

from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton_attention import paged_attention
from pdserve.kernels.triton_configs import kv_split
from pdserve.kernels.triton_decode_attention import decode_attention
from pdserve.kernels.triton_kernels import TRITON_KERNELS
from pdserve.kernels.triton_prefill_attention import prefill_attention
from tests.gpu.device import on_device, sized, some
from tests.kernels.padding import assert_padding_is_nobodys
from tests.kernels.paged_batch import LAYER, PagedBatch, Row, far_batch, make_batch, poison, reference_attention

BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
TOLERANCE = {FP32: 1e-4, FP16: 5e-3, BF16: 3e-2}
"""Of every element, relative to the size of its vector: a few times what rounding to the dtype leaves."""


class Case(NamedTuple):
    dtype: torch.dtype
    pool_dtype: torch.dtype
    head_dim: int
    group: int
    window: int = 0
    softcap: float = 0.0
    block_size: int = 16


CASES = (
    Case(BF16, BF16, 128, 4),
    Case(BF16, INT8, 64, 8, window=100),
    Case(BF16, FP8, 128, 8),
    Case(BF16, BF16, 64, 1, block_size=32),
    Case(BF16, BF16, 256, 8, window=1000, softcap=30.0),
    Case(BF16, INT8, 128, 4),
    Case(BF16, FP8, 256, 1),
    Case(BF16, FP8, 64, 4, softcap=10.0),
    Case(BF16, INT8, 256, 4, window=300),
    Case(FP16, FP16, 128, 1, window=64),
    Case(FP16, FP16, 80, 5),
    Case(FP16, INT8, 128, 8),
    Case(FP16, FP8, 128, 4),
    Case(FP32, FP32, 64, 4, window=100),
    Case(FP32, FP32, 128, 8, softcap=30.0),
    Case(FP32, FP32, 256, 1),
    Case(FP32, INT8, 64, 8),
    Case(FP32, FP8, 128, 4),
)
MOST_KEYS = 64
"""Of a tile: a window's first tile begins before it, with keys of no weight."""
LENGTHS = sized((0, 15, 16, 17, 255, 256, 257, 1000, 4095), (15, 16))
DECODE_ROWS = (*(Row(length, 1) for length in LENGTHS), Row(130, 3))
SHORT_PREFILLS = (Row(16, 1), Row(32, 17))
PREFILL_ROWS = sized((*SHORT_PREFILLS, Row(0, 15), Row(15, 129), Row(1000, 64), Row(0, 700)), SHORT_PREFILLS)

all_cases = pytest.mark.parametrize("case", some(CASES), ids=lambda case: "-".join(map(str, case)))


def batch_of(case: Case, rows: tuple[Row, ...]) -> tuple[PagedBatch, AttentionRule]:
    """Queries that the dtype can hold; what no token sees is NaN."""
    batch = make_batch(
        rows,
        num_kv_heads=2,
        group=case.group,
        head_dim=case.head_dim,
        block_size=case.block_size,
        dtype=case.pool_dtype,
    )
    for row, table in zip(rows, batch.block_tables, strict=True):
        num_unseen = max(0, row.cached - case.window + 1) if case.window else 0
        poison(batch.kv_pool, table[: num_unseen // MOST_KEYS * MOST_KEYS // case.block_size])
    rule = AttentionRule(scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap)
    return replace(batch, queries=batch.queries.to(case.dtype)), rule


def launched(kernel: Callable[..., None], batch: PagedBatch, rule: AttentionRule) -> torch.Tensor:
    """What a kernel leaves of an output of NaN."""
    o_TND = torch.full_like(batch.queries, math.nan)
    on_device(kernel)(batch.queries, o_TND, batch.kv_pool, LAYER, batch.metadata, rule)
    return o_TND


def assert_attends(o_TND: torch.Tensor, batch: PagedBatch, rule: AttentionRule) -> None:
    expected = reference_attention(batch, rule)
    sizes = expected.square().mean(dim=-1, keepdim=True).sqrt()
    tolerance = TOLERANCE[batch.queries.dtype]
    torch.testing.assert_close(o_TND.double() / sizes, expected / sizes, atol=tolerance, rtol=tolerance)


@all_cases
def test_decode(case: Case) -> None:
    batch, rule = batch_of(case, DECODE_ROWS)
    assert_attends(launched(decode_attention, batch, rule), batch, rule)


@all_cases
def test_prefill(case: Case) -> None:
    batch, rule = batch_of(case, PREFILL_ROWS)
    assert_attends(launched(prefill_attention, batch, rule), batch, rule)


@pytest.mark.parametrize("case", some(CASES[:3], 1), ids=lambda case: "-".join(map(str, case)))
def test_both_over_one_batch(case: Case) -> None:
    batch, rule = batch_of(case, (*PREFILL_ROWS, *DECODE_ROWS))
    o_TND = on_device(paged_attention)(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule)
    assert_attends(o_TND, batch, rule)


@pytest.mark.parametrize("case", some(CASES[:3], 1), ids=lambda case: "-".join(map(str, case)))
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
@pytest.mark.parametrize("kernel", [decode_attention, prefill_attention])
def test_blocks_beyond_32_bits(kernel: Callable[..., None], dtype: torch.dtype) -> None:
    near = make_batch((Row(20, 1), Row(40, 3)), num_kv_heads=1, head_dim=64, dtype=dtype)
    far = far_batch(near)
    rule = AttentionRule(scale=0.125)
    near, far = (replace(batch, queries=batch.queries.bfloat16()) for batch in (near, far))
    o_TND = launched(kernel, far, rule)
    assert torch.equal(o_TND, launched(kernel, near, rule))
    assert_attends(o_TND, near, rule)


@pytest.mark.parametrize("dtype", some((FP32, INT8, FP8), 1), ids=str)
def test_padding_is_nobodys(dtype: torch.dtype) -> None:
    kernels = TRITON_KERNELS._replace(
        rope_and_write_kv=on_device(TRITON_KERNELS.rope_and_write_kv),
        paged_attention=on_device(TRITON_KERNELS.paged_attention),
    )
    assert_padding_is_nobodys(kernels, dtype)
