"""KV blocks of a device and of the host, for `pdserve.model.block_copies.BlockCopier`.

Copies between them are done in the order of the device's other work, and the host waits for none: swap slots are
written and read by copies only. Used by `pdserve.model.gpu_executor`.
"""

from __future__ import annotations

from weakref import finalize

import torch


class DeviceBlocks:
    """Implements `pdserve.model.block_copies.Blocks` over uint8 ``[number, block_bytes]``."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int, /) -> torch.Tensor:
        return self._blocks[index]

    def __setitem__(self, index: int, block: torch.Tensor, /) -> None:
        self._blocks[index].copy_(block, non_blocking=True)


def swap_slots(num_slots: int, pool_blocks: torch.Tensor) -> DeviceBlocks:
    """Host memory for as many blocks of a pool, which the pool's device copies to and from by itself.

    Raises:
        RuntimeError: the host's memory cannot be pinned.
    """
    slots = torch.empty((num_slots, pool_blocks.shape[1]), dtype=torch.uint8)
    if pool_blocks.is_cuda and num_slots:
        # By hand: torch's own pinned memory comes in powers of two.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostRegister(slots.data_ptr(), slots.nbytes, 0))
        # Whoever gets this memory next could not pin it. Where the process ends, so does all of it.
        finalize(slots, cudart.cudaHostUnregister, slots.data_ptr()).atexit = False
    return DeviceBlocks(slots)
