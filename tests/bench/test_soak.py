from __future__ import annotations

import os

import psutil

from pdserve.bench.soak import growth, memory_mib


def test_growth_compares_the_second_and_the_last_quarter() -> None:
    samples = [{"s": 10.0 * number, "mib": {"router": float(number), "worker": 5.0}} for number in range(8)]
    assert growth(samples) == {
        "router": {"second_quarter": 2.5, "last_quarter": 6.5},
        "worker": {"second_quarter": 5.0, "last_quarter": 5.0},
    }


def test_memory_is_by_process() -> None:
    sizes = memory_mib(psutil.Process(os.getpid()))
    assert sum(sizes.values()) > 10
