"""C++ collectives and channels of processes that share memory, called through ctypes. Arguments are asserted here.

`pdserve.kernels.cpu.build` compiles ranks.cpp. The ranks of a group must call the same collectives in the same order,
with the same sizes; messages are received in the order and sizes in which they are sent. A call waits for the others
without end: the owner of the processes ends them all if one is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import torch

from pdserve.kernels.cpu.build import kernel

_LINE_BYTES = 64
_SLOT_BYTES = 1 << 18
"""Fits the second-level caches: a larger tensor goes in pieces."""


class _GroupStruct(ctypes.Structure):
    """Mirrors ``struct Ranks`` of ranks.cpp."""

    _fields_ = (("memory", c_void_p), ("rank", c_int64), ("num_ranks", c_int64), ("slot_bytes", c_int64))


class _ChannelStruct(ctypes.Structure):
    """Mirrors ``struct Channel`` of ranks.cpp."""

    _fields_ = (("memory", c_void_p), ("num_slots", c_int64), ("slot_bytes", c_int64))


class RankMemory(NamedTuple):
    """Plan of the memory that a worker's ranks share: a group for each pipeline stage, then the channels.

    There is a channel to each rank for each micro-batch. Pages that are never written take no memory.
    """

    tensor_parallel: int
    pipeline_parallel: int = 1
    message_bytes: int = 0
    """A sender waits for the receiver of a larger message."""

    def create(self) -> int:
        """Allocate the memory, and return its descriptor.

        Raises:
            OSError: the kernel refuses it.
        """
        num_ranks = self.tensor_parallel * self.pipeline_parallel
        num_channels = num_ranks * self.pipeline_parallel if self.pipeline_parallel > 1 else 0
        fd = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.pipeline_parallel * self._group_bytes + num_channels * self._channel_bytes)
        return fd

    def group(self, fd: int, stage: int, tensor_rank: int) -> Group:
        """One rank's view of its stage's group. ``fd`` may be closed afterwards, as for `channels`."""
        assert 0 <= tensor_rank < self.tensor_parallel, tensor_rank
        memory = _map(fd, stage * self._group_bytes, self._group_bytes)
        return Group(memory, tensor_rank, self.tensor_parallel)

    def channels(self, fd: int, rank: int) -> list[Channel]:
        """The channels of messages to ``rank``, counted over all stages: one for each micro-batch."""
        first = self.pipeline_parallel * (self._group_bytes + rank * self._channel_bytes)
        starts = [first + micro_batch * self._channel_bytes for micro_batch in range(self.pipeline_parallel)]
        return [Channel(_map(fd, start, self._channel_bytes), self._num_slots) for start in starts]

    @property
    def _group_bytes(self) -> int:
        return self.tensor_parallel * (_LINE_BYTES + 2 * _SLOT_BYTES)

    @property
    def _num_slots(self) -> int:
        return max(1, -(-self.message_bytes // _SLOT_BYTES))

    @property
    def _channel_bytes(self) -> int:
        return 2 * _LINE_BYTES + self._num_slots * _SLOT_BYTES


def _map(fd: int, start: int, num_bytes: int) -> torch.Tensor:
    # The mapping lives as long as the tensor.
    return torch.frombuffer(mmap.mmap(fd, 0), dtype=torch.uint8, count=num_bytes, offset=start)


class Group:
    """One rank's part in the collectives of ranks. Not thread-safe."""

    def __init__(self, memory: torch.Tensor, rank: int, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._memory = memory
        self._struct = ctypes.byref(_GroupStruct(memory.data_ptr(), rank, num_ranks, _SLOT_BYTES))
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

    def limit_waits(self, seconds: float) -> None:
        """A no-op: the memory knows nothing of time."""


class Channel:
    """One end of a channel. One thread at a time sends, and one receives."""

    def __init__(self, memory: torch.Tensor, num_slots: int) -> None:
        self._memory = memory
        self._struct = ctypes.byref(_ChannelStruct(memory.data_ptr(), num_slots, _SLOT_BYTES))
        self._send = kernel("channel_send", c_void_p, c_void_p, c_int64)
        self._receive = kernel("channel_receive", c_void_p, c_void_p, c_int64)

    def send(self, x: torch.Tensor) -> None:
        """Send ``x``, contiguous; waits until the message before has been received."""
        assert x.is_contiguous()
        self._send(self._struct, x.data_ptr(), x.nbytes)

    def receive(self, x: torch.Tensor) -> None:
        """Wait for a message of the size of ``x``, contiguous, and copy it there."""
        assert x.is_contiguous()
        self._receive(self._struct, x.data_ptr(), x.nbytes)

    def limit_waits(self, seconds: float) -> None:
        """A no-op: the memory knows nothing of time."""
