"""Both implementations of paged attention against float64 by the definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, DecoderKernels
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from tests.kernels.paged_batch import (
    LAYER,
    NUM_LAYERS,
    PagedBatch,
    Row,
    make_batch,
    nan_pool,
    reference_attention,
    sinks_of,
)

TOLERANCE = 2e-5
MIXED = (Row(0, 15), Row(16, 1), Row(0, 16), Row(15, 1), Row(17, 1), Row(0, 17), Row(32, 5), Row(40, 1), Row(0, 1))

both_kernels = pytest.mark.parametrize("kernels", [CPU_KERNELS, TORCH_KERNELS], ids=["cpu", "torch"])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def rule_of(batch: PagedBatch, *, window: int = 0, softcap: float = 0.0) -> AttentionRule:
    return AttentionRule(scale=batch.kv_pool.shape.head_dim**-0.5, window=window, softcap=softcap)


def assert_matches(
    kernels: DecoderKernels, batch: PagedBatch, rule: AttentionRule | None = None, tolerance: float = TOLERANCE
) -> None:
    rule = rule or rule_of(batch)
    o_TND = kernels.paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule)
    assert o_TND.dtype == torch.float32
    assert o_TND.is_contiguous()
    torch.testing.assert_close(o_TND.double(), reference_attention(batch, rule), atol=tolerance, rtol=tolerance)


@both_kernels
@every_dtype
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_mixed_rows_of_awkward_lengths(kernels: DecoderKernels, dtype: torch.dtype, head_dim: int, group: int) -> None:
    assert_matches(kernels, make_batch(MIXED, group=group, head_dim=head_dim, dtype=dtype, num_kv_heads=1))


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 256])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("window", [0, 9])
def test_products_in_bfloat16(head_dim: int, block_size: int, window: int) -> None:
    rows = (*MIXED, Row(48, 70), Row(1100, 1))
    batch = make_batch(rows, group=7, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16, num_kv_heads=1)
    rule = replace(rule_of(batch, window=window), in_bfloat16=True)
    assert_matches(CPU_KERNELS, batch, rule, tolerance=1e-2)


@both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["fp32", "int8"])
@pytest.mark.parametrize("block_size", [1, 4, 8, 20, 32])
def test_any_block_size(kernels: DecoderKernels, block_size: int, dtype: torch.dtype) -> None:
    lengths = (block_size - 1, block_size, block_size + 1, 3 * block_size + 1)
    rows = tuple(Row(cached, 1) for cached in lengths) + tuple(Row(0, new) for new in lengths if new)
    batch = make_batch((*rows, Row(block_size, 3)), block_size=block_size, dtype=dtype)
    assert_matches(kernels, batch)
    assert_matches(kernels, batch, rule_of(batch, window=block_size + 1))


@both_kernels
@pytest.mark.parametrize("head_dim", [24, 80, 96, 120])
def test_any_head_dim_that_vectors_divide(kernels: DecoderKernels, head_dim: int) -> None:
    assert_matches(kernels, make_batch((Row(20, 2), Row(9, 1)), head_dim=head_dim))


@both_kernels
@every_dtype
@pytest.mark.parametrize("window", [0, 20])
def test_prefill_chunk_over_a_cached_prefix_spans_many_query_tiles(
    kernels: DecoderKernels, dtype: torch.dtype, window: int
) -> None:
    batch = make_batch((Row(48, 70), Row(5, 1)), group=4, dtype=dtype, num_kv_heads=1)
    assert_matches(kernels, batch, rule_of(batch, window=window))


def test_torch_attends_in_slices_of_a_long_chunk() -> None:
    batch = make_batch((Row(20, 600),), num_kv_heads=1, head_dim=16)
    assert_matches(TORCH_KERNELS, batch)
    assert_matches(TORCH_KERNELS, batch, rule_of(batch, window=33))


@both_kernels
def test_rows_that_share_pages(kernels: DecoderKernels) -> None:
    assert_matches(kernels, make_batch((Row(47, 1), Row(32, 9), Row(32, 1)), shared_blocks=2))


@both_kernels
@every_dtype
@pytest.mark.parametrize("window", [0, 1024, 1030, 2000])
def test_long_context_is_split_and_merged(kernels: DecoderKernels, dtype: torch.dtype, window: int) -> None:
    rows = (Row(2100, 1), Row(1023, 1), Row(3, 1), Row(1500, 2))
    batch = make_batch(rows, dtype=dtype, group=3, num_kv_heads=1)
    assert_matches(kernels, batch, rule_of(batch, window=window))


@both_kernels
def test_sharp_and_huge_scores_stay_finite(kernels: DecoderKernels) -> None:
    assert_matches(kernels, make_batch((Row(60, 1), Row(0, 33)), spread=100.0), tolerance=1e-4)


@both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["fp32", "int8"])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 33, 1000])
def test_a_window_ends_anywhere_in_a_page(kernels: DecoderKernels, window: int, dtype: torch.dtype) -> None:
    batch = make_batch((*MIXED, Row(90, 1), Row(79, 40)), group=3, dtype=dtype)
    assert_matches(kernels, batch, rule_of(batch, window=window))


@both_kernels
@pytest.mark.parametrize("rows", [(Row(70, 1), Row(99, 1)), (Row(70, 3),), (Row(60, 30),)])
def test_pages_before_the_window_are_not_read(kernels: DecoderKernels, rows: tuple[Row, ...]) -> None:
    batch = make_batch(rows)
    for row, table in zip(rows, batch.block_tables, strict=True):
        first_seen = row.cached - 20 + 1
        batch.kv_pool.values[table[: first_seen // 16]] = math.nan
    assert_matches(kernels, batch, rule_of(batch, window=20))


@both_kernels
@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 100.0])
def test_softcap(kernels: DecoderKernels, softcap: float, spread: float) -> None:
    batch = make_batch(MIXED, spread=spread, group=3)
    assert_matches(kernels, batch, rule_of(batch, softcap=softcap))
    assert_matches(kernels, batch, rule_of(batch, softcap=softcap, window=9))


@both_kernels
@every_dtype
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_sinks_take_weight_from_the_keys(
    kernels: DecoderKernels, dtype: torch.dtype, window: int, softcap: float
) -> None:
    """Of rows with few tokens and many, and of those that are split."""
    rows = (*MIXED, Row(48, 70), Row(2100, 1), Row(1500, 2))
    batch = make_batch(rows, group=3, dtype=dtype)
    rule = replace(rule_of(batch, window=window, softcap=softcap), sinks=sinks_of(6))
    assert_matches(kernels, batch, rule)
    o_TND = kernels.paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule)
    assert (o_TND[:, 3] == 0).all()
    assert o_TND.isfinite().all()


@both_kernels
def test_the_scale_is_the_rules(kernels: DecoderKernels) -> None:
    assert_matches(kernels, make_batch((Row(20, 3),)), AttentionRule(scale=0.3))


@pytest.mark.parametrize(
    "rule",
    [
        AttentionRule(scale=0.2),
        AttentionRule(scale=0.2, window=1100, softcap=30.0),
        AttentionRule(scale=0.2, sinks=sinks_of(4)),
        AttentionRule(scale=0.2, window=1100, in_bfloat16=True),
    ],
    ids=["plain", "window and softcap", "sinks", "bfloat16"],
)
def test_rows_do_not_depend_on_their_neighbours_or_the_thread_count(rule: AttentionRule) -> None:
    rows = (Row(2100, 1), Row(40, 20), Row(9, 1), Row(1500, 70))
    batch = make_batch(rows, dtype=torch.bfloat16 if rule.in_bfloat16 else torch.float32)
    together = CPU_KERNELS.paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule)
    use_threads(1)
    start = 0
    for row, table in zip(rows, batch.block_tables, strict=True):
        alone = AttentionMetadata.build(
            [row.new], [row.cached], [table], num_blocks=batch.kv_pool.shape.num_blocks, block_size=16
        )
        q_TND = batch.queries[start : start + row.new]
        o_TND = CPU_KERNELS.paged_attention(q_TND, batch.kv_pool, LAYER, alone, rule)
        assert torch.equal(o_TND, together[start : start + row.new])
        start += row.new


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [*((dtype, 16) for dtype in DTYPES.values()), (torch.bfloat16, 64)],
    ids=[*DTYPES, "bf16 in fp32"],
)
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("window", [0, 50, 700])
def test_a_token_has_the_same_result_in_any_chunk(dtype: torch.dtype, head_dim: int, group: int, window: int) -> None:
    """That of bfloat16 also in products of float32, which heads of 24 have."""
    length = 1100
    batch = make_batch((Row(0, length),), num_kv_heads=1, group=group, head_dim=head_dim, dtype=dtype)
    rule = replace(rule_of(batch, window=window), in_bfloat16=True)
    whole = CPU_KERNELS.paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule)
    for cached, new in ((0, 1), (15, 2), (63, 40), (511, 1), (512, 3), (600, 500), (1030, 7), (1099, 1)):
        metadata = AttentionMetadata.build(
            [new], [cached], batch.block_tables, num_blocks=batch.kv_pool.shape.num_blocks, block_size=16
        )
        q_TND = batch.queries[cached : cached + new]
        o_TND = CPU_KERNELS.paged_attention(q_TND, batch.kv_pool, LAYER, metadata, rule)
        assert torch.equal(o_TND, whole[cached : cached + new])


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_nan_in_a_key_that_counts_shows(softcap: float) -> None:
    batch = make_batch((Row(20, 1), Row(20, 1)))
    batch.kv_pool.values[batch.block_tables[0][1], :, LAYER, 0, 2] = math.nan
    rule = rule_of(batch, softcap=softcap)
    o_TND = CPU_KERNELS.paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule)
    assert o_TND[0].isnan().all()
    assert o_TND[1].isfinite().all()


@pytest.mark.parametrize("block_size", [1, 16])
def test_torch_attends_to_float8(block_size: int) -> None:
    batch = make_batch(MIXED, group=3, block_size=block_size, dtype=torch.float8_e4m3fn)
    for rule in (rule_of(batch), rule_of(batch, window=9), rule_of(batch, softcap=30.0)):
        assert_matches(TORCH_KERNELS, batch, rule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_takes_queries_of_the_pools_dtype(dtype: torch.dtype) -> None:
    batch = make_batch((Row(20, 4), Row(33, 1)), dtype=dtype)
    rule = rule_of(batch)
    o_TND = TORCH_KERNELS.paged_attention(batch.queries.to(dtype), batch.kv_pool, LAYER, batch.metadata, rule)
    assert o_TND.dtype == dtype
    torch.testing.assert_close(o_TND.double(), reference_attention(batch, rule), atol=2e-2, rtol=2e-2)


def test_cpu_kernels_refuse_what_they_would_misread() -> None:
    batch = make_batch((Row(4, 2),))
    attend, rule = CPU_KERNELS.paged_attention, rule_of(batch)
    with pytest.raises(AssertionError):
        attend(batch.queries[:1], batch.kv_pool, LAYER, batch.metadata, rule)
    with pytest.raises(AssertionError):
        attend(batch.queries.bfloat16(), batch.kv_pool, LAYER, batch.metadata, rule)
    with pytest.raises(AssertionError):
        attend(batch.queries, batch.kv_pool, NUM_LAYERS, batch.metadata, rule)
    with pytest.raises(AssertionError):
        attend(batch.queries.mT, batch.kv_pool, LAYER, batch.metadata, rule)
    with pytest.raises(AssertionError, match="float8"):
        attend(batch.queries, nan_pool(batch.kv_pool.shape, torch.float8_e4m3fn), LAYER, batch.metadata, rule)
