"""Prefill attention in Triton's interpreter, with tiny tiles, against float64 by the definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pdserve.kernels.kv_pool import LARGEST_VALUES
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton.configs import AttentionTile
from pdserve.kernels.triton.prefill_attention import prefill_attention
from tests.kernels.paged_batch import (
    LAYER,
    PagedBatch,
    Row,
    far_batch,
    make_batch,
    poison,
    reference_attention,
    reference_lse,
    sinks_of,
)

FLOAT8 = torch.float8_e4m3fn
TILE = AttentionTile(rows=16, keys=16, num_warps=4, num_stages=1)
MIXED = (Row(0, 15), Row(16, 1), Row(0, 16), Row(15, 1), Row(0, 17), Row(32, 5), Row(0, 1))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def attend(
    batch: PagedBatch,
    rule: AttentionRule,
    *,
    dtype: torch.dtype = torch.float32,
    tile: AttentionTile = TILE,
    min_new_tokens: int = 1,
    lse_TN: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the kernel leaves of an output of NaN; queries of ``dtype``."""
    o_TND = torch.full(batch.queries.shape, math.nan, dtype=dtype)
    prefill_attention(
        batch.queries.to(dtype),
        o_TND,
        batch.kv_pool,
        LAYER,
        batch.metadata,
        rule,
        min_new_tokens=min_new_tokens,
        tile=tile,
        lse_TN=lse_TN,
    )
    return o_TND


def rule_of(batch: PagedBatch, *, window: int = 0, softcap: float = 0.0) -> AttentionRule:
    return AttentionRule(scale=batch.kv_pool.shape.head_dim**-0.5, window=window, softcap=softcap)


def assert_matches(
    batch: PagedBatch,
    rule: AttentionRule | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    tile: AttentionTile = TILE,
) -> None:
    rule = rule or rule_of(batch)
    o_TND = attend(batch, rule, dtype=dtype, tile=tile)
    tolerance = TOLERANCE[dtype]
    rounded = PagedBatch(batch.rows, batch.queries.to(dtype).float(), batch.kv_pool, batch.block_tables, batch.metadata)
    torch.testing.assert_close(o_TND.double(), reference_attention(rounded, rule), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(1, torch.float32), (3, torch.bfloat16), (5, torch.float16), (7, torch.int8), (7, FLOAT8), (8, torch.float32)],
    ids=str,
)
def test_mixed_rows_of_awkward_lengths(group: int, dtype: torch.dtype) -> None:
    assert_matches(make_batch(MIXED, group=group, dtype=dtype, num_kv_heads=1, head_dim=16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pool_dtype", [None, *LARGEST_VALUES], ids=str)
def test_half_precision(dtype: torch.dtype, pool_dtype: torch.dtype | None) -> None:
    batch = make_batch((Row(15, 1), Row(16, 18)), dtype=pool_dtype or dtype, head_dim=16)
    assert_matches(batch, dtype=dtype)
    assert_matches(batch, rule_of(batch, window=9, softcap=20.0), dtype=dtype)


@pytest.mark.parametrize("head_dim", [24, 80, 256])
def test_head_dims(head_dim: int) -> None:
    assert_matches(make_batch((Row(17, 3), Row(0, 9)), head_dim=head_dim, num_kv_heads=1))


@pytest.mark.parametrize("block_size", [1, 20, 32])
def test_any_block_size(block_size: int) -> None:
    rows = (Row(block_size - 1, 1), Row(block_size, 1), Row(0, block_size + 1), Row(2 * block_size + 1, 3))
    batch = make_batch(rows, block_size=block_size, num_kv_heads=1, head_dim=16)
    assert_matches(batch)
    assert_matches(batch, rule_of(batch, window=block_size + 1))


@pytest.mark.parametrize("tile", [(32, 16), (16, 32), (64, 16)])
def test_a_long_chunk_beside_single_tokens(tile: tuple[int, int]) -> None:
    batch = make_batch((Row(40, 1), Row(19, 129), Row(0, 1)), num_kv_heads=1, head_dim=16, dtype=torch.int8)
    assert_matches(batch, tile=AttentionTile(*tile, num_warps=4, num_stages=1))


@pytest.mark.parametrize(
    ("window", "dtype"), [*((window, torch.float32) for window in (1, 15, 16, 17, 33)), (17, FLOAT8)], ids=str
)
def test_a_window_ends_anywhere_and_nothing_before_it_is_read(window: int, dtype: torch.dtype) -> None:
    batch = make_batch((Row(90, 1), Row(70, 25), *MIXED[:3]), group=3, num_kv_heads=1, head_dim=16, dtype=dtype)
    for row, table in zip(batch.rows, batch.block_tables, strict=True):
        first_seen = max(0, row.cached - window + 1)
        poison(batch.kv_pool, table[: first_seen // 16])
    assert_matches(batch, rule_of(batch, window=window))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_softcap(softcap: float, spread: float) -> None:
    batch = make_batch(MIXED[:4], spread=spread, num_kv_heads=1, head_dim=16)
    assert_matches(batch, rule_of(batch, softcap=softcap))


def test_sharp_and_huge_scores_stay_finite() -> None:
    batch = make_batch((Row(20, 3), Row(0, 18)), spread=1e4, num_kv_heads=1, head_dim=16)
    o_TND = attend(batch, rule_of(batch))
    torch.testing.assert_close(o_TND.double(), reference_attention(batch, rule_of(batch)), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (20, torch.float32), (20, FLOAT8)], ids=str)
def test_sinks_take_weight_from_the_keys(window: int, dtype: torch.dtype) -> None:
    batch = make_batch((*MIXED, Row(48, 30)), group=3, head_dim=16, dtype=dtype)
    assert_matches(batch, replace(rule_of(batch, window=window), sinks=sinks_of(6)))


@pytest.mark.parametrize("sinks", [None, sinks_of(6)], ids=["", "sinks"])
def test_log_sum_exp(sinks: torch.Tensor | None) -> None:
    """Of the keys alone."""
    batch = make_batch(MIXED, group=3, head_dim=16)
    rule = replace(rule_of(batch, window=20), sinks=sinks)
    lse_TN = torch.full(batch.queries.shape[:2], math.nan)
    attend(batch, rule, lse_TN=lse_TN)
    torch.testing.assert_close(lse_TN.double(), reference_lse(batch, rule), atol=1e-5, rtol=1e-5)


def test_short_rows_are_left_to_others() -> None:
    batch = make_batch((Row(20, 1), Row(3, 4), Row(16, 2)), num_kv_heads=1, head_dim=16)
    o_TND = attend(batch, rule_of(batch), min_new_tokens=3)
    assert o_TND[[0, 5, 6]].isnan().all()
    expected = reference_attention(batch, rule_of(batch))
    torch.testing.assert_close(o_TND[1:5].double(), expected[1:5], atol=2e-5, rtol=2e-5)


def test_a_row_does_not_depend_on_its_neighbours_or_its_chunks() -> None:
    batch = make_batch((Row(3, 1), Row(0, 45), Row(20, 2)), group=3, num_kv_heads=1, head_dim=16)
    rule = rule_of(batch, window=30)
    together = attend(batch, rule)
    for cached, new in ((0, 45), (17, 20), (44, 1)):
        metadata = AttentionMetadata.build(
            [new], [cached], batch.block_tables[1:2], num_blocks=batch.kv_pool.shape.num_blocks, block_size=16
        )
        q_TND = batch.queries[1 + cached : 1 + cached + new]
        alone = PagedBatch((Row(cached, new),), q_TND, batch.kv_pool, batch.block_tables[1:2], metadata)
        torch.testing.assert_close(attend(alone, rule), together[1 + cached : 1 + cached + new], atol=1e-6, rtol=1e-6)
        if new == 45:
            assert torch.equal(attend(alone, rule), together[1:46])


def test_more_rows_than_are_looked_through_at_once() -> None:
    batch = make_batch((Row(0, 1),) * 127 + (Row(2, 3), Row(1, 20)), num_kv_heads=1, head_dim=16, group=1)
    o_TND = attend(batch, rule_of(batch), min_new_tokens=2)
    expected = reference_attention(batch, rule_of(batch))
    torch.testing.assert_close(o_TND[127:].double(), expected[127:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [*LARGEST_VALUES, torch.bfloat16], ids=str)
def test_blocks_beyond_32_bits(dtype: torch.dtype) -> None:
    near = make_batch((Row(20, 5),), num_kv_heads=1, head_dim=16, dtype=dtype)
    far = far_batch(near)
    assert torch.equal(attend(far, rule_of(far)), attend(near, rule_of(near)))
