from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

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


_SCRIPT = """
import time
from pdserve.planner.search.process_pool import ProcessPool
from tests.planner.stand_ins import PoissonWorkload

def work(runner):
    print("began", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    with ProcessPool(PoissonWorkload(), 2) as pool:
        pool.run([work, work])
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_work_that_is_cut_short_leaves_no_process(tmp_path: Path, ending: signal.Signals) -> None:
    script = tmp_path / "work_for_long.py"
    script.write_text(_SCRIPT)
    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "began" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(ending)
    process.communicate(timeout=HANG_S)
    deadline_s = time.monotonic() + HANG_S
    while any(child.is_running() for child in children) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not [child for child in children if child.is_running()]
