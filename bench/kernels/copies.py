"""Benchmark cases of block copies: some blocks of a pool, all heads or half of them, to a staging buffer and back.

Cases of `pdserve.kernels.triton.block_copy`. Peers are torch's indexing, and one copy per block, on a GPU
``cudaMemcpyAsync``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.bench.kernels.contest import Contender, Contest, Work
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.triton.block_copy import gather_blocks, scatter_blocks

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCase:
    """Blocks of all layers, one way."""

    num_blocks: int
    is_gather: bool = True
    moved_heads: int = 8
    """The first ones."""
    to_host: bool = False
    """The staging buffer is in the host's pinned memory."""
    pool_blocks: int = 512
    num_heads: int = 8
    num_layers: int = 32
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def kernel(self) -> str:
        return "block_copy"

    @property
    def shape(self) -> str:
        way = "gather" if self.is_gather else "scatter"
        heads = f"{self.moved_heads} of {self.num_heads} heads"
        return f"{way} {self.num_blocks} blocks, {heads}, {self.num_layers} layers" + ", host" * self.to_host

    @property
    def work(self) -> Work:
        num_bytes = self.num_blocks * self.moved_heads * self._head_bytes
        return Work(num_bytes, crosses_link=True) if self.to_host else Work(2 * num_bytes)

    @property
    def _head_bytes(self) -> int:
        return self.num_layers * 2 * _BLOCK_SIZE * self.head_dim * self.dtype.itemsize

    def contest(self, device: torch.device) -> Contest:
        ids = torch.randperm(self.pool_blocks)[: self.num_blocks].int().to(device)
        pool_bytes = self._random_bytes(self.pool_blocks, self.num_heads, device)
        staging_bytes = self._random_bytes(self.num_blocks, self.moved_heads, device)
        is_pinned = self.to_host and device.type == "cuda"

        def sides() -> _Sides:
            """Of every contender its own."""
            staging = staging_bytes.cpu().pin_memory() if is_pinned else staging_bytes.clone()
            return _Sides(
                self._pool(pool_bytes.clone(), self.pool_blocks, self.num_heads),
                self._pool(staging, self.num_blocks, self.moved_heads),
                ids,
                is_gather=self.is_gather,
            )

        peers = {"torch index": lambda: sides().by_index(), "copy per block": lambda: sides().block_by_block()}
        return Contest(sides().by_kernel(), peers, tolerance=0.0)

    def _random_bytes(self, num_blocks: int, num_heads: int, device: torch.device) -> torch.Tensor:
        num_values = num_blocks * num_heads * self._head_bytes // self.dtype.itemsize
        values = torch.randint(-99, 99, (num_values,), dtype=torch.int8, device=device)
        return values.to(self.dtype).view(torch.uint8)

    def _pool(self, memory: torch.Tensor, num_blocks: int, num_heads: int) -> KvPool:
        return KvPool(memory, (num_blocks, num_heads, self.num_layers, 2, _BLOCK_SIZE, self.head_dim), self.dtype)


@dataclass(frozen=True)
class _Sides:
    """A pool and a staging buffer, and the ways to copy between them."""

    kv_pool: KvPool
    staging: KvPool
    ids: torch.Tensor
    """int32, on the pool's device."""
    is_gather: bool

    def by_kernel(self) -> Contender:
        if self.is_gather:
            return self._contender(lambda: gather_blocks(self.kv_pool, self.ids, self.staging))
        return self._contender(lambda: scatter_blocks(self.staging, self.kv_pool, self.ids))

    def by_index(self) -> Contender:
        heads, packed = self._heads()
        ids = self.ids.long()
        if self.is_gather:
            return self._contender(lambda: packed.copy_(heads.index_select(0, ids), non_blocking=True))
        return self._contender(lambda: heads.index_copy_(0, ids, packed.to(heads.device, non_blocking=True)))

    def block_by_block(self) -> Contender:
        heads, packed = self._heads()
        pairs = [(packed[place], heads[block]) for place, block in enumerate(self.ids.tolist())]
        if not self.is_gather:
            pairs = [(block, place) for place, block in pairs]

        def copy() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        return self._contender(copy)

    def _contender(self, copy: Callable[[], object]) -> Contender:
        """Leaves what the copy wrote to."""
        target = self.staging if self.is_gather else self.kv_pool

        def run() -> torch.Tensor:
            copy()
            return target.blocks

        return Contender(run, torch.clone)

    def _heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 ``[blocks, heads, bytes of a head]``: those of the pool that are moved, and the staging buffer."""
        moved, num_heads = self.staging.shape.num_kv_heads, self.kv_pool.shape.num_kv_heads
        heads = self.kv_pool.blocks.view(self.kv_pool.shape.num_blocks, num_heads, -1)
        return heads[:, :moved], self.staging.blocks.view(self.staging.shape.num_blocks, moved, -1)
