"""Collectives and channels of processes that each compute on a device of their own, through `torch.distributed`.

Process groups are objects: NCCL between GPUs, Gloo between CPUs in tests; torch's global group is never touched. The
processes find each other through a file that they inherit, so no store listens on a port. The ranks of a group must
call the same collectives in the same order, with the same sizes. A call, or on a GPU its stream, waits for the others:
the owner of the processes ends them all if one is gone. One that waits for longer than its limit fails, and NCCL then
ends the process. NCCL has not run yet.

A channel is a group of a sender and a receiver, which all micro-batches share. Steps cannot wait for each other in a
circle, because every GPU launches whole ones in the same order: what a step receives, computes and sends comes before
all of the next step. So the oldest step in flight never waits for a later one, even if a GPU runs everything in the
order of launches, as its few hardware queues may force it to.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

_LOOPBACK = "lo"
"""The ranks of a group are on one host, and need no port on its networks."""
_START_TIMEOUT = timedelta(minutes=5)
"""Until `Group.limit_waits`: the ranks load their weights meanwhile, some later than others."""


def create_meeting_file() -> int:
    """Create the file through which the ranks of one group find each other; returns its descriptor, to be inherited.

    Raises:
        OSError: the kernel refuses it.
    """
    return os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC)


class _Member:
    """A rank of a process group. Not thread-safe."""

    def __init__(self, fd: int, name: str, rank: int, num_ranks: int, device: torch.device) -> None:
        """Join the group ``name``; on a CPU, wait for all ranks.

        Args:
            fd: from `create_meeting_file`, for all groups of a worker; may be closed afterwards.
            device: of this rank's tensors.
        """
        from torch import distributed  # some builds of torch lack it

        # The store opens its path again whenever it is used, at the end of the process, too, and waits for minutes if
        # it is gone; so this descriptor is never closed.
        path = f"/proc/self/fd/{os.dup(fd)}"
        store = distributed.PrefixStore(name, distributed.FileStore(path, num_ranks))  # type: ignore[attr-defined]
        self._num_ranks = num_ranks
        self._group: Any  # torch's stubs know none of the methods below
        if device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _START_TIMEOUT
            self._group = distributed.ProcessGroupNCCL(store, rank, num_ranks, options)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
            self._group = distributed.ProcessGroupGloo(store, rank, num_ranks, _START_TIMEOUT)

    def limit_waits(self, seconds: float) -> None:
        """Let later calls, except those of captured steps and messages of Gloo, wait for the others for at most so
        long."""
        self._group._set_default_timeout(timedelta(seconds=seconds))


class Group(_Member):
    """One rank's part in the collectives of a stage's ranks."""

    def sum_(self, x: torch.Tensor) -> None:
        """Replace ``x``, contiguous, by its sum over the ranks, of the same bits on each."""
        assert x.is_contiguous()
        self._group.allreduce([x]).wait()

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``part``, contiguous: ``[num_ranks, *part.shape]``."""
        assert part.is_contiguous()
        parts = part.new_empty(self._num_ranks, *part.shape)
        self._group._allgather_base(parts.view(-1), part.view(-1)).wait()
        return parts


class Channel(_Member):
    """One end of the channel of messages to a rank."""

    def __init__(self, fd: int, receiver: int, *, is_receiver: bool, device: torch.device) -> None:
        """Open this end; on a CPU, wait for the other. The arguments are those of a group."""
        super().__init__(fd, f"to rank {receiver}", int(is_receiver), 2, device)

    def send(self, x: torch.Tensor) -> None:
        """Send ``x``, contiguous; waits until it has been received."""
        assert x.is_contiguous()
        self._group.send([x], 1, 0).wait()

    def receive(self, x: torch.Tensor) -> None:
        """Wait for a tensor of the size of ``x``, contiguous, and copy it there."""
        assert x.is_contiguous()
        self._group.recv([x], 0, 0).wait()
