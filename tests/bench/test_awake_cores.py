from __future__ import annotations

import os

import psutil

from pdserve.bench.awake_cores import awake_cores
from tests.workers import wait_until


def test_every_core_has_a_process_that_gives_way_to_all_others_and_none_is_left() -> None:
    before = set(psutil.Process().children())
    with awake_cores():
        children = set(psutil.Process().children()) - before
        wait_until(
            lambda: (
                {tuple(os.sched_getaffinity(child.pid)) for child in children}
                == {(core,) for core in os.sched_getaffinity(0)}
            ),
            "a process on each core",
        )
        assert {os.sched_getscheduler(child.pid) for child in children} == {os.SCHED_IDLE}
    assert not any(child.is_running() for child in children)
