from __future__ import annotations

import time

import psutil

from pdserve.planner.search.process_pool import ProcessPool
from tests.patience import HANG_S
from tests.planner.stand_ins import PoissonWorkload


def test_all_processes_begin_before_there_is_work_and_end_with_the_crew() -> None:
    me, deadline_s = psutil.Process(), time.monotonic() + HANG_S
    before = set(me.children())
    with ProcessPool(PoissonWorkload(), 3):
        while (
            len(workers := [child for child in set(me.children()) - before if "spawn_main" in str(child.cmdline())]) < 3
        ):
            assert time.monotonic() < deadline_s, f"only {len(workers)} began"
            time.sleep(0.01)
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
