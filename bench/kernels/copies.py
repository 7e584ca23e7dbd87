"""Cases of block copies between a pool and a staging buffer, against torch's indexing and one copy per block.

Cases of `pdserve.kernels.triton.block_copy`. A copy per block is ``cudaMemcpyAsync`` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from pdserve.bench.kernels.case import OWN, Case, Implementation, Make, Work
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.triton.block_copy import gather_blocks, scatter_blocks

_BLOCK_SIZE = 16


def copy_case(
    num_blocks: int,
    *,
    is_gather: bool = True,
    moved_heads: int = 8,
    to_host: bool = False,
    pool_blocks: int = 512,
    num_heads: int = 8,
    num_layers: int = 32,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Blocks of all layers, one way.

    Args:
        moved_heads: the first so many heads are copied.
        to_host: the staging buffer is in the host's pinned memory.
    """
    head_values = num_layers * 2 * _BLOCK_SIZE * head_dim

    def random_pool(num_blocks: int, num_heads: int, device: torch.device) -> KvPool:
        values = torch.randint(-99, 99, (num_blocks * num_heads * head_values,), dtype=torch.int8, device=device)
        shape = (num_blocks, num_heads, num_layers, 2, _BLOCK_SIZE, head_dim)
        memory = values.to(dtype).view(torch.uint8)
        if to_host and num_blocks != pool_blocks and device.type == "cuda":
            memory = memory.cpu().pin_memory()
        return KvPool(memory, shape, dtype)

    def make(device: torch.device) -> Mapping[str, Make]:
        seed = int(torch.randint(2**31, ()))
        ids_B = torch.randperm(pool_blocks)[:num_blocks].int().to(device)

        def implementation(way: Callable[[KvPool, KvPool, torch.Tensor, bool], Callable[[], object]]) -> Implementation:
            """On its own pool and staging buffer, of the same random values."""
            torch.manual_seed(seed)
            kv_pool = random_pool(pool_blocks, num_heads, device)
            staging = random_pool(num_blocks, moved_heads, device)
            copy = way(kv_pool, staging, ids_B, is_gather)
            target = staging if is_gather else kv_pool

            def run() -> torch.Tensor:
                copy()
                return target.blocks

            return Implementation(run, torch.clone)

        ways = {OWN: _by_kernel, "torch index": _by_index, "copy per block": _block_by_block}
        return {name: partial(implementation, way) for name, way in ways.items()}

    num_bytes = num_blocks * moved_heads * head_values * dtype.itemsize
    shape = f"{'gather' if is_gather else 'scatter'} {num_blocks} blocks, {moved_heads} of {num_heads} heads"
    shape += f", {num_layers} layers" + ", host" * to_host
    return Case("block_copy", shape, Work(num_bytes, crosses_link=True) if to_host else Work(2 * num_bytes), make)


def _by_kernel(kv_pool: KvPool, staging: KvPool, ids_B: torch.Tensor, is_gather: bool) -> Callable[[], object]:
    if is_gather:
        return partial(gather_blocks, kv_pool, ids_B, staging)
    return partial(scatter_blocks, staging, kv_pool, ids_B)


def _by_index(kv_pool: KvPool, staging: KvPool, ids_B: torch.Tensor, is_gather: bool) -> Callable[[], object]:
    heads, packed = _heads(kv_pool, staging)
    ids = ids_B.long()
    if is_gather:
        return lambda: packed.copy_(heads.index_select(0, ids), non_blocking=True)
    return lambda: heads.index_copy_(0, ids, packed.to(heads.device, non_blocking=True))


def _block_by_block(kv_pool: KvPool, staging: KvPool, ids_B: torch.Tensor, is_gather: bool) -> Callable[[], object]:
    heads, packed = _heads(kv_pool, staging)
    pairs = [(packed[index], heads[block]) for index, block in enumerate(ids_B.tolist())]

    def copy() -> None:
        for staged, pooled in pairs:
            target, source = (staged, pooled) if is_gather else (pooled, staged)
            target.copy_(source, non_blocking=True)

    return copy


def _heads(kv_pool: KvPool, staging: KvPool) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 ``[blocks, moved heads, bytes of a head]`` of the pool and of the staging buffer."""
    num_moved = staging.shape.num_kv_heads
    heads = kv_pool.blocks.view(kv_pool.shape.num_blocks, kv_pool.shape.num_kv_heads, -1)
    return heads[:, :num_moved], staging.blocks.view(staging.shape.num_blocks, num_moved, -1)
