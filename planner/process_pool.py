"""Pool of simulation processes for the search.

Takes and returns plain values, in order, so the number of processes affects only the time. Ctrl-C, any error, or the
end of the parent process ends all of them.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import active_children, connection, get_context, parent_process
from types import TracebackType
from typing import NamedTuple, Self

from pdserve.planner.attainment import Attainment
from pdserve.planner.goodput import Goodput, OneRate, RateSearch, Run, Runner, Trial, Workload, run_search
from pdserve.planner.goodput_search import GoodputSearch
from pdserve.planner.simulation import Simulation

_GC_THRESHOLD = 100_000
"""New objects between searches for cycles in a process of the pool."""


class GoodputJob(NamedTuple):
    """Arguments of a `GoodputSearch`."""

    trial: Trial
    start_rate: float
    tolerance: float
    max_rate: float = float("inf")


class AttainJob(NamedTuple):
    """Attainment at one rate, with every seed."""

    trial: Trial
    rate: float


class ProcessPool:
    """Simulates one workload in parallel; a context manager."""

    def __init__(self, workload: Workload, num_processes: int) -> None:
        """``num_processes`` 1 simulates in this process."""
        assert num_processes >= 1
        self._runner = Runner(workload)
        self._before = set(active_children())
        self._executor: ProcessPoolExecutor | None = None
        if num_processes > 1:
            self._executor = ProcessPoolExecutor(
                num_processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(workload,)
            )
            for _ in range(num_processes):
                self._executor.submit(os.getpid)  # Start the processes now: each starts at a call and takes a second.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._executor is None:
            return
        if kind is not None:
            for child in set(active_children()) - self._before:
                child.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, searches: Sequence[RateSearch], done: Callable[[int], None]) -> None:
        """Execute all runs of ``searches``, each as soon as it is requested; ``done`` receives the number ended.

        Raises:
            ValueError: a layout cannot run.
        """
        if self._executor is None:
            for num_done, search in enumerate(searches, 1):
                run_search(search, self._runner)
                done(num_done)
            return
        under_way: dict[Future[Simulation], tuple[RateSearch, Run]] = {}
        num_done = 0
        idle = list(searches)
        while idle or under_way:
            for search in idle:
                runs = search.ask()
                under_way |= {self._executor.submit(_carry_out, run): (search, run) for run in runs}
                if not runs:
                    num_done += 1
                    done(num_done)
            idle = []
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                search, run = under_way.pop(future)
                search.tell(run, future.result())
                if all(search is not busy for busy, _ in under_way.values()):
                    idle.append(search)

    def goodputs(self, jobs: Sequence[GoodputJob], done: Callable[[int], None]) -> list[Goodput]:
        """Goodput of each job, in order.

        Raises:
            ValueError: a layout cannot run.
        """
        searches = [GoodputSearch(*job) for job in jobs]
        self.run(searches, done)
        return [search.goodput() for search in searches]

    def attainments(self, jobs: Sequence[AttainJob], done: Callable[[int], None]) -> list[Attainment]:
        """Attainment of each job, in order; raises like `goodputs`."""
        rates = [OneRate(*job) for job in jobs]
        self.run(rates, done)
        return [each.attainment() for each in rates]


_runner_of_process: list[Runner] = []
"""The runner of this process, if it belongs to a pool."""


def _begin(workload: Workload) -> None:
    # Ctrl-C reaches all processes of a terminal: these end silently, and the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Reference counting frees almost everything that a simulation releases.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    _runner_of_process.append(Runner(workload))


def _end_with_parent() -> None:
    """A killed parent cannot notify its children, which would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _carry_out(run: Run) -> Simulation:
    return _runner_of_process[0].carry_out(run)
