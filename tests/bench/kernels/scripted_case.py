"""A case for tests, whose kernel and peers do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pdserve.bench.kernels.contest import Contender, Contest, MakePeer, Work


def gives(*values: float) -> Contender:
    return Contender(lambda: torch.tensor(values))


def fails(error: Exception) -> Contender:
    def run() -> torch.Tensor:
        raise error

    return Contender(run)


WORK = Work(1800e3, flops=4e6)


@dataclass(frozen=True, kw_only=True)
class ScriptedCase:
    """Implements `pdserve.bench.kernels.contest.Case`."""

    kernel: str = "scripted"
    shape: str = "2 x 3"
    work: Work = WORK
    own: Callable[[], Contender] = lambda: gives(1.0, -2.0)
    peers: dict[str, MakePeer] = field(default_factory=dict)

    def contest(self, device: torch.device) -> Contest:
        return Contest(self.own(), self.peers, tolerance=0.01)
