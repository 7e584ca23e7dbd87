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
the host copies it from there, so that the file takes memory only for blocks that have passed through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
        self._d2h = _CopyStream(pool_blocks, host)
        self._h2d = _CopyStream(pool_blocks, host)
        self._generations: dict[int, int] = {}
        """Generation of each block at its last D2H copy."""

    def copy_d2h(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        generation_by_block = dict(zip(block_ids, generations, strict=True))
        missing = [
            block for block, generation in generation_by_block.items() if self._generations.get(block) != generation
        ]
        self._d2h.copy(missing, is_d2h=True)
        self._generations.update(generation_by_block)

    def copy_h2d(self, block_ids: Sequence[int]) -> None:
        self._h2d.copy(block_ids, is_d2h=False)


class _CopyStream:
    """A CUDA stream with its pinned memory."""

    def __init__(self, pool_blocks: torch.Tensor, host_runs: Sequence[torch.Tensor]) -> None:
        """
        Args:
            host_runs: the same bytes of every block and head on the host, one run after the other:
                ``[num_blocks, num_heads, run_bytes]`` each.
        """
        device, (num_blocks, block_bytes) = pool_blocks.device, pool_blocks.shape
        is_cuda = device.type == "cuda"
        num_pinned = min(num_blocks, max(1, PINNED_BYTES // block_bytes))
        self._pinned = torch.empty((num_pinned, block_bytes), dtype=torch.uint8, pin_memory=is_cuda)
        heads = self._pinned.view(num_pinned, host_runs[0].shape[1], -1)
        pinned_runs = torch.split(heads, [run.shape[-1] for run in host_runs], dim=-1)
        self._host = list(zip(host_runs, pinned_runs, strict=True))
        """Blocks, and their pinned memory."""
        self._device = [(pool_blocks, self._pinned)]
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def copy(self, block_ids: Sequence[int], *, is_d2h: bool) -> None:
        """Copy blocks from one side to the other."""
        source, target = (self._device, self._host) if is_d2h else (self._host, self._device)
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)  # a new thread is on the first GPU
        with torch.cuda.stream(self._stream):
            for start in range(0, len(block_ids), len(self._pinned)):
                blocks = block_ids[start : start + len(self._pinned)]
                for slot, block in enumerate(blocks):
                    for run, pinned in source:
                        pinned[slot].copy_(run[block], non_blocking=True)
                self._wait()
                for slot, block in enumerate(blocks):
                    for run, pinned in target:
                        run[block].copy_(pinned[slot], non_blocking=True)
                self._wait()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
