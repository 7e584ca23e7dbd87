"""Processes that simulate side by side, for the search.

Work is given as plain values and comes back in the order in which it was given, so that the number of processes changes
nothing but the time. Ctrl-C, any error, or the end of the process that gave them work ends them all.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self, TypeVar

from pdserve.planner.attainment import Attainment
from pdserve.planner.goodput import DrawnRequests, Goodput, Trial, Workload, attain, find_goodput

Job = TypeVar("Job")
Result = TypeVar("Result")


class GoodputJob(NamedTuple):
    """See `pdserve.planner.goodput.find_goodput`."""

    trial: Trial
    start_rate: float
    tolerance: float
    max_rate: float = float("inf")


class AttainJob(NamedTuple):
    """See `pdserve.planner.goodput.attain`."""

    trial: Trial
    rate: float


class Crew:
    """Simulates one workload; a context manager."""

    def __init__(self, workload: Workload, num_processes: int) -> None:
        """``num_processes`` 1 simulates in this process."""
        assert num_processes >= 1
        self._workload = _DrawnOnce(workload)
        self._before = set(active_children())
        self._executor: ProcessPoolExecutor | None = None
        if num_processes > 1:
            # The catalogue's read-only mappings do not travel by themselves.
            ForkingPickler.register(MappingProxyType, _reduce_mapping)
            self._executor = ProcessPoolExecutor(
                num_processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(workload,)
            )

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

    def goodputs(self, jobs: Sequence[GoodputJob], done: Callable[[int], None]) -> list[Goodput]:
        """Of each job, in order; ``done`` hears how many are over.

        Raises:
            ValueError: a layout cannot be run.
        """
        return self._all(_goodput, jobs, done)

    def attainments(self, jobs: Sequence[AttainJob], done: Callable[[int], None]) -> list[Attainment]:
        """The same of single rates."""
        return self._all(_attainment, jobs, done)

    def _all(
        self, work: Callable[[Job, Workload], Result], jobs: Sequence[Job], done: Callable[[int], None]
    ) -> list[Result]:
        if self._executor is None:
            results = []
            for job in jobs:
                results.append(work(job, self._workload))
                done(len(results))
            return results
        futures: list[Future[Result]] = [self._executor.submit(_work, work, job) for job in jobs]
        for num_done, _ in enumerate(as_completed(futures), 1):
            done(num_done)
        return [future.result() for future in futures]


class _DrawnOnce:
    """A workload that remembers what was drawn of it: the same requests serve every rate and layout."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._drawn: dict[tuple[int, int, int], DrawnRequests] = {}

    def draw(self, num_requests: int, seed: int, *, max_model_len: int) -> DrawnRequests:
        key = (num_requests, seed, max_model_len)
        if key not in self._drawn:
            self._drawn[key] = self._workload.draw(num_requests, seed, max_model_len=max_model_len)
        return self._drawn[key]


def _goodput(job: GoodputJob, workload: Workload) -> Goodput:
    return find_goodput(job.trial, workload, job.start_rate, tolerance=job.tolerance, max_rate=job.max_rate)


def _attainment(job: AttainJob, workload: Workload) -> Attainment:
    return attain(job.trial, workload, job.rate)


def _reduce_mapping(mapping: MappingProxyType[str, object]) -> tuple[type, tuple[dict[str, object]]]:
    return MappingProxyType, (dict(mapping),)


_workload_of_process: list[_DrawnOnce] = []
"""In a process of the crew, its workload."""


def _begin(workload: Workload) -> None:
    # Ctrl-C goes to all processes of a terminal: these end without a word, and the first one tells what happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _workload_of_process.append(_DrawnOnce(workload))


def _end_with_parent() -> None:
    """A parent that is killed cannot say so, and a process that waits for work would wait for ever."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(work: Callable[[Job, Workload], Result], job: Job) -> Result:
    return work(job, _workload_of_process[0])
