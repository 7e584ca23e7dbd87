"""RoPE and KV write: normalises and rotates queries and keys in place and writes keys and values, in one launch.

Called through `pdserve.kernels.selection`. A program handles some heads of one token; queries, keys and values differ
only in their loads and stores. Computes in float32.

Target: ``bytes / (0.9 bandwidth)`` with ``bytes = T D b (2 N + 4 H)``.

Shape suffixes: T new tokens of the batch, N query heads, H KV heads, M = N + 2 H, D head dim, C = D / 2 padded to a
power of two, P heads of a program, R rows searched at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import QkNorm
from pdserve.kernels.triton.flash import METADATA_POINTERS, pool_arguments
from pdserve.kernels.triton.kv_quantisation import is_finite, kv_scale, kv_values

_HEADS = 8


def rope_and_write_kv(
    qkv_TMD: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
    qk_norm: QkNorm | None = None,
) -> None:
    """See `pdserve.kernels.operations.RopeAndWriteKv`; ``metadata`` is on the device."""
    num_tokens, num_all_heads, head_dim = qkv_TMD.shape
    num_kv_heads = kv_pool.shape.num_kv_heads
    assert (num_tokens, head_dim) == (metadata.num_tokens, kv_pool.shape.head_dim)
    assert num_all_heads > 2 * num_kv_heads
    assert 0 <= layer < kv_pool.shape.num_layers
    assert qkv_TMD.is_contiguous()
    for table_TC in (cos_TC, sin_TC):
        assert table_TC.shape == (num_tokens, head_dim // 2)
        assert table_TC.dtype == torch.float32
        assert table_TC.is_contiguous()
    _rope_kernel[num_tokens, triton.cdiv(num_all_heads, _HEADS)](
        qkv_TMD,
        cos_TC,
        sin_TC,
        None if qk_norm is None else qk_norm.q_weight,
        None if qk_norm is None else qk_norm.k_weight,
        0.0 if qk_norm is None else qk_norm.eps,
        metadata.query_starts,
        metadata.block_starts,
        metadata.block_ids,
        metadata.positions,
        metadata.num_rows,
        **pool_arguments(kv_pool, layer),
        NUM_HEADS=num_all_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEADS=_HEADS,
        PADDED=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=METADATA_POINTERS)
def _rope_kernel(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    eps: tl.tensor,
    query_starts_ptr: tl.tensor,
    block_starts_ptr: tl.tensor,
    block_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    num_rows: tl.tensor,
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
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid ``(T, tiles of M)``. Pointers: qkv ``[T, M, D]``; cos and sin ``[T, D / 2]``, float32; weights ``[D]`` or
    none; of the batch as `AttentionMetadata`; of the pool as `pdserve.kernels.triton.flash.attend`, at head 0."""
    token = tl.program_id(0)
    head_P = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim_C = tl.arange(0, PADDED)
    HALF: tl.constexpr = HEAD_DIM // 2
    is_dim_C = dim_C < HALF
    is_turned_P = head_P < NUM_HEADS + NUM_KV_HEADS
    is_pair_PC = (head_P < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_dim_C[None, :]
    offset_P = (token.to(tl.int64) * (NUM_HEADS + 2 * NUM_KV_HEADS) + head_P) * HEAD_DIM
    low_ptr = qkv_ptr + offset_P[:, None] + dim_C[None, :]
    given_low_PC = tl.load(low_ptr, mask=is_pair_PC, other=0)
    given_high_PC = tl.load(low_ptr + HALF, mask=is_pair_PC, other=0)
    low_PC, high_PC = given_low_PC.to(tl.float32), given_high_PC.to(tl.float32)
    if q_weight_ptr is not None:
        rms_P = tl.sqrt((tl.sum(low_PC * low_PC, 1) + tl.sum(high_PC * high_PC, 1)) / HEAD_DIM + eps)
        is_query_P = head_P < NUM_HEADS
        low_PC = low_PC / rms_P[:, None] * _weights(q_weight_ptr, k_weight_ptr, is_query_P, dim_C, is_dim_C)
        high_PC = high_PC / rms_P[:, None] * _weights(q_weight_ptr, k_weight_ptr, is_query_P, dim_C + HALF, is_dim_C)
    cos_C = tl.load(cos_ptr + token * HALF + dim_C, mask=is_dim_C, other=0)[None, :]
    sin_C = tl.load(sin_ptr + token * HALF + dim_C, mask=is_dim_C, other=0)[None, :]
    # Rounded as they are stored, and so written to pages; values stay what they were.
    turned_low_PC = (low_PC * cos_C - high_PC * sin_C).to(given_low_PC.dtype)
    turned_high_PC = (high_PC * cos_C + low_PC * sin_C).to(given_low_PC.dtype)
    low_PC = tl.where(is_turned_P[:, None], turned_low_PC, given_low_PC)
    high_PC = tl.where(is_turned_P[:, None], turned_high_PC, given_high_PC)
    is_turned_PC = is_pair_PC & is_turned_P[:, None]
    tl.store(low_ptr, low_PC, mask=is_turned_PC)
    tl.store(low_ptr + HALF, high_PC, mask=is_turned_PC)

    row = 0
    for first in tl.range(0, num_rows, 128):
        row_R = first + tl.arange(0, 128)
        is_row_R = row_R < num_rows
        end_R = tl.load(query_starts_ptr + row_R + 1, mask=is_row_R, other=0)
        row += tl.sum((is_row_R & (end_R <= token)).to(tl.int32))
    if row >= num_rows:  # padding
        return
    position = tl.load(positions_ptr + token)
    block = tl.load(block_ids_ptr + tl.load(block_starts_ptr + row) + position // BLOCK_SIZE).to(tl.int64)
    slot = position % BLOCK_SIZE
    side_P = (head_P >= NUM_HEADS + NUM_KV_HEADS).to(tl.int64)
    kv_head_P = head_P - NUM_HEADS - side_P * NUM_KV_HEADS
    is_kv_P = (head_P >= NUM_HEADS) & (head_P < NUM_HEADS + 2 * NUM_KV_HEADS)
    if scales_ptr is not None:
        low_PC, high_PC = low_PC.to(tl.float32), high_PC.to(tl.float32)
        largest_P = tl.maximum(tl.max(tl.abs(low_PC), 1), tl.max(tl.abs(high_PC), 1))
        DTYPE: tl.constexpr = kv_ptr.dtype.element_ty
        scale_P = kv_scale(largest_P, is_finite(low_PC) & is_finite(high_PC), DTYPE)
        low_PC, high_PC = kv_values(low_PC, scale_P, DTYPE), kv_values(high_PC, scale_P, DTYPE)
        scale_offset_P = block * scale_block_stride + kv_head_P * scale_head_stride + side_P * scale_side_stride + slot
        tl.store(scales_ptr + scale_offset_P, scale_P, mask=is_kv_P)
    kv_offset_P = block * block_stride + kv_head_P * head_stride + side_P * side_stride + slot * HEAD_DIM
    kv_low_ptr = kv_ptr + kv_offset_P[:, None] + dim_C[None, :]
    is_kv_PC = is_kv_P[:, None] & is_dim_C[None, :]
    tl.store(kv_low_ptr, low_PC.to(kv_ptr.dtype.element_ty), mask=is_kv_PC)
    tl.store(kv_low_ptr + HALF, high_PC.to(kv_ptr.dtype.element_ty), mask=is_kv_PC)


@triton.jit
def _weights(
    q_weight_ptr: tl.tensor, k_weight_ptr: tl.tensor, is_query_P: tl.tensor, dim_C: tl.tensor, is_dim_C: tl.tensor
):
    """``[P, C]``: of queries or of keys."""
    q_weight_C = tl.load(q_weight_ptr + dim_C, mask=is_dim_C, other=0).to(tl.float32)
    k_weight_C = tl.load(k_weight_ptr + dim_C, mask=is_dim_C, other=0).to(tl.float32)
    return tl.where(is_query_P[:, None], q_weight_C[None, :], k_weight_C[None, :])
