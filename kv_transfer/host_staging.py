"""Host staging of a GPU KV pool: copies blocks between the pool and a host file.

Transfer processes and peers map a worker's pool as a file (`pdserve.kv_transfer.pool_memory`). For a pool in GPU
memory the file is a staging area: every block has room in it, with valid bytes once it was copied for another
worker or pulled from one. The ranks of a worker share one file, and each copies its own KV heads and layers. Called by
`pdserve.engine.worker.staged_transfer` and, on ranks other than the leader, by `pdserve.engine.worker.follower`. Knows
neither grants nor pulls.

Copies and steps never wait for each other, because copied blocks are in no step:

- A block is copied D2H once the results of the step that wrote it are known. It stays granted as long as its
  generation is the same.
- A block is copied H2D while it is reserved for a pull: all steps of its former owner have ended, and its new owner
  waits for the pull.

Each direction has its own stream and pinned memory. The GPU copies a block as one run, without a kernel launch, and
the host copies it from there while the GPU copies the next ones. The file takes memory only for blocks that another
worker may pull, and for pulls in flight: what has arrived in the pool is given back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import cycle
from typing import Protocol

import torch

from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard

PINNED_BYTES = 32 << 20
"""Pinned memory per direction."""


class Staging(Protocol):
    """Copies blocks between a worker's pool and its staging file. The two directions may run concurrently, each with
    one copy at a time."""

    def copy_d2h(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Copy blocks from the pool to the host; returns when they have arrived.

        Args:
            generations: generation of each block. The bytes do not change while it is the same, so a block shared by
                many prompts is copied once.
        """
        ...

    def copy_h2d(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the host to the pool; returns when they have arrived."""
        ...

    def release(self, block_ids: Sequence[int]) -> None:
        """Give the host memory of blocks that are granted to nobody back."""
        ...


class HostStaging:
    """`Staging` of one rank's pool."""

    def __init__(self, pool_blocks: torch.Tensor, memory: PoolMemory, shard: KvShard | None = None) -> None:
        """
        Args:
            pool_blocks: uint8 ``[num_blocks, bytes of the shard in a block]``, on any device.
            memory: the staging file, of the layout of all ranks' pool.
            shard: KV heads and layers of the layout that the pool holds; by default all.
        """
        layout = memory.layout
        shard = shard or KvShard(range(layout.num_kv_heads), range(layout.num_layers))
        own = replace(layout, num_kv_heads=len(shard.heads), num_layers=len(shard.layers))
        assert pool_blocks.dtype == torch.uint8
        assert pool_blocks.shape == (own.num_blocks, own.block_bytes), f"{pool_blocks.shape} for {layout} with {shard}"
        blocks = torch.frombuffer(memory.blocks, dtype=torch.uint8).view(layout.num_blocks, layout.num_kv_heads, -1)
        own_heads = blocks[:, shard.heads.start : shard.heads.stop]
        host = [own_heads[..., run.start : run.stop] for run in layout.layer_runs(shard.layers)]
        self._memory = memory
        self._d2h = _CopyStream(pool_blocks, host)
        self._h2d = _CopyStream(pool_blocks, host)
        self._generations: dict[int, int] = {}
        """Generation of each block at its last D2H copy."""

    def copy_d2h(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        generation_by_block = dict(zip(block_ids, generations, strict=True))
        missing = [
            block for block, generation in generation_by_block.items() if self._generations.get(block) != generation
        ]
        self._d2h.copy_d2h(missing)
        self._generations.update(generation_by_block)

    def copy_h2d(self, block_ids: Sequence[int]) -> None:
        self._h2d.copy_h2d(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        self._memory.release(block_ids)


class _CopyStream:
    """A CUDA stream with two halves of pinned memory: the host copies one while the GPU copies the other."""

    def __init__(self, pool_blocks: torch.Tensor, host_runs: Sequence[torch.Tensor]) -> None:
        """
        Args:
            host_runs: the same bytes of every block and head on the host, one run after the other:
                ``[num_blocks, num_heads, run_bytes]`` each.
        """
        num_blocks, block_bytes = pool_blocks.shape
        is_cuda = pool_blocks.device.type == "cuda"
        self._half_blocks = min(num_blocks, max(1, PINNED_BYTES // 2 // block_bytes))
        self._halves = [_Half(pool_blocks, host_runs, self._half_blocks) for _ in range(2)]
        self._stream = torch.cuda.Stream(pool_blocks.device) if is_cuda else None  # type: ignore[no-untyped-call]

    def copy_d2h(self, block_ids: Sequence[int]) -> None:
        with self._current():
            before: tuple[_Half, Sequence[int]] | None = None
            for half, blocks in self._batches(block_ids):
                half.fetch(blocks)
                if before is not None:
                    before[0].to_host(before[1])
                before = half, blocks
            if before is not None:
                before[0].to_host(before[1])

    def copy_h2d(self, block_ids: Sequence[int]) -> None:
        with self._current():
            for half, blocks in self._batches(block_ids):
                half.from_host(blocks)
            for half in self._halves:
                half.wait()

    def _batches(self, block_ids: Sequence[int]) -> Iterator[tuple[_Half, Sequence[int]]]:
        starts = range(0, len(block_ids), self._half_blocks)
        for half, start in zip(cycle(self._halves), starts, strict=False):
            yield half, block_ids[start : start + self._half_blocks]

    def _current(self) -> AbstractContextManager[object]:
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)  # a new thread is on the first GPU
        return torch.cuda.stream(self._stream)


class _Half:
    """Pinned memory for some blocks, with the event of the GPU's last copy from or to it."""

    def __init__(self, pool_blocks: torch.Tensor, host_runs: Sequence[torch.Tensor], num_blocks: int) -> None:
        is_cuda = pool_blocks.device.type == "cuda"
        self._pool_blocks = pool_blocks
        self._pinned = torch.empty((num_blocks, pool_blocks.shape[1]), dtype=torch.uint8, pin_memory=is_cuda)
        heads = self._pinned.view(num_blocks, host_runs[0].shape[1], -1)
        pinned_runs = torch.split(heads, [run.shape[-1] for run in host_runs], dim=-1)
        self._runs = list(zip(host_runs, pinned_runs, strict=True))
        """Blocks on the host, and their pinned memory."""
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def fetch(self, block_ids: Sequence[int]) -> None:
        """Have the GPU copy blocks of the pool here."""
        for slot, block in enumerate(block_ids):
            self._pinned[slot].copy_(self._pool_blocks[block], non_blocking=True)
        self._record()

    def to_host(self, block_ids: Sequence[int]) -> None:
        """Copy what was fetched to the host's file."""
        self.wait()
        for slot, block in enumerate(block_ids):
            for run, pinned in self._runs:
                run[block].copy_(pinned[slot])

    def from_host(self, block_ids: Sequence[int]) -> None:
        """Copy blocks of the host's file here, and have the GPU copy them to the pool."""
        self.wait()
        for slot, block in enumerate(block_ids):
            for run, pinned in self._runs:
                pinned[slot].copy_(run[block])
            self._pool_blocks[block].copy_(self._pinned[slot], non_blocking=True)
        self._record()

    def wait(self) -> None:
        """Wait for the GPU's last copy from or to this memory."""
        if self._copied is not None:
            self._copied.synchronize()

    def _record(self) -> None:
        if self._copied is not None:
            self._copied.record()
