"""The board on which workers lend each other their cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from pdserve.contracts.step import StepBatch, StepHandle, StepOutput
from pdserve.kernels.cpu.threads import use_threads
from pdserve.model.executors import core_sharing
from pdserve.model.executors.core_sharing import CoreBoard, CoreSharingExecutor

CORES = ((0, 1), (2,), (3,))


@pytest.fixture
def clock_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The one entry is the time."""
    now = [10**12]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    return now


def boards(folder: Path) -> list[CoreBoard]:
    return [CoreBoard(folder / "cores", seat, CORES) for seat in range(len(CORES))]


def test_an_idle_worker_lends_until_it_computes(tmp_path: Path, clock_ns: list[int]) -> None:
    first, second, _ = boards(tmp_path)
    assert first.begin_step() == (0, 1, 2, 3)
    assert second.begin_step() == (2,), "the idle third goes to the first of two"
    first.end_step()
    assert first.begin_step() == (0, 1, 3)


def test_a_worker_between_two_steps_lends_nothing(tmp_path: Path, clock_ns: list[int]) -> None:
    first, second, third = boards(tmp_path)
    for board in (second, third):
        board.begin_step()
        board.end_step()
    clock_ns[0] += int(core_sharing.IDLE_S * 1e9) - 1
    assert first.begin_step() == (0, 1)
    clock_ns[0] += 2
    assert first.begin_step() == (0, 1, 2, 3)


def test_no_core_is_lent_twice(tmp_path: Path, clock_ns: list[int]) -> None:
    cores = tuple((seat,) for seat in range(6))
    workers = [CoreBoard(tmp_path / "cores", seat, cores) for seat in range(6)]
    computing = [workers[1], workers[4]]
    for worker in computing:
        worker.begin_step()
    taken = [core for worker in computing for core in worker.begin_step()]
    assert sorted(taken) == list(range(6))


def test_a_closed_board_is_that_of_an_idle_worker(tmp_path: Path, clock_ns: list[int]) -> None:
    first, second, third = boards(tmp_path)
    second.begin_step()
    third.begin_step()
    assert first.begin_step() == (0, 1)
    second.close()
    assert first.begin_step() == (0, 1, 2)


def test_processes_see_each_other(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    mine = CoreBoard(path, 0, CORES)
    program = (
        "import sys; from pathlib import Path; from pdserve.model.executors.core_sharing import CoreBoard\n"
        f"board = CoreBoard(Path({str(path)!r}), 1, {CORES!r}); board.begin_step(); print('computing', flush=True)\n"
        "sys.stdin.readline()"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline()
    assert mine.begin_step() == (0, 1, 3)
    child.kill()
    child.communicate()
    restarted = CoreBoard(path, 1, CORES)
    assert mine.begin_step() == (0, 1, 2, 3), "a new worker in the seat of a killed one is idle"
    restarted.close()


def test_only_the_owner_reads_the_file(tmp_path: Path) -> None:
    CoreBoard(tmp_path / "cores", 0, CORES).close()
    assert os.stat(tmp_path / "cores").st_mode & 0o777 == 0o600


class _Done(NamedTuple):
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class LookingAround:
    """An executor that notes on how many cores and threads it runs."""

    pipeline_depth = 1

    def __init__(self) -> None:
        self.seen: list[set[int]] = []

    def submit(self, batch: StepBatch) -> StepHandle:
        self.seen.append(os.sched_getaffinity(0))
        if batch.step_id == 13:
            raise RuntimeError("a bad step")
        return _Done(StepOutput(step_id=batch.step_id, sampled=[], duration_s=0.0))

    def close(self) -> None: ...


def test_steps_run_on_what_the_board_gives(tmp_path: Path) -> None:
    own, other = sorted(os.sched_getaffinity(0))[:2]
    seats = ((own,), (other,))
    inner, neighbour = LookingAround(), CoreBoard(tmp_path / "cores", 1, seats)

    def run() -> None:
        executor = CoreSharingExecutor(inner, CoreBoard(tmp_path / "cores", 0, seats))
        executor.submit(StepBatch(step_id=0, rows=[]))
        neighbour.begin_step()
        with pytest.raises(RuntimeError, match="bad step"):
            executor.submit(StepBatch(step_id=13, rows=[]))
        assert neighbour.begin_step() == (other,), "the worker has computed just now"
        executor.close()

    thread = threading.Thread(target=run)  # whose affinity ends with it
    thread.start()
    thread.join()
    use_threads(1)
    assert inner.seen == [{own, other}, {own}]
    assert neighbour.begin_step() == (other, own)
