"""Measures one case: prepares its implementations, compares their results, and times them in turn.

If a peer cannot be prepared or fails, the result gives the reason and the other peers go on. A peer with different
results is timed and marked. Called by `pdserve.bench.kernels.run`.
"""

from __future__ import annotations

import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.testing import do_bench

from pdserve.bench.kernels.case import OWN, Case, Limits, Make

Timer = Callable[[Callable[[], Any]], float]
"""Returns the median seconds of some runs."""
_REASON_LENGTH = 300
_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
_CLOCKS_TIMEOUT_S = 10.0


def gpu_timer(run: Callable[[], Any]) -> float:
    """Device time with an empty L2."""
    median_ms: float = do_bench(run, return_mode="median")
    return median_ms / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: Case
    limit_s: float | None
    """Time that the formula allows; None if the device is not in the catalogue."""
    seconds: dict[str, float]
    """Median time by implementation."""
    differences: dict[str, float]
    """Difference of each peer's result from ours, as a share of the largest magnitude."""
    absent: dict[str, str]
    """Reason why a peer did not run."""

    @property
    def own_s(self) -> float:
        return self.seconds[OWN]

    @property
    def limit_share(self) -> float | None:
        return None if self.limit_s is None else self.limit_s / self.own_s

    @property
    def ratios(self) -> dict[str, float]:
        """Time of each peer as a multiple of ours."""
        return {name: seconds / self.own_s for name, seconds in self.seconds.items() if name != OWN}

    @property
    def disagreeing(self) -> list[str]:
        """Peers with other results than ours; NaN differs from everything."""
        return [name for name, difference in self.differences.items() if not difference <= self.case.tolerance]

    def as_dict(self) -> dict[str, Any]:
        work = self.case.work
        return {
            "kernel": self.case.kernel,
            "shape": self.case.shape,
            "us": {name: seconds * 1e6 for name, seconds in self.seconds.items()},
            "tflops": work.flops / self.own_s / 1e12,
            "gbytes_per_s": work.num_bytes / self.own_s / 1e9,
            "limit_us": None if self.limit_s is None else self.limit_s * 1e6,
            "limit_share": self.limit_share,
            "times_faster_than": self.ratios,
            "differences": self.differences,
            "tolerance": self.case.tolerance,
            "absent": self.absent,
        }


@torch.no_grad()
def measure(case: Case, device: torch.device, timer: Timer, *, limits: Limits | None, num_rounds: int) -> Result:
    """Time our kernel and its peers. They take turns, so that changing clocks affect all."""
    implementations = dict(case.make(device))
    own = implementations.pop(OWN)()
    own_value = own.read(own.run())
    runs, differences, absent = {OWN: own.run}, {}, {}
    for name, make in implementations.items():
        try:
            runs[name], differences[name] = _compare(make, own_value)
        except Exception as error:  # Anything that a peer raises is the reason for its absence.
            words = " ".join((str(error) or type(error).__name__).split())
            absent[name] = words if len(words) <= _REASON_LENGTH else f"{words[:_REASON_LENGTH]}..."
    rounds = [{name: timer(run) for name, run in runs.items()} for _ in range(num_rounds)]
    return Result(
        case=case,
        limit_s=None if limits is None else case.work.limit_s(limits),
        seconds={name: statistics.median(seconds[name] for seconds in rounds) for name in runs},
        differences=differences,
        absent=absent,
    )


def _compare(make: Make, own_value: torch.Tensor) -> tuple[Callable[[], Any], float]:
    """Prepare a peer, run it once, and return its timed call and its difference from our result. Its warnings are added
    to its error: torch gives there the reason why it has no kernel."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            peer = make()
            return peer.run, difference(own_value, peer.read(peer.run()))
        except RuntimeError as error:
            raise RuntimeError(" ".join([str(error), *(str(warning.message) for warning in caught)])) from error


def difference(own: torch.Tensor, peer: torch.Tensor) -> float:
    """Return the largest difference, as a share of the peer's largest magnitude."""
    assert own.shape == peer.shape, f"{tuple(own.shape)} is compared with {tuple(peer.shape)}"
    if own.dtype == peer.dtype and torch.equal(own, peer):
        return 0.0
    own, peer = own.double(), peer.double()
    return float((own - peer).abs().amax() / peer.abs().amax())


def clocks_under(run: Callable[[], Any], device: torch.device) -> dict[str, str]:
    """Return clocks, power and temperature while ``run`` keeps the device busy; empty without ``nvidia-smi``."""
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={identity}", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    try:
        query = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        return {}
    deadline_s = time.monotonic() + _CLOCKS_TIMEOUT_S
    while query.poll() is None and time.monotonic() < deadline_s:
        run()
        torch.cuda.synchronize()
    query.kill()
    answer, _ = query.communicate()
    return parse_clocks(answer) if query.returncode == 0 else {}


def parse_clocks(answer: str) -> dict[str, str]:
    """Parse a line of ``nvidia-smi`` to values with units, by name."""
    return dict(zip(_CLOCKS.split(","), (word.strip() for word in answer.split(",")), strict=False))
