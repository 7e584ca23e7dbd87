"""The kernels' own threads."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pdserve.kernels.cpu import threads as cpu_threads
from pdserve.kernels.cpu.dense import pack_linear
from pdserve.kernels.cpu.threads import use_cores, use_threads


def affinities() -> list[frozenset[int]]:
    """Of every thread of this process."""
    return [frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]


def test_helpers_run_on_the_cores_they_are_given() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    linear, x_TE = pack_linear(torch.rand(512, 512)), torch.rand(64, 512)

    def run() -> None:
        use_cores(cores)
        for _ in range(50):  # a helper may be too late for one loop
            linear(x_TE)
        moved.append(affinities().count(frozenset(cores)))

    moved: list[int] = []
    thread = threading.Thread(target=run)  # whose own affinity ends with it
    thread.start()
    thread.join()
    assert moved[0] >= 2, "the caller and its helper"


def test_callers_at_the_same_time_all_get_their_results() -> None:
    use_threads(2)
    linear = pack_linear(torch.rand(300, 200))
    inputs = [torch.rand(100, 200) for _ in range(4)]
    expected = [linear(x_TE) for x_TE in inputs]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(25):
            assert all(map(torch.equal, threads.map(linear, inputs), expected))


def test_an_idle_team_takes_no_time() -> None:
    use_threads(3)
    pack_linear(torch.rand(512, 512))(torch.rand(64, 512))
    time.sleep(0.05)
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.25


def test_without_the_library_torch_has_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "load_library", lambda: None)
    use_threads(2)
    assert torch.get_num_threads() == 2
