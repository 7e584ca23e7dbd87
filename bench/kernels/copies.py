"""Block copies as they are benchmarked: some blocks of a pool, all heads or half of them, to a staging buffer and back.

The cases of `pdserve.kernels.triton_block_copy`. Peers are torch's indexing, and a copy of its own for every block,
which on a GPU is ``cudaMemcpyAsync``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.bench.kernels.contest import Contender, Contest, Work
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.triton_block_copy import gather_blocks, scatter_blocks

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
        ids = torch.randperm(self.pool_blocks)[: self.num_blocks].int()
        on_device = ids.to(device)
        host_ids = ids.tolist()
        pool_bytes = self._random_bytes(self.pool_blocks, self.num_heads, device)
        staging_bytes = self._random_bytes(self.num_blocks, self.moved_heads, device)
        pin = self.to_host and device.type == "cuda"

        def sides() -> tuple[KvPool, KvPool]:
            """A pool and a staging buffer, of every contender its own."""
            staging = staging_bytes.cpu().pin_memory() if pin else staging_bytes.clone()
            return (
                self._pool(pool_bytes.clone(), self.pool_blocks, self.num_heads),
                self._pool(staging, self.num_blocks, self.moved_heads),
            )

        def own() -> Contender:
            kv_pool, staging = sides()

            def run() -> torch.Tensor:
                if self.is_gather:
                    gather_blocks(kv_pool, on_device, staging)
                    return staging.blocks
                scatter_blocks(staging, kv_pool, on_device)
                return kv_pool.blocks

            return Contender(run, _copied)

        def indexed() -> Contender:
            kv_pool, staging = sides()
            heads, packed = self._heads(kv_pool)[:, : self.moved_heads], self._heads(staging)
            long_ids = on_device.long()

            def run() -> torch.Tensor:
                if self.is_gather:
                    packed.copy_(heads.index_select(0, long_ids), non_blocking=True)
                    return staging.blocks
                heads.index_copy_(0, long_ids, packed.to(device, non_blocking=True))
                return kv_pool.blocks

            return Contender(run, _copied)

        def block_by_block() -> Contender:
            kv_pool, staging = sides()
            heads, packed = self._heads(kv_pool)[:, : self.moved_heads], self._heads(staging)
            pairs = [(heads[block], packed[place]) for place, block in enumerate(host_ids)]

            def run() -> torch.Tensor:
                for block, place in pairs:
                    (place if self.is_gather else block).copy_(block if self.is_gather else place, non_blocking=True)
                return staging.blocks if self.is_gather else kv_pool.blocks

            return Contender(run, _copied)

        return Contest(own(), {"torch index": indexed, "copy per block": block_by_block}, tolerance=0.0)

    def _random_bytes(self, num_blocks: int, num_heads: int, device: torch.device) -> torch.Tensor:
        num_values = num_blocks * num_heads * self._head_bytes // self.dtype.itemsize
        values = torch.randint(-99, 99, (num_values,), dtype=torch.int8, device=device)
        return values.to(self.dtype).view(torch.uint8)

    def _pool(self, memory: torch.Tensor, num_blocks: int, num_heads: int) -> KvPool:
        return KvPool(memory, (num_blocks, num_heads, self.num_layers, 2, _BLOCK_SIZE, self.head_dim), self.dtype)

    def _heads(self, pool: KvPool) -> torch.Tensor:
        """uint8 ``[blocks, heads, bytes of a head]``."""
        return pool.blocks.view(len(pool.blocks), -1, self._head_bytes)


def _copied(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.clone()
