"""Decode attention: one or a few new tokens per row over paged KV. Dominates TPOT.

Called by `pdserve.kernels.triton.attention`. Rows are split into chunks of keys, so that a few long rows keep a GPU
busy and a long row among short ones does not delay the launch; a second kernel merges a row's chunks. The chunk length
follows from all row lengths, on the device: every program reads the lengths and finds its chunk by a prefix sum. The
grids depend on shapes alone, so nothing is read back or planned ahead, and a CUDA graph can replay a step. The merge
has programs for as many rows as there are chunks wanted, since no more can be split.

Target: ``bytes / (0.9 bandwidth)`` with ``bytes = sum_r k_r H (2 D b + 8 if quantised)``, k_r keys of b bytes per
element. Each merged chunk adds ``8 (D + 2)`` bytes per query head: in bfloat16, as much as 4 N / H keys.

Shape suffixes: T new tokens of the batch, N query heads, H KV heads, D head dim, M rows of a tile, R rows of the batch
padded to a power of two, W chunks that there is room for, Q queries of a row and KV head, S chunks merged at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton.configs import AttentionTile, KvSplit, decode_tile, kv_split
from pdserve.kernels.triton.flash import (
    METADATA_POINTERS,
    add_sink,
    attend,
    check_queries,
    pool_arguments,
    score_constants,
)


def decode_attention(
    q_TND: torch.Tensor,
    o_TND: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
    rule: AttentionRule,
    *,
    max_new_tokens: int | None = None,
    split: KvSplit | None = None,
    tile: AttentionTile | None = None,
) -> None:
    """Compute `pdserve.kernels.operations.PagedAttention` for the short rows.

    Args:
        q_TND: float32 (computed without TF32), bfloat16 or float16; contiguous except for the token stride.
        o_TND: contiguous, same dtype; tokens of longer rows are left untouched.
        metadata: on the device.
        max_new_tokens: skips rows with more; skips none by default.
        split: by default keeps the GPU busy. With ``is_fixed``, a row's result does not depend on the rest of its
            batch.
        tile: by default as in serving. ``rows`` is ignored: the number of queries per row determines it.
    """
    check_queries(q_TND, kv_pool, layer, metadata.num_tokens, rule)
    assert o_TND.is_contiguous()
    num_heads, (num_kv_heads, head_dim) = q_TND.shape[1], (kv_pool.shape.num_kv_heads, kv_pool.shape.head_dim)
    group = num_heads // num_kv_heads
    max_new_tokens = max_new_tokens or metadata.max_new_tokens
    tile = tile or decode_tile(q_TND, kv_pool)
    split = split or kv_split(q_TND, kv_pool)
    assert split.chunk_tokens % tile.keys == 0
    max_chunks = metadata.num_rows + (
        len(metadata.block_ids) * kv_pool.shape.block_size // split.chunk_tokens if split.is_fixed else split.num_chunks
    )
    max_queries = max_new_tokens * group
    # Few enough that every query has attended to some key in the chunks merged first.
    assert max_queries <= _MAX_QUERIES, f"{max_queries} queries of one row"
    partial_WHQD = q_TND.new_empty((max_chunks, num_kv_heads, max_queries, head_dim), dtype=torch.float32)
    lse_WHQ = q_TND.new_empty((max_chunks, num_kv_heads, max_queries), dtype=torch.float32)
    score_factor, cap = score_constants(rule)
    batch = (metadata.query_starts, metadata.kv_lengths, metadata.num_rows, max_new_tokens, rule.window)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    plan = {
        "num_chunks_wanted": split.num_chunks,
        "CHUNK_TOKENS": split.chunk_tokens,
        "IS_FIXED": split.is_fixed,
        "MAX_ROWS": max(16, triton.next_power_of_2(metadata.num_rows)),
        "KEYS": tile.keys,
        "HAS_WINDOW": rule.window > 0,
    }
    _chunk_kernel[max_chunks, num_kv_heads](
        q_TND,
        o_TND,
        partial_WHQD,
        lse_WHQ,
        rule.sinks,
        *batch,
        metadata.block_starts,
        metadata.block_ids,
        q_TND.stride(0),
        score_factor,
        cap,
        **pool_arguments(kv_pool, layer),
        **plan,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(max_queries)),
        PADDED_DIM=padded_dim,
        HAS_CAP=rule.softcap > 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    max_split = metadata.num_rows if split.is_fixed else min(metadata.num_rows, split.num_chunks)
    _merge_kernel[max_split, max_new_tokens * num_heads](
        o_TND,
        partial_WHQD,
        lse_WHQ,
        rule.sinks,
        *batch,
        **plan,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        num_warps=4,
    )


_MAX_QUERIES = 128
_UNSPECIALISED = ["num_rows", "max_new_tokens", "window", "num_chunks_wanted"]
"""Arguments that change from step to step: a new value must not trigger a compilation."""


@triton.jit(do_not_specialize=_UNSPECIALISED, do_not_specialize_on_alignment=METADATA_POINTERS)
def _chunk_kernel(
    q_ptr: tl.tensor,
    o_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    kv_lengths_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_new_tokens: tl.tensor,
    window: tl.tensor,
    block_starts_ptr: tl.tensor,
    block_ids_ptr: tl.tensor,
    q_stride: tl.tensor,
    score_factor: tl.tensor,
    cap: tl.tensor,
    kv_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    side_stride: tl.tensor,
    scale_block_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    scale_side_stride: tl.tensor,
    num_chunks_wanted: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    IS_FIXED: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Grid ``(W, H)``. Pointers: q ``[T, N, D]`` of token stride ``q_stride``, o ``[T, N, D]``; partial
    ``[W, H, Q, D]`` and lse ``[W, H, Q]``, float32, the latter in powers of two; sinks ``[N]`` or none, which count
    once all chunks are together; of the batch as `AttentionMetadata`;
    of the pool as `attend`, at head 0. A row of one chunk is written to o, and the merge has nothing to do."""
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_chunks_R, chunk_tokens = _plan(
        query_starts_ptr, kv_lengths_ptr, num_rows, max_new_tokens, window, num_chunks_wanted,
        CHUNK_TOKENS, IS_FIXED, MAX_ROWS, KEYS, HAS_WINDOW,
    )  # fmt: skip
    end_R = tl.cumsum(num_chunks_R)
    row = tl.sum((end_R <= program).to(tl.int32))
    if row >= num_rows:
        return
    num_chunks = _element(num_chunks_R, row)
    chunk = program - (_element(end_R, row) - num_chunks)
    query_start = tl.load(query_starts_ptr + row)
    num_new = tl.load(query_starts_ptr + row + 1) - query_start
    kv_length = tl.load(kv_lengths_ptr + row)
    first = _first_seen(kv_length, num_new, window, KEYS, HAS_WINDOW) + chunk * chunk_tokens
    end = tl.minimum(first + chunk_tokens, kv_length)

    row_M = tl.arange(0, ROWS)
    token_M = row_M // GROUP
    is_row_M = token_M < num_new
    head_M = kv_head * GROUP + row_M % GROUP
    flat_M = (query_start + token_M).to(tl.int64)
    dim_D = tl.arange(0, PADDED_DIM)
    is_element_MD = is_row_M[:, None] & (dim_D < HEAD_DIM)[None, :]
    q_MD = tl.load(
        q_ptr + (flat_M * q_stride + head_M * HEAD_DIM)[:, None] + dim_D[None, :], mask=is_element_MD, other=0
    )
    if scales_ptr is not None:
        scales_ptr += kv_head.to(tl.int64) * scale_head_stride
    acc_MD, max_M, sum_M = attend(
        q_MD,
        tl.zeros([ROWS, PADDED_DIM], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        kv_length - num_new + token_M,
        first,
        end,
        block_ids_ptr + tl.load(block_starts_ptr + row),
        kv_ptr + kv_head.to(tl.int64) * head_stride,
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
        MASKED=True,
    )

    # A query may have seen nothing of its row's first or last chunks.
    total_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    if sinks_ptr is not None:
        total_M = tl.where(num_chunks == 1, add_sink(sum_M, max_M, sinks_ptr, head_M, is_row_M), total_M)
    o_MD = acc_MD / total_M[:, None]
    num_kv_heads = tl.num_programs(1)
    if num_chunks == 1:
        head_out_M = flat_M * (num_kv_heads * GROUP) + head_M
        tl.store(o_ptr + head_out_M[:, None] * HEAD_DIM + dim_D[None, :], o_MD.to(q_MD.dtype), mask=is_element_MD)
    else:
        query_M = (program * num_kv_heads + kv_head).to(tl.int64) * (max_new_tokens * GROUP) + row_M
        tl.store(partial_ptr + query_M[:, None] * HEAD_DIM + dim_D[None, :], o_MD, mask=is_element_MD)
        tl.store(lse_ptr + query_M, max_M + tl.log2(sum_M), mask=is_row_M)


@triton.jit(do_not_specialize=_UNSPECIALISED, do_not_specialize_on_alignment=METADATA_POINTERS)
def _merge_kernel(
    o_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    kv_lengths_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_new_tokens: tl.tensor,
    window: tl.tensor,
    num_chunks_wanted: tl.tensor,
    CHUNK_TOKENS: tl.constexpr,
    IS_FIXED: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr = 16,
):
    """Grid ``(most split rows, max_new_tokens * N)``; pointers as `_chunk_kernel`. One query head of one token each."""
    program = tl.program_id(0)
    num_chunks_R, _ = _plan(
        query_starts_ptr, kv_lengths_ptr, num_rows, max_new_tokens, window, num_chunks_wanted,
        CHUNK_TOKENS, IS_FIXED, MAX_ROWS, KEYS, HAS_WINDOW,
    )  # fmt: skip
    is_split_R = (num_chunks_R > 1).to(tl.int32)
    if program >= tl.sum(is_split_R):
        return
    row = tl.sum((tl.cumsum(is_split_R) <= program).to(tl.int32))
    num_chunks = _element(num_chunks_R, row)
    num_heads = tl.num_programs(1) // max_new_tokens
    token = tl.program_id(1) // num_heads
    head = tl.program_id(1) % num_heads
    query_start = tl.load(query_starts_ptr + row)
    if query_start + token >= tl.load(query_starts_ptr + row + 1):
        return
    begin = tl.sum(tl.where(tl.arange(0, MAX_ROWS) < row, num_chunks_R, 0))
    dim_D = tl.arange(0, PADDED_DIM)
    is_dim_D = dim_D < HEAD_DIM
    acc_D = tl.zeros([PADDED_DIM], tl.float32)
    highest = float("-inf")
    total = 0.0
    for first in tl.range(0, num_chunks, SPLITS):
        chunk_S = first + tl.arange(0, SPLITS)
        is_chunk_S = chunk_S < num_chunks
        slot_S = ((begin + chunk_S) * (num_heads // GROUP) + head // GROUP).to(tl.int64)
        query_S = slot_S * (max_new_tokens * GROUP) + token * GROUP + head % GROUP
        lse_S = tl.load(lse_ptr + query_S, mask=is_chunk_S, other=float("-inf"))
        partial_SD = tl.load(
            partial_ptr + query_S[:, None] * HEAD_DIM + dim_D[None, :],
            mask=is_chunk_S[:, None] & is_dim_D[None, :],
            other=0,
        )
        new_highest = tl.maximum(highest, tl.max(lse_S, 0))
        weight_S = tl.exp2(lse_S - new_highest)
        kept = tl.exp2(highest - new_highest)
        acc_D = acc_D * kept + tl.sum(weight_S[:, None] * partial_SD, 0)
        total = total * kept + tl.sum(weight_S, 0)
        highest = new_highest
    if sinks_ptr is not None:
        total = add_sink(total, highest, sinks_ptr, head, True)
    head_out = (query_start + token).to(tl.int64) * num_heads + head
    tl.store(o_ptr + head_out * HEAD_DIM + dim_D, (acc_D / total).to(o_ptr.dtype.element_ty), mask=is_dim_D)


@triton.jit
def _plan(
    query_starts_ptr: tl.tensor,
    kv_lengths_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_new_tokens: tl.tensor,
    window: tl.tensor,
    num_chunks_wanted: tl.tensor,
    CHUNK_TOKENS: tl.constexpr,
    IS_FIXED: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """How all rows are cut: chunks of each row, and tokens of a chunk, a multiple of ``KEYS``. Rows that are not short
    have none; all together have at most ``num_chunks_wanted`` more than rows, and as many rows at most have several."""
    row_R = tl.arange(0, MAX_ROWS)
    is_row_R = row_R < num_rows
    num_new_R = tl.load(query_starts_ptr + row_R + 1, mask=is_row_R, other=0)
    num_new_R -= tl.load(query_starts_ptr + row_R, mask=is_row_R, other=0)
    kv_length_R = tl.load(kv_lengths_ptr + row_R, mask=is_row_R, other=0)
    seen_R = kv_length_R - _first_seen(kv_length_R, num_new_R, window, KEYS, HAS_WINDOW)
    seen_R = tl.where((num_new_R > 0) & (num_new_R <= max_new_tokens), seen_R, 0)
    if IS_FIXED:
        chunk_tokens = CHUNK_TOKENS
    else:
        shared = tl.cdiv(tl.cdiv(tl.sum(seen_R), num_chunks_wanted), KEYS) * KEYS
        chunk_tokens = tl.maximum(shared, CHUNK_TOKENS)
    num_chunks_R = tl.cdiv(seen_R, chunk_tokens)
    return num_chunks_R, chunk_tokens


@triton.jit
def _first_seen(
    kv_length: tl.tensor, num_new: tl.tensor, window: tl.tensor, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """A multiple of ``KEYS`` before which a row's queries see nothing."""
    return tl.maximum(kv_length - num_new - window + 1, 0) // KEYS * KEYS if HAS_WINDOW else kv_length * 0


@triton.jit
def _element(values_R: tl.tensor, index: tl.tensor):
    return tl.sum(tl.where(tl.arange(0, values_R.shape[0]) == index, values_R, 0))
