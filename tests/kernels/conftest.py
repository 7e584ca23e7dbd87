"""Kernels are tested on two threads: as few as show that their number does not matter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.kernels.cpu_threads import use_threads


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    use_threads(2)
    yield
    use_threads(1)
