"""Block copies: gathers KV blocks from a pool into a staging buffer, and scatters them back, in one launch.

Transports and swaps of a GPU's pool call it. A staging buffer is a small dense pool with only the heads and layers to
move. If exactly one side is quantised, vectors are quantised or dequantised on the way, with their scales in the strip
at the end of each (block, head).

Computes no checksums: the transfer checksum, xxh3 of a (block, head), chains its state through every KiB, which a GPU
would process serially, and it always covers all layers.

Target: ``(bytes read + bytes written) / (0.9 bandwidth)``; for host memory, the link's bandwidth.

Shape suffixes: B blocks, H heads and L layers that are moved, V vectors of a (block, head): keys and values of every
token in each of the L layers, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.triton.kv_quantisation import is_finite, kv_scale, kv_values

_TILE = 4096
"""Elements that one program moves."""


def gather_blocks(
    kv_pool: KvPool, block_ids_B: torch.Tensor, staging: KvPool, *, first_head: int = 0, first_layer: int = 0
) -> None:
    """Copy blocks of a pool, back to back, to the first blocks of ``staging``.

    Args:
        block_ids_B: int32, on the pool's device.
        staging: same block size and head dim as the pool; its head and layer counts set the range to copy, from
            ``first_head`` and ``first_layer``. On a device or in pinned host memory. Its dtype is the pool's, unless
            exactly one of the two is quantised.
    """
    _copy(kv_pool, staging, block_ids_B, first_head, first_layer, is_gather=True)


def scatter_blocks(
    staging: KvPool, kv_pool: KvPool, block_ids_B: torch.Tensor, *, first_head: int = 0, first_layer: int = 0
) -> None:
    """Reverse `gather_blocks`. Block ids must be distinct."""
    _copy(kv_pool, staging, block_ids_B, first_head, first_layer, is_gather=False)


def _copy(
    kv_pool: KvPool, staging: KvPool, block_ids_B: torch.Tensor, first_head: int, first_layer: int, *, is_gather: bool
) -> None:
    num_blocks, shape = len(block_ids_B), staging.shape
    assert num_blocks <= shape.num_blocks
    assert shape[3:] == kv_pool.shape[3:]
    assert 0 <= first_head <= kv_pool.shape.num_kv_heads - shape.num_kv_heads
    assert 0 <= first_layer <= kv_pool.shape.num_layers - shape.num_layers
    assert staging.dtype == kv_pool.dtype or (staging.scales is None) != (kv_pool.scales is None)
    assert block_ids_B.dtype == torch.int32
    assert block_ids_B.is_contiguous()
    source, target = (kv_pool, staging) if is_gather else (staging, kv_pool)
    num_vectors = shape.num_layers * shape.num_sides * shape.block_size
    padded_dim = triton.next_power_of_2(shape.head_dim)
    vectors = max(_TILE // padded_dim, 1)
    _copy_kernel[num_blocks, shape.num_kv_heads, triton.cdiv(num_vectors, vectors)](
        block_ids_B,
        **_side("source", source, *((first_head, first_layer) if is_gather else (0, 0))),
        **_side("target", target, *((0, 0) if is_gather else (first_head, first_layer))),
        num_vectors=num_vectors,
        IS_GATHER=is_gather,
        HEAD_DIM=shape.head_dim,
        PADDED_DIM=padded_dim,
        VECTORS=vectors,
        num_warps=4,
    )


def _side(name: str, pool: KvPool, head: int, layer: int) -> dict[str, object]:
    """Kernel arguments of one side of a copy, starting at a head and a layer."""
    scales = None if pool.scales is None else pool.scales[:, head:, layer:]
    values = pool.values[:, head:, layer:]
    return {
        f"{name}_ptr": values,
        f"{name}_scales_ptr": scales,
        f"{name}_block_stride": values.stride(0),
        f"{name}_head_stride": values.stride(1),
        f"{name}_scale_block_stride": 0 if scales is None else scales.stride(0),
        f"{name}_scale_head_stride": 0 if scales is None else scales.stride(1),
    }


@triton.jit(do_not_specialize_on_alignment=["block_ids_ptr"])
def _copy_kernel(
    block_ids_ptr: tl.tensor,
    source_ptr: tl.tensor,
    source_scales_ptr: tl.tensor,
    source_block_stride: tl.tensor,
    source_head_stride: tl.tensor,
    source_scale_block_stride: tl.tensor,
    source_scale_head_stride: tl.tensor,
    target_ptr: tl.tensor,
    target_scales_ptr: tl.tensor,
    target_block_stride: tl.tensor,
    target_head_stride: tl.tensor,
    target_scale_block_stride: tl.tensor,
    target_scale_head_stride: tl.tensor,
    num_vectors: tl.tensor,
    IS_GATHER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Grid ``(B, H, tiles of V)``. Pointers: block ids ``[B]``, of the source in a gather and of the target else; of
    either side its first head and layer in block 0: vectors ``[V, D]`` and, where quantised, float32 scales ``[V]``,
    strided by blocks and heads in elements. Offsets are 64 bits wide."""
    place = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids_ptr + place).to(tl.int64)
    source_block, target_block = (block, place) if IS_GATHER else (place, block)
    head = tl.program_id(1).to(tl.int64)
    vector_V = tl.program_id(2) * VECTORS + tl.arange(0, VECTORS)
    dim_D = tl.arange(0, PADDED_DIM)
    is_vector_V = vector_V < num_vectors
    is_element_VD = is_vector_V[:, None] & (dim_D < HEAD_DIM)[None, :]
    element_VD = vector_V[:, None] * HEAD_DIM + dim_D[None, :]
    source_ptr += source_block * source_block_stride + head * source_head_stride
    target_ptr += target_block * target_block_stride + head * target_head_stride
    # 0.0, because Triton converts no integer to float8.
    x_VD = tl.load(source_ptr + element_VD, mask=is_element_VD, other=0.0)
    if source_scales_ptr is not None:
        source_scales_ptr += source_block * source_scale_block_stride + head * source_scale_head_stride
        scale_V = tl.load(source_scales_ptr + vector_V, mask=is_vector_V, other=0)
        if target_scales_ptr is None:
            x_VD = x_VD.to(tl.float32) * scale_V[:, None]
    if target_scales_ptr is not None:
        if source_scales_ptr is None:
            x_VD = x_VD.to(tl.float32)
            DTYPE: tl.constexpr = target_ptr.dtype.element_ty
            scale_V = kv_scale(tl.max(tl.abs(x_VD), 1), is_finite(x_VD), DTYPE)
            x_VD = kv_values(x_VD, scale_V, DTYPE)
        target_scales_ptr += target_block * target_scale_block_stride + head * target_scale_head_stride
        tl.store(target_scales_ptr + vector_V, scale_V, mask=is_vector_V)
    tl.store(target_ptr + element_VD, x_VD.to(target_ptr.dtype.element_ty), mask=is_element_VD)
