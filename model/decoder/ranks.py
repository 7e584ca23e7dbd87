"""The tensor-parallel ranks of a model, as its decoder sees them: this process's place, and collectives.

All ranks call the same collectives in the same order. One rank pays for none.

Shape suffixes: B rows, C columns of a rank, V columns of all.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import pad


class Collectives(Protocol):
    """Exchanges tensors between ranks; every rank gets the same bits. `pdserve.kernels.cpu.ranks` does on CPUs."""

    def sum_(self, x: torch.Tensor) -> None:
        """Replace ``x``, contiguous, by its sum over the ranks."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``part``, contiguous: ``[num_ranks, *part.shape]``."""
        ...


class Ranks:
    """The ranks of one model. The default is one rank alone."""

    def __init__(self, collectives: Collectives | None = None, rank: int = 0, num_ranks: int = 1) -> None:
        self._collectives = collectives
        self.rank = rank
        """0 is the leader."""
        self.num_ranks = num_ranks

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Replace ``x``, contiguous, by its sum over the ranks, and return it."""
        if self._collectives is not None:
            self._collectives.sum_(x)
        return x

    def gather_columns(self, part_BC: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Join the ranks' columns: ``[B, num_columns]``, on every rank.

        Args:
            part_BC: this rank's columns; all ranks but the last have as many.
        """
        if self._collectives is None:
            return part_BC
        width = -(-num_columns // self.num_ranks)
        parts_RBC = self._collectives.gather(pad(part_BC, (0, width - part_BC.shape[1])).contiguous())
        return parts_RBC.transpose(0, 1).flatten(1)[:, :num_columns].contiguous()

    def copy_leaders_(self, x: torch.Tensor) -> None:
        """Replace ``x``, contiguous, by the leader's."""
        if self._collectives is not None:
            x.copy_(self._collectives.gather(x)[0])


ONE_RANK = Ranks()
