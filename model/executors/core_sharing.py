"""Lends the cores of a worker that has nothing to do to another worker of the same host.

Workers are pinned to disjoint cores, because threads of two processes that wait for each other on the same cores slow
both down. So while one phase is idle its cores would be, too: all of decode's while the first prompts are
computed, all of prefill's while the last answers are. A `CoreBoard` is a small shared file in which each worker says
when it computed last. Before a step, a worker takes its own cores and its share of those of the workers that have
computed nothing for `IDLE_S`; a step under way keeps what it took, so a lender waits for one step of the borrower at
most.

The board is advice: a stale entry costs speed, nothing else.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from pdserve.contracts.step import Executor, StepBatch, StepHandle
from pdserve.kernels.cpu.threads import use_cores

IDLE_S = 0.05
"""A worker between two steps, or waiting for a transfer, is not idle yet."""
_ENTRY_BYTES = 8
_COMPUTING = 2**63 - 1


class CoreBoard:
    """One worker's view of the board. Not thread-safe: the thread that computes owns it."""

    def __init__(self, path: Path, seat: int, cores: tuple[tuple[int, ...], ...]) -> None:
        """
        Args:
            path: a file that all workers of the host share; made by whoever comes first.
            seat: which entry of ``cores`` is this worker's.
            cores: of each worker, disjoint.
        """
        assert 0 <= seat < len(cores)
        size = _ENTRY_BYTES * len(cores)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._entries = memoryview(self._map).cast("q")
        self._seat = seat
        self._cores = cores
        self._entries[seat] = 0

    def begin_step(self) -> tuple[int, ...]:
        """This worker computes from now on; returns the cores that it may use until `end_step`, its own first."""
        self._entries[self._seat] = _COMPUTING
        idle_since_ns = time.monotonic_ns() - int(IDLE_S * 1e9)
        seats = range(len(self._cores))
        idle = [seat for seat in seats if self._entries[seat] < idle_since_ns]
        active = [seat for seat in seats if seat not in idle]
        lenders = idle[active.index(self._seat) :: len(active)]
        return self._cores[self._seat] + tuple(core for seat in lenders for core in self._cores[seat])

    def end_step(self) -> None:
        """This worker computes nothing until the next `begin_step`."""
        self._entries[self._seat] = time.monotonic_ns()

    def close(self) -> None:
        """Say that this worker is idle for good, and let go of the file."""
        self._entries[self._seat] = 0
        self._entries.release()
        self._map.close()


class CoreSharingExecutor:
    """Implements `pdserve.contracts.step.Executor`: runs another, which computes in ``submit``, on a board's cores."""

    def __init__(self, executor: Executor, board: CoreBoard) -> None:
        assert executor.pipeline_depth == 1, "a step must be over when submit returns"
        self._executor = executor
        self._board = board
        self._cores: tuple[int, ...] = ()

    @property
    def pipeline_depth(self) -> int:
        return 1

    def submit(self, batch: StepBatch) -> StepHandle:
        """Compute the step with as many threads as there are cores for it."""
        cores = self._board.begin_step()
        try:
            if cores != self._cores:
                use_cores(cores)
                self._cores = cores
            return self._executor.submit(batch)
        finally:
            self._board.end_step()

    def close(self) -> None:
        self._executor.close()
        self._board.close()
