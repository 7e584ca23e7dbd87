"""C++ collectives of processes that share memory, called through ctypes. Arguments are asserted here.

`pdserve.kernels.cpu.build` compiles ranks.cpp. All ranks must call the same functions in the same order, with the same
sizes. A call waits for the others without end: the owner of the processes ends them all if one is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import c_int64, c_void_p

import torch

from pdserve.kernels.cpu.build import kernel

_LINE_BYTES = 64
_SLOT_BYTES = 1 << 18
"""Fits the second-level caches: a larger tensor goes in pieces."""


class _Struct(ctypes.Structure):
    """Mirrors ``struct Ranks`` of ranks.cpp."""

    _fields_ = (("memory", c_void_p), ("rank", c_int64), ("num_ranks", c_int64), ("slot_bytes", c_int64))


def create_memory(num_ranks: int) -> int:
    """Allocate the memory that ``num_ranks`` ranks share, and return its descriptor.

    Raises:
        OSError: the kernel refuses it.
    """
    fd = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_ranks * (_LINE_BYTES + 2 * _SLOT_BYTES))
    return fd


class SharedMemory:
    """One rank's view of the memory. Not thread-safe."""

    def __init__(self, fd: int, rank: int, num_ranks: int) -> None:
        """Map ``fd``, a descriptor of `create_memory`, which may be closed afterwards."""
        assert 0 <= rank < num_ranks, (rank, num_ranks)
        self._num_ranks = num_ranks
        # Held by the tensor, which keeps the mapping alive.
        memory = torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8)
        assert len(memory) == num_ranks * (_LINE_BYTES + 2 * _SLOT_BYTES), len(memory)
        self._memory = memory
        self._struct = ctypes.byref(_Struct(memory.data_ptr(), rank, num_ranks, _SLOT_BYTES))
        self._sum = kernel("ranks_sum", c_void_p, c_void_p, c_int64)
        self._gather = kernel("ranks_gather", c_void_p, c_void_p, c_void_p, c_int64)

    def sum_(self, x: torch.Tensor) -> None:
        """Replace ``x``, float32 and contiguous, by its sum over the ranks, of the same bits on each."""
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        self._sum(self._struct, x.data_ptr(), x.numel())

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``part``, contiguous: ``[num_ranks, *part.shape]``."""
        assert part.is_contiguous()
        parts = part.new_empty(self._num_ranks, *part.shape)
        self._gather(self._struct, part.data_ptr(), parts.data_ptr(), part.nbytes)
        return parts
