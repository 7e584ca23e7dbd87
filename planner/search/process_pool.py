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
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from functools import partial
from multiprocessing import active_children, connection, get_context, parent_process
from types import TracebackType
from typing import Self

from pdserve.planner.search.goodput import Result, Run, Runner, Search, Workload
from pdserve.planner.simulate.attainment import Attainment

_GC_THRESHOLD = 100_000
"""New objects between searches for cycles in a process of the pool."""

Job = Callable[[Runner], Result]
"""A simulation, or a search that takes several; it crosses to another process, so it is a partial call."""


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

    def run(self, jobs: Sequence[Job[Result]], done: Callable[[int], None] = lambda num_done: None) -> list[Result]:
        """Results of ``jobs``, in order; ``done`` receives the number that have ended.

        Raises:
            ValueError: a layout cannot run.
        """
        futures = [self.submit(job) for job in jobs]
        for num_done, future in enumerate(as_completed(futures), 1):
            future.result()
            done(num_done)
        return [future.result() for future in futures]

    def search(
        self, searches: Sequence[Search[Result]], done: Callable[[Run, Attainment], None] = lambda run, seen: None
    ) -> list[Result]:
        """Results of ``searches``, in order, each of which goes on as soon as its runs are over; ``done`` receives each
        run.

        Raises:
            ValueError: a layout cannot run.
        """
        results: dict[int, Result] = {}
        running: dict[Future[Attainment], tuple[int, Run]] = {}

        def go_on(index: int, seen: Attainment | None = None) -> None:
            try:
                run = next(searches[index]) if seen is None else searches[index].send(seen)
            except StopIteration as stop:
                results[index] = stop.value
            else:
                running[self.submit(partial(Runner.attainment, trial=run.trial, rate=run.rate))] = (index, run)

        for index in range(len(searches)):
            go_on(index)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                index, run = running.pop(future)
                done(run, future.result())
                go_on(index, future.result())
        return [results[index] for index in range(len(searches))]

    def submit(self, job: Job[Result]) -> Future[Result]:
        """Start ``job`` once a process is free; without other processes, carry it out now."""
        if self._executor is not None:
            return self._executor.submit(_carry_out, job)
        future = Future[Result]()
        future.set_result(job(self._runner))
        return future


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


def _carry_out(job: Job[Result]) -> Result:
    return job(_runner_of_process[0])
