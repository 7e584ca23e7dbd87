"""The mirror of a KV pool that lies on a device: blocks copied between the pool and a file of the same layout.

Transfer processes and peers map a worker's pool as a file (`pdserve.kv_transfer.pool_memory`), which the memory of a
device is not. There the file is a mirror: every block has its place in it, and holds bytes once it was granted to
another worker or pulled from one. Called by `pdserve.engine.mirrored_transfer`; knows neither grants nor pulls.

Copies wait for no step, and no step waits for them, because the blocks that are copied are in no step:

- a block is downloaded when the results of the step that wrote it are known, and it is granted for as long as its
  generation stays what it is;
- a block is uploaded while it is reserved for a pull: all steps of its former owner have ended, and its new owner
  waits to hear of the pull.

Each direction has a stream and pinned memory of its own: the device copies a block as one run, with nothing to launch
on it, and the host copies from there, so that the file takes memory only where blocks have passed through it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.kv_transfer.pool_memory import PoolMemory

STAGING_BYTES = 32 << 20
"""Pinned memory of each direction."""


class KvMirror:
    """A pool and its mirror. `download` may run beside `upload`, neither beside itself."""

    def __init__(self, pool_blocks: torch.Tensor, memory: PoolMemory) -> None:
        """
        Args:
            pool_blocks: uint8 ``[num_blocks, block_bytes]``, on any device.
            memory: the mirror, of the pool's layout.
        """
        layout = memory.layout
        assert pool_blocks.dtype == torch.uint8
        assert pool_blocks.shape == (layout.num_blocks, layout.block_bytes), f"{pool_blocks.shape} is no pool {layout}"
        self._pool = pool_blocks
        self._mirror = torch.frombuffer(memory.blocks, dtype=torch.uint8).view(pool_blocks.shape)
        self._outward = _Lane(pool_blocks)
        self._inward = _Lane(pool_blocks)
        self._held: dict[int, int] = {}
        """Generation of each block that was downloaded, as it was then."""

    def download(self, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Copy blocks from the pool to the mirror; returns when they are there.

        Args:
            generations: of each block. While it is the same, so are the bytes, and a block that many prompts begin with
                is copied once.
        """
        wanted = dict(zip(block_ids, generations, strict=True))
        missing = [block for block, generation in wanted.items() if self._held.get(block) != generation]
        self._outward.copy(self._pool, self._mirror, missing)
        self._held.update(wanted)

    def upload(self, block_ids: Sequence[int]) -> None:
        """Copy blocks from the mirror to the pool; returns when they are there."""
        self._inward.copy(self._mirror, self._pool, block_ids)


class _Lane:
    """A stream and the pinned memory that blocks pass through, of one direction."""

    def __init__(self, pool_blocks: torch.Tensor) -> None:
        device, (num_blocks, block_bytes) = pool_blocks.device, pool_blocks.shape
        is_cuda = device.type == "cuda"
        num_staged = min(num_blocks, max(1, STAGING_BYTES // block_bytes))
        self._staging = torch.empty((num_staged, block_bytes), dtype=torch.uint8, pin_memory=is_cuda)
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def copy(self, source: torch.Tensor, target: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copy rows of ``source`` to the same rows of ``target``, of which one is on the host."""
        with torch.cuda.stream(self._stream):
            for start in range(0, len(block_ids), len(self._staging)):
                blocks = block_ids[start : start + len(self._staging)]
                for slot, block in enumerate(blocks):
                    self._staging[slot].copy_(source[block], non_blocking=True)
                self._wait()
                for slot, block in enumerate(blocks):
                    target[block].copy_(self._staging[slot], non_blocking=True)
                self._wait()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
