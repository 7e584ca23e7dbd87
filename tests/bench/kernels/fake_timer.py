"""A timer for tests: it runs everything, and says what it was told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any


class FakeTimer:
    """Implements `pdserve.bench.kernels.timing.Timer`."""

    def __init__(self, seconds: Iterator[float] | None = None) -> None:
        self._seconds = seconds or repeat(1e-6)

    def round_s(self, run: Callable[[], Any]) -> float:
        run()
        return next(self._seconds)
