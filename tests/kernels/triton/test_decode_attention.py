"""Decode attention in Triton's interpreter, with tiny tiles and chunks, against float64 by the definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pdserve.kernels.kv_pool import LARGEST_VALUES
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton.configs import AttentionTile, KvSplit
from pdserve.kernels.triton.decode_attention import decode_attention
from tests.kernels.launch_recorder import recorded_launches
from tests.kernels.paged_batch import (
    LAYER,
    PagedBatch,
    Row,
    far_batch,
    make_batch,
    poison,
    reference_attention,
    sinks_of,
)

FLOAT8 = torch.float8_e4m3fn
TILE = AttentionTile(rows=16, keys=16, num_warps=4, num_stages=1)
SPLIT = KvSplit(num_chunks=4, chunk_tokens=16)
FIXED = KvSplit(num_chunks=1, chunk_tokens=32, is_fixed=True)
LENGTHS = (15, 16, 17, 0, 40)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def singles(lengths: tuple[int, ...] = LENGTHS) -> tuple[Row, ...]:
    return tuple(Row(length, 1) for length in lengths)


def attend(
    batch: PagedBatch,
    rule: AttentionRule,
    *,
    dtype: torch.dtype = torch.float32,
    split: KvSplit = SPLIT,
    max_new_tokens: int | None = None,
    tile: AttentionTile = TILE,
) -> torch.Tensor:
    """What the kernels leave of an output of NaN; queries of ``dtype``."""
    o_TND = torch.full(batch.queries.shape, math.nan, dtype=dtype)
    q_TND = batch.queries.to(dtype)
    # Fills what `torch.empty` gives with NaN: the workspaces.
    torch.use_deterministic_algorithms(True)
    decode_attention(
        q_TND,
        o_TND,
        batch.kv_pool,
        LAYER,
        batch.metadata,
        rule,
        max_new_tokens=max_new_tokens,
        split=split,
        tile=tile,
    )
    torch.use_deterministic_algorithms(False)
    return o_TND


def rule_of(batch: PagedBatch, *, window: int = 0, softcap: float = 0.0) -> AttentionRule:
    return AttentionRule(scale=batch.kv_pool.shape.head_dim**-0.5, window=window, softcap=softcap)


def assert_matches(
    batch: PagedBatch,
    rule: AttentionRule | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    split: KvSplit = SPLIT,
    tile: AttentionTile = TILE,
) -> None:
    rule = rule or rule_of(batch)
    o_TND = attend(batch, rule, dtype=dtype, split=split, tile=tile)
    tolerance = TOLERANCE[dtype]
    rounded = replace(batch, queries=batch.queries.to(dtype).float())
    torch.testing.assert_close(o_TND.double(), reference_attention(rounded, rule), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(1, torch.float32), (3, torch.bfloat16), (5, torch.float16), (7, torch.int8), (7, FLOAT8), (8, torch.float32)],
    ids=str,
)
def test_rows_of_awkward_lengths(group: int, dtype: torch.dtype) -> None:
    assert_matches(make_batch(singles(), group=group, dtype=dtype, num_kv_heads=2 if group == 3 else 1, head_dim=16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pool_dtype", [None, *LARGEST_VALUES], ids=str)
def test_half_precision(dtype: torch.dtype, pool_dtype: torch.dtype | None) -> None:
    batch = make_batch(singles((20, 3)), dtype=pool_dtype or dtype, head_dim=16)
    assert_matches(batch, dtype=dtype)
    assert_matches(batch, rule_of(batch, window=9, softcap=20.0), dtype=dtype)


@pytest.mark.parametrize("head_dim", [24, 80, 256])
def test_head_dims(head_dim: int) -> None:
    assert_matches(make_batch(singles((50, 9)), head_dim=head_dim, num_kv_heads=1))


@pytest.mark.parametrize("block_size", [1, 20, 32])
def test_any_block_size(block_size: int) -> None:
    lengths = (block_size - 1, block_size, 40)
    batch = make_batch(singles(lengths), block_size=block_size, num_kv_heads=1, head_dim=16)
    assert_matches(batch)
    assert_matches(batch, rule_of(batch, window=block_size + 1))


@pytest.mark.parametrize("num_chunks", [1, 3, 20])
def test_any_number_of_chunks(num_chunks: int) -> None:
    batch = make_batch(singles((140, 20, 3)), num_kv_heads=1, head_dim=16)
    assert_matches(batch, split=KvSplit(num_chunks, chunk_tokens=16))


def test_only_rows_that_are_split_are_merged() -> None:
    batch = make_batch(singles((3, 140, 5, 9, 120, 4)), num_kv_heads=1, group=3, head_dim=16)
    with recorded_launches() as recorded:
        assert_matches(batch, split=KvSplit(3, chunk_tokens=16))
    grids = [launch[1] for launch in recorded.launches if getattr(launch[0], "__name__", "") == "_merge_kernel"]
    assert grids == [(3, 3)]


def test_more_chunks_than_are_merged_at_once() -> None:
    batch = make_batch(singles((300,)), num_kv_heads=1, group=8, head_dim=16, spread=3.0)
    assert_matches(batch, split=KvSplit(1, chunk_tokens=16, is_fixed=True))


@pytest.mark.parametrize("chunk_tokens", [32, 128])
def test_chunks_of_a_fixed_length(chunk_tokens: int) -> None:
    batch = make_batch(singles((99, 31, 32)), num_kv_heads=1, head_dim=16)
    assert_matches(batch, split=KvSplit(1, chunk_tokens, is_fixed=True))


@pytest.mark.parametrize("split", [SPLIT, FIXED], ids=["shared", "fixed"])
@pytest.mark.parametrize("window", [0, 10])
def test_several_new_tokens(split: KvSplit, window: int) -> None:
    """Some see nothing of their row's last chunk, or of its first."""
    batch = make_batch((Row(29, 5), Row(0, 3), Row(60, 1)), num_kv_heads=1, group=3, head_dim=16)
    assert_matches(batch, rule_of(batch, window=window), split=split)


def test_more_new_tokens_than_a_tile_of_16_has_rows() -> None:
    assert_matches(make_batch((Row(30, 7), Row(2, 1)), num_kv_heads=1, group=5, head_dim=16, dtype=torch.int8))


@pytest.mark.parametrize(
    ("window", "dtype"), [(1, torch.float32), (16, torch.float32), (17, torch.float32), (17, FLOAT8)], ids=str
)
def test_a_window_ends_anywhere_and_nothing_before_it_is_read(window: int, dtype: torch.dtype) -> None:
    batch = make_batch(singles((90, 79, 16)), group=3, num_kv_heads=1, head_dim=16, dtype=dtype)
    for row, table in zip(batch.rows, batch.block_tables, strict=True):
        poison(batch.kv_pool, table[: max(0, row.cached - window + 1) // 16])
    assert_matches(batch, rule_of(batch, window=window))


@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_softcap(spread: float) -> None:
    batch = make_batch(singles((33, 8)), spread=spread, num_kv_heads=1, head_dim=16)
    assert_matches(batch, rule_of(batch, softcap=30.0))


@pytest.mark.parametrize("split", [SPLIT, FIXED], ids=["shared", "fixed"])
@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (17, torch.float32), (17, torch.int8)], ids=str)
def test_a_sink_counts_once_however_many_chunks(split: KvSplit, window: int, dtype: torch.dtype) -> None:
    batch = make_batch((Row(140, 1), Row(0, 1), Row(29, 5)), num_kv_heads=2, group=3, head_dim=16, dtype=dtype)
    assert_matches(batch, replace(rule_of(batch, window=window), sinks=sinks_of(6)), split=split)


def test_long_rows_are_left_to_others() -> None:
    batch = make_batch((Row(20, 1), Row(3, 6), Row(40, 2)), num_kv_heads=1, head_dim=16)
    o_TND = attend(batch, rule_of(batch), max_new_tokens=2)
    assert o_TND[1:7].isnan().all()
    expected = reference_attention(batch, rule_of(batch))
    torch.testing.assert_close(o_TND[[0, 7, 8]].double(), expected[[0, 7, 8]], atol=2e-5, rtol=2e-5)


def test_fixed_chunks_make_a_row_independent_of_its_neighbours() -> None:
    rows = singles((140, 40, 3))
    batch = make_batch(rows, group=3, num_kv_heads=1, head_dim=16)
    rule = rule_of(batch)
    together = attend(batch, rule, split=FIXED)
    for index in (2, 1, 0):
        table = batch.block_tables[index]
        metadata = AttentionMetadata.build(
            [1], [rows[index].cached], [table], num_blocks=batch.kv_pool.shape.num_blocks, block_size=16
        )
        alone = PagedBatch(rows[index : index + 1], batch.queries[index : index + 1], batch.kv_pool, [table], metadata)
        assert torch.equal(attend(alone, rule, split=FIXED), together[index : index + 1])


def test_a_fault_of_one_row_stays_there() -> None:
    batch = make_batch(singles((20, 40)), num_kv_heads=1, head_dim=16)
    batch.kv_pool.values[batch.block_tables[1][1], :, LAYER, 0, 2] = math.nan
    o_TND = attend(batch, rule_of(batch))
    assert o_TND[0].isfinite().all()
    assert o_TND[1].isnan().all()


@pytest.mark.parametrize("dtype", [*LARGEST_VALUES, torch.bfloat16], ids=str)
def test_blocks_beyond_32_bits(dtype: torch.dtype) -> None:
    near = make_batch(singles((20, 40)), num_kv_heads=1, head_dim=16, dtype=dtype)
    far = far_batch(near)
    assert torch.equal(attend(far, rule_of(far)), attend(near, rule_of(near)))
