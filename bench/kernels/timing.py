"""Times kernels on a GPU: device time between CUDA events, with an empty L2.

Called by `pdserve.bench.kernels.measure` and `tune`. Before every run the device sleeps for a moment, so that the
host submits the whole run before the first event passes, and then writes more than its L2 holds.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

_ROUND_S = 0.05
_MIN_RUNS, _MAX_RUNS = 5, 50
_HEAD_START_CYCLES = 500_000
"""Some 0.3 ms."""
_CLOCKS_TIMEOUT_S = 10.0
_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


class Timer(Protocol):
    """Measures one round of a contender."""

    def round_s(self, run: Callable[[], Any]) -> float:
        """Median seconds of some runs."""
        ...


class CudaTimer:
    """On the current CUDA device."""

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=device)

    def round_s(self, run: Callable[[], Any]) -> float:
        run()
        first_s = self._read([self._record(run)])[0]
        num_runs = min(max(int(_ROUND_S / first_s), _MIN_RUNS), _MAX_RUNS)
        return statistics.median(self._read([self._record(run) for _ in range(num_runs)]))

    def _record(self, run: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = _event(), _event()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        self._flushed.zero_()
        start.record()
        run()
        end.record()
        return start, end

    @staticmethod
    def _read(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def alternate(runs: Mapping[str, Callable[[], Any]], timer: Timer, num_rounds: int) -> dict[str, float]:
    """Medians of ``num_rounds`` rounds of each contender, which take turns: what the device does to one, as its clocks
    change, it does to all."""
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds):
        for name, run in runs.items():
            rounds[name].append(timer.round_s(run))
    return {name: statistics.median(seconds) for name, seconds in rounds.items()}


def clocks_under(run: Callable[[], Any], device: torch.device) -> dict[str, str]:
    """Clocks, power and temperature while ``run`` keeps the device busy; empty where there is no ``nvidia-smi``."""
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={identity}", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        return {}
    deadline_s = time.monotonic() + _CLOCKS_TIMEOUT_S
    while asked.poll() is None and time.monotonic() < deadline_s:
        run()
        torch.cuda.synchronize()
    asked.kill()
    answer, _ = asked.communicate()
    return parse_clocks(answer) if asked.returncode == 0 else {}


def parse_clocks(answer: str) -> dict[str, str]:
    """By name, with units, of a line of ``nvidia-smi``."""
    return dict(zip(_CLOCKS.split(","), (word.strip() for word in answer.split(",")), strict=False))
