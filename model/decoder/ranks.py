"""The tensor-parallel ranks of a model, as its decoder sees them: this process's place, and collectives.

The process group, torch's Gloo, is an object, without torch's global one. All ranks call the same collectives in the
same order. One rank pays for none.

Shape suffixes: B rows, C columns of a rank, V columns of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

from pdserve.contracts.step import RankLostError

COLLECTIVE_TIMEOUT_S = 60.0
"""Longer than the ranks may differ in warming up. A rank that stops later is found by its pulse, far sooner."""


class Ranks:
    """The ranks of one model. The default is one rank alone."""

    def __init__(self, group: ProcessGroup | None = None, rank: int = 0, num_ranks: int = 1) -> None:
        self._group = group
        self.rank = rank
        """0 is the leader."""
        self.num_ranks = num_ranks

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x``, contiguous, by its sum over the ranks. Every rank gets the same bits.

        Raises:
            RankLostError: another rank is gone. So do all collectives.
        """
        if self._group is not None:
            with _watched():
                self._group.allreduce(x).wait()
        return x

    def gather_columns(self, part_BC: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Join the ranks' columns: ``[B, num_columns]``, on every rank.

        Args:
            part_BC: this rank's columns; all ranks but the last have as many.
        """
        if self._group is None:
            return part_BC
        num_rows, width = len(part_BC), -(-num_columns // self.num_ranks)
        padded_BC = torch.nn.functional.pad(part_BC, (0, width - part_BC.shape[1]))
        parts_RC = padded_BC.new_empty(self.num_ranks * num_rows, width)
        with _watched():
            self._group._allgather_base(parts_RC, padded_BC.contiguous()).wait()
        return parts_RC.view(self.num_ranks, num_rows, width).transpose(0, 1).flatten(1)[:, :num_columns].contiguous()

    def copy_leaders_(self, x: torch.Tensor) -> None:
        """Replace ``x``, contiguous, by the leader's."""
        if self._group is not None:
            with _watched():
                self._group.broadcast(x, 0).wait()


ONE_RANK = Ranks()


def join_ranks(store: Store, rank: int, num_ranks: int) -> Ranks:
    """Join the group of ``num_ranks`` ranks on the CPUs of this host; returns once all have joined.

    Args:
        store: shared by the ranks and empty at first; carries addresses, no tensors.

    Raises:
        RankLostError: another rank did not join in time.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    with _watched():
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = ProcessGroupGloo(store, rank, num_ranks, options)
    return Ranks(cast(ProcessGroup, group), rank, num_ranks)  # torch binds it without its base class


@contextmanager
def _watched() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"a rank of this worker is gone: {error}") from error
