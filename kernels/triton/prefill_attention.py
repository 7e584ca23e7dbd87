"""Prefill attention: many new tokens per row over paged KV. Dominates TTFT.

Called by `pdserve.kernels.triton.attention`. A program attends for one tile of a row's new tokens and one KV head, over
the row's cached prefix and new tokens alike, all of it in the pool. The grid depends on shapes alone, so nothing is
read back from the device: it has room for a partly filled tile of every row, and each program looks up its row.

Target: ``flops / P`` with ``flops = 4 N D sum_r q_r (k_r - q_r + (q_r + 1) / 2)``, q_r new of k_r tokens and P the
tensor cores' rate. Without overlap of exp2 and products, the ceiling for D = 64 / 128 / 256 is 50 / 67 / 80 % of P. If
q_r N / H is under ``P / bandwidth`` (295 on an H100), memory bounds the prefix: see the decode kernel.

Shape suffixes: T new tokens of the batch, N query heads, H KV heads, D head dim, M rows of a tile.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton.configs import AttentionTile, prefill_tile
from pdserve.kernels.triton.flash import (
    METADATA_POINTERS,
    add_sink,
    attend,
    check_queries,
    pool_arguments,
    score_constants,
)


def prefill_attention(
    q_TND: torch.Tensor,
    o_TND: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
    rule: AttentionRule,
    *,
    min_new_tokens: int = 1,
    tile: AttentionTile | None = None,
    lse_TN: torch.Tensor | None = None,
) -> None:
    """Compute `pdserve.kernels.operations.PagedAttention` for the long rows.

    Args:
        q_TND: float32 (computed without TF32), bfloat16 or float16; contiguous except for the token stride.
        o_TND: contiguous, same dtype; tokens of shorter rows are left untouched.
        metadata: on the device.
        min_new_tokens: skips rows with fewer.
        tile: by default as in serving.
        lse_TN: float32, contiguous: receives every query's log-sum-exp of its scores (natural logarithm), without
            sinks.
    """
    check_queries(q_TND, kv_pool, layer, metadata.num_tokens, rule)
    assert o_TND.is_contiguous()
    num_kv_heads = kv_pool.shape.num_kv_heads
    group = q_TND.shape[1] // num_kv_heads
    tile = tile or prefill_tile(q_TND, kv_pool)
    rows = max(tile.rows, triton.next_power_of_2(group))
    max_tiles = metadata.num_tokens // (rows // group) + metadata.num_rows
    score_factor, cap = score_constants(rule)
    _prefill_kernel[max_tiles, num_kv_heads](
        q_TND,
        o_TND,
        lse_TN,
        rule.sinks,
        metadata.query_starts,
        metadata.kv_lengths,
        metadata.block_starts,
        metadata.block_ids,
        metadata.num_rows,
        min_new_tokens,
        q_TND.stride(0),
        score_factor,
        cap,
        rule.window,
        **pool_arguments(kv_pool, layer),
        GROUP=group,
        ROWS=rows,
        KEYS=tile.keys,
        PADDED_DIM=max(16, triton.next_power_of_2(kv_pool.shape.head_dim)),
        HAS_WINDOW=rule.window > 0,
        HAS_CAP=rule.softcap > 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


_LN_2 = tl.constexpr(math.log(2))


@triton.jit(
    do_not_specialize=["num_rows", "min_new_tokens", "window"], do_not_specialize_on_alignment=METADATA_POINTERS
)
def _prefill_kernel(
    q_ptr: tl.tensor,
    o_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    kv_lengths_ptr: tl.tensor,
    block_starts_ptr: tl.tensor,
    block_ids_ptr: tl.tensor,
    num_rows: tl.tensor,
    min_new_tokens: tl.tensor,
    q_stride: tl.tensor,
    score_factor: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    kv_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    side_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    scale_side_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Grid ``(max_tiles, H)``. Pointers: q ``[T, N, D]`` of token stride ``q_stride``, o ``[T, N, D]``, lse ``[T, N]``
    or none, sinks ``[N]`` or none; of the batch as `AttentionMetadata`; of the pool as `attend`, at head 0."""
    # The last tiles of a row see the most keys, so they are begun first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    TOKENS: tl.constexpr = ROWS // GROUP
    row = _row_of_tile(query_starts_ptr, num_rows, program, TOKENS)
    query_start = tl.load(query_starts_ptr + row)
    num_new = tl.load(query_starts_ptr + row + 1) - query_start
    first_token = (program - query_start // TOKENS - row) * TOKENS
    if (first_token >= num_new) | (num_new < min_new_tokens):
        return
    num_cached = tl.load(kv_lengths_ptr + row) - num_new
    first_position = num_cached + first_token
    last_position = num_cached + tl.minimum(first_token + TOKENS, num_new) - 1

    row_M = tl.arange(0, ROWS)
    token_M = first_token + row_M // GROUP
    head_M = kv_head * GROUP + row_M % GROUP
    is_row_M = (row_M < TOKENS * GROUP) & (token_M < num_new)
    dim_D = tl.arange(0, PADDED_DIM)
    is_element_MD = is_row_M[:, None] & (dim_D < HEAD_DIM)[None, :]
    flat_M = (query_start + token_M).to(tl.int64)
    q_MD = tl.load(
        q_ptr + (flat_M * q_stride + head_M * HEAD_DIM)[:, None] + dim_D[None, :], mask=is_element_MD, other=0
    )
    acc_MD = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    max_M = tl.full([ROWS], float("-inf"), tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)

    kv_ptr += kv_head.to(tl.int64) * head_stride
    if scales_ptr is not None:
        scales_ptr += kv_head.to(tl.int64) * scale_head_stride
    table_ptr = block_ids_ptr + tl.load(block_starts_ptr + row)
    # Keys at the edge of the window, keys that all of the tile sees, and keys on the diagonal.
    diagonal = (first_position + 1) // KEYS * KEYS
    edge = 0
    inside = 0
    if HAS_WINDOW:
        edge = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
        inside = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS, diagonal)
    bounds = (edge, inside, diagonal, last_position + 1)
    for part in tl.static_range(0 if HAS_WINDOW else 1, 3):
        acc_MD, max_M, sum_M = attend(
            q_MD,
            acc_MD,
            max_M,
            sum_M,
            num_cached + token_M,
            bounds[part],
            bounds[part + 1],
            table_ptr,
            kv_ptr,
            scales_ptr,
            block_stride,
            side_stride,
            scale_block_stride,
            scale_side_stride,
            score_factor,
            cap,
            window,
            BLOCK_SIZE,
            HEAD_DIM,
            KEYS,
            HAS_WINDOW,
            HAS_CAP,
            MASKED=part != 1,
        )

    num_heads = tl.num_programs(1) * GROUP
    head_out_M = flat_M * num_heads + head_M
    total_M = sum_M if sinks_ptr is None else add_sink(sum_M, max_M, sinks_ptr, head_M, is_row_M)
    o_MD = acc_MD / total_M[:, None]
    tl.store(o_ptr + head_out_M[:, None] * HEAD_DIM + dim_D[None, :], o_MD.to(q_MD.dtype), mask=is_element_MD)
    if lse_ptr is not None:
        tl.store(lse_ptr + head_out_M, (max_M + tl.log2(sum_M)) * _LN_2, mask=is_row_M)


@triton.jit
def _row_of_tile(query_starts_ptr: tl.tensor, num_rows: tl.tensor, tile: tl.tensor, TOKENS: tl.constexpr):
    """The row that ``tile`` may belong to: row r's tiles begin at ``query_starts[r] // TOKENS + r``, which leaves each
    row enough of them, wherever it begins."""
    num_begun = 0
    for first in tl.range(0, num_rows, 128):
        row_R = first + tl.arange(0, 128)
        is_row_R = row_R < num_rows
        start_R = tl.load(query_starts_ptr + row_R, mask=is_row_R, other=0)
        num_begun += tl.sum((is_row_R & (start_R // TOKENS + row_R <= tile)).to(tl.int32))
    return num_begun - 1
