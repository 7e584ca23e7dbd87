"""Batches for both kernels of attention, which run in the tiles of serving, against float64 by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch

from pdserve.kernels.operations import AttentionRule
from tests.gpu.device import on_device, sized
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

each_of = partial(pytest.mark.parametrize, "case", ids=lambda case: "-".join(map(str, case)))


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


def assert_reaches_beyond_32_bits(kernel: Callable[..., None], dtype: torch.dtype) -> None:
    near = make_batch((Row(20, 1), Row(40, 3)), num_kv_heads=1, head_dim=64, dtype=dtype)
    rule = AttentionRule(scale=0.125)
    near, far = (replace(batch, queries=batch.queries.bfloat16()) for batch in (near, far_batch(near)))
    o_TND = launched(kernel, far, rule)
    assert torch.equal(o_TND, launched(kernel, near, rule))
    assert_attends(o_TND, near, rule)
