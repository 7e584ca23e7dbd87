"""Measures one case: prepares the implementations, compares their results, and times them.

Called by `pdserve.bench.kernels.run`. If a peer cannot be prepared or fails, the result gives the reason, and the other
peers go on. A peer with different results is timed and marked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from pdserve.bench.kernels.contest import Case, Contender, Limits, MakePeer
from pdserve.bench.kernels.timing import Timer, alternate

OWN = "pdserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one case."""

    kernel: str
    shape: str
    num_bytes: float
    flops: float
    limit_s: float | None
    """What the formula allows; None of a device that is not in the catalogue."""
    seconds: dict[str, float]
    """Of our kernel, `OWN`, and of the peers that ran."""
    differences: dict[str, float]
    """Of what peers computed from what ours did, as a share of the largest magnitude."""
    tolerance: float
    absent: dict[str, str]
    """Why peers did not run."""

    @property
    def own_s(self) -> float:
        return self.seconds[OWN]

    @property
    def limit_share(self) -> float | None:
        """Of what the formula asks for."""
        return None if self.limit_s is None else self.limit_s / self.own_s

    @property
    def ratios(self) -> dict[str, float]:
        """How many times longer peers take."""
        return {name: seconds / self.own_s for name, seconds in self.seconds.items() if name != OWN}

    @property
    def disagreeing(self) -> list[str]:
        """Peers whose result is not ours; NaN is not either."""
        return [name for name, difference in self.differences.items() if not difference <= self.tolerance]

    def as_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "shape": self.shape,
            "us": {name: seconds * 1e6 for name, seconds in self.seconds.items()},
            "tflops": self.flops / self.own_s / 1e12,
            "gbytes_per_s": self.num_bytes / self.own_s / 1e9,
            "limit_us": None if self.limit_s is None else self.limit_s * 1e6,
            "limit_share": self.limit_share,
            "times_faster_than": self.ratios,
            "differences": self.differences,
            "tolerance": self.tolerance,
            "absent": self.absent,
        }


def measure(
    case: Case,
    device: torch.device,
    timer: Timer,
    *,
    limits: Limits | None,
    num_rounds: int,
    skipped: Collection[str] = (),
) -> Result:
    """Time our kernel and its peers on ``device``.

    Args:
        skipped: peers that are left out.
    """
    contest = case.contest(device)
    own_value = contest.own.read(contest.own.run())
    runs: dict[str, Callable[[], Any]] = {OWN: contest.own.run}
    differences: dict[str, float] = {}
    absent: dict[str, str] = {}
    for name, make in contest.peers.items():
        if name in skipped:
            absent[name] = "left out as asked"
            continue
        try:
            peer, value = prepare(make)
            differences[name] = difference(own_value, value)
        except Exception as error:  # Whatever a peer raises is the reason why it is absent.
            absent[name] = _one_line(str(error) or type(error).__name__)
        else:
            runs[name] = peer.run
    work = case.work
    return Result(
        kernel=case.kernel,
        shape=case.shape,
        num_bytes=work.num_bytes,
        flops=work.flops,
        limit_s=None if limits is None else work.limit_s(limits),
        seconds=alternate(runs, timer, num_rounds),
        differences=differences,
        tolerance=contest.tolerance,
        absent=absent,
    )


def prepare(make: MakePeer) -> tuple[Contender, torch.Tensor]:
    """A peer, and what it computes. Its warnings are part of what it raises: torch tells there why it has no kernel."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            peer = make()
            return peer, peer.read(peer.run())
        except RuntimeError as error:
            raise RuntimeError(" ".join([str(error), *(str(warning.message) for warning in told)])) from error


def difference(own: torch.Tensor, peer: torch.Tensor) -> float:
    """Largest difference, as a share of the peer's largest magnitude."""
    assert own.shape == peer.shape, f"{tuple(own.shape)} is compared with {tuple(peer.shape)}"
    if own.dtype == peer.dtype and torch.equal(own, peer):
        return 0.0
    own, peer = own.double(), peer.double()
    return float((own - peer).abs().amax() / peer.abs().amax())


_REASON_LENGTH = 300


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _REASON_LENGTH else f"{words[:_REASON_LENGTH]}..."
