"""Both implementations of the attention kernels against float64 by the definition."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, DecoderKernels
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from tests.kernels.paged_batch import LAYER, NUM_LAYERS, PagedBatch, Row, make_batch, reference_attention

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXED = (Row(0, 15), Row(16, 1), Row(0, 16), Row(15, 1), Row(17, 1), Row(0, 17), Row(32, 5), Row(40, 1), Row(0, 1))

both_kernels = pytest.mark.parametrize("kernels", [CPU_KERNELS, TORCH_KERNELS], ids=["cpu", "torch"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def rule_of(batch: PagedBatch) -> AttentionRule:
    return AttentionRule(scale=batch.kv_pool.shape[-1] ** -0.5)


def assert_matches(kernels: DecoderKernels, batch: PagedBatch) -> None:
    o_TND = kernels.paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule_of(batch))
    assert o_TND.dtype == batch.queries.dtype
    assert o_TND.is_contiguous()
    tolerance = TOLERANCES[batch.queries.dtype]
    torch.testing.assert_close(o_TND.double(), reference_attention(batch), atol=tolerance, rtol=tolerance)


@both_kernels
@both_dtypes
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_mixed_rows_of_awkward_lengths(kernels: DecoderKernels, dtype: torch.dtype, head_dim: int, group: int) -> None:
    assert_matches(kernels, make_batch(MIXED, group=group, head_dim=head_dim, dtype=dtype, num_kv_heads=1))


@both_kernels
@pytest.mark.parametrize("block_size", [1, 4, 8, 20, 32])
def test_any_block_size(kernels: DecoderKernels, block_size: int) -> None:
    lengths = (block_size - 1, block_size, block_size + 1, 3 * block_size + 1)
    rows = tuple(Row(cached, 1) for cached in lengths) + tuple(Row(0, new) for new in lengths if new)
    assert_matches(kernels, make_batch((*rows, Row(block_size, 3)), block_size=block_size))


@both_kernels
@pytest.mark.parametrize("head_dim", [24, 80, 96, 120])
def test_any_head_dim_that_vectors_divide(kernels: DecoderKernels, head_dim: int) -> None:
    assert_matches(kernels, make_batch((Row(20, 2), Row(9, 1)), head_dim=head_dim))


@both_kernels
@both_dtypes
def test_prefill_chunk_over_a_cached_prefix_spans_many_query_tiles(kernels: DecoderKernels, dtype: torch.dtype) -> None:
    assert_matches(kernels, make_batch((Row(48, 70), Row(5, 1)), group=4, dtype=dtype, num_kv_heads=1))


@both_kernels
def test_rows_that_share_pages(kernels: DecoderKernels) -> None:
    assert_matches(kernels, make_batch((Row(47, 1), Row(32, 9), Row(32, 1)), shared_blocks=2))


@both_kernels
@both_dtypes
def test_long_context_is_split_and_merged(kernels: DecoderKernels, dtype: torch.dtype) -> None:
    assert_matches(kernels, make_batch((Row(2100, 1), Row(1023, 1), Row(3, 1), Row(1500, 2)), dtype=dtype, group=3))


@both_kernels
def test_sharp_and_huge_scores_stay_finite(kernels: DecoderKernels) -> None:
    assert_matches(kernels, make_batch((Row(60, 1), Row(0, 33)), spread=100.0))


def test_rows_do_not_depend_on_their_neighbours_or_the_thread_count() -> None:
    rows = (Row(2100, 1), Row(40, 20), Row(9, 1))
    batch = make_batch(rows)
    together = CPU_KERNELS.paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule_of(batch))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = 0
    for row, table in zip(rows, batch.block_tables, strict=True):
        alone = AttentionMetadata.build(
            [row.new], [row.cached], [table], num_blocks=batch.kv_pool.shape[0], block_size=16
        )
        q_TND = batch.queries[start : start + row.new]
        o_TND = CPU_KERNELS.paged_attention(q_TND, batch.kv_pool, LAYER, alone, rule_of(batch))
        assert torch.equal(o_TND, together[start : start + row.new])
        start += row.new
    torch.set_num_threads(num_threads)


def test_nan_in_a_key_that_counts_shows() -> None:
    batch = make_batch((Row(20, 1), Row(20, 1)))
    batch.kv_pool[batch.block_tables[0][1], :, LAYER, 0, 2] = math.nan
    o_TND = CPU_KERNELS.paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule_of(batch))
    assert o_TND[0].isnan().all()
    assert o_TND[1].isfinite().all()


@both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rope_and_write_rotates_in_place_and_touches_no_other_slot(kernels: DecoderKernels, dtype: torch.dtype) -> None:
    batch = make_batch((Row(15, 3), Row(0, 5), Row(16, 1)), dtype=dtype, group=3)
    num_tokens, num_heads, head_dim = batch.queries.shape
    qkv_TMD = torch.randn(num_tokens, num_heads + 4, head_dim).to(dtype)
    given_TMD = qkv_TMD.clone()
    angles_TC = torch.randn(num_tokens, head_dim // 2)
    before = batch.kv_pool.clone()
    kernels.rope_and_write_kv(qkv_TMD, angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata)

    pairs = torch.view_as_complex(torch.stack(given_TMD[:, :-2].double().chunk(2, dim=-1), dim=-1))
    turned = pairs * torch.polar(torch.ones_like(angles_TC), angles_TC).to(torch.complex128)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(qkv_TMD[:, :-2].double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(qkv_TMD[:, -2:], given_TMD[:, -2:])

    token = 0
    for row, table in zip(batch.rows, batch.block_tables, strict=True):
        for position in range(row.cached, row.cached + row.new):
            slot = batch.kv_pool[table[position // 16], :, LAYER, :, position % 16]
            assert torch.equal(slot[:, 0], qkv_TMD[token, num_heads:-2])
            assert torch.equal(slot[:, 1], qkv_TMD[token, -2:])
            before[table[position // 16], :, LAYER, :, position % 16] = slot
            token += 1
    assert torch.equal(batch.kv_pool.view(torch.uint8), before.view(torch.uint8))


@both_kernels
def test_attention_over_what_was_just_written(kernels: DecoderKernels) -> None:
    batch = make_batch((Row(0, 21),))
    qkv_TMD = torch.cat((batch.queries, torch.randn(21, 4, 32)), dim=1)
    angles_TC = torch.randn(21, 16)
    batch.kv_pool.fill_(math.nan)
    kernels.rope_and_write_kv(qkv_TMD, angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata)
    o_TND = kernels.paged_attention(qkv_TMD[:, :4], batch.kv_pool, LAYER, batch.metadata, rule_of(batch))
    written = PagedBatch(batch.rows, qkv_TMD[:, :4], batch.kv_pool, batch.block_tables, batch.metadata)
    torch.testing.assert_close(o_TND.double(), reference_attention(written), atol=2e-5, rtol=2e-5)


def test_float16_runs_on_torch() -> None:
    assert_matches(TORCH_KERNELS, make_batch((Row(20, 4), Row(33, 1)), dtype=torch.float16))


def test_cpu_kernels_refuse_what_they_would_misread() -> None:
    batch = make_batch((Row(4, 2),))
    with pytest.raises(AssertionError):
        CPU_KERNELS.paged_attention(batch.queries[:1], batch.kv_pool, LAYER, batch.metadata, rule_of(batch))
    with pytest.raises(AssertionError):
        CPU_KERNELS.paged_attention(batch.queries.bfloat16(), batch.kv_pool, LAYER, batch.metadata, rule_of(batch))
    with pytest.raises(AssertionError):
        CPU_KERNELS.paged_attention(batch.queries, batch.kv_pool, NUM_LAYERS, batch.metadata, rule_of(batch))
    with pytest.raises(AssertionError):
        CPU_KERNELS.paged_attention(batch.queries, batch.kv_pool.transpose(0, 1), LAYER, batch.metadata, rule_of(batch))
