"""Cases and timers for tests that return given values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch

from pdserve.bench.kernels.case import OWN, Case, Implementation, Make, Work
from pdserve.bench.kernels.measure import Timer

WORK = Work(1800e3, flops=4e6)


def gives(*values: float) -> Implementation:
    return Implementation(lambda: torch.tensor(values))


def fails(error: Exception) -> Implementation:
    def run() -> torch.Tensor:
        raise error

    return Implementation(run)


def scripted_case(
    *, kernel: str = "scripted", shape: str = "2 x 3", own: Make = lambda: gives(1.0, -2.0), **peers: Make
) -> Case:
    return Case(kernel, shape, WORK, lambda device: {OWN: own, **peers}, tolerance=0.01)


def fake_timer(seconds: Iterator[float] | None = None) -> Timer:
    """Runs everything once, and returns the given seconds in order; by default a microsecond."""
    values = seconds or repeat(1e-6)

    def timer(run: Callable[[], Any]) -> float:
        run()
        return next(values)

    return timer
