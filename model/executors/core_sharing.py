"""Lends the cores of an idle worker to other workers of the same host.

Workers are pinned to disjoint cores, because threads of two processes that wait for each other on the same cores slow
both down. While one phase is idle, its cores would be idle too. In a `CoreBoard`, a small shared file, each worker
records when it computed last. Before a step, a worker takes its own cores and its share of those of the workers that
computed nothing for `IDLE_S`; it keeps them for the step, so a lender waits for at most one step of the borrower. A
stale entry costs speed, nothing else.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from pdserve.contracts.step import Executor, StepBatch, StepHandle
from pdserve.kernels.cpu.threads import use_cores

IDLE_S = 0.05
"""Longer than the gap between two steps or a wait for a transfer."""
_ENTRY_BYTES = 8
_COMPUTING = 2**63 - 1


class CoreBoard:
    """One worker's view of the board. Not thread-safe."""

    def __init__(self, path: Path, index: int, cores: tuple[tuple[int, ...], ...]) -> None:
        """
        Args:
            path: file that all workers of the host share; the first creates it.
            index: this worker's entry in ``cores``.
            cores: disjoint cores of each worker.
        """
        assert 0 <= index < len(cores)
        size = _ENTRY_BYTES * len(cores)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._entries = memoryview(self._map).cast("q")
        self._index = index
        self._cores = cores
        self._entries[index] = 0

    def begin_step(self) -> tuple[int, ...]:
        """Mark this worker as computing; return the cores that it may use until `end_step`, its own first."""
        self._entries[self._index] = _COMPUTING
        idle_since_ns = time.monotonic_ns() - int(IDLE_S * 1e9)
        idle = [index for index, since_ns in enumerate(self._entries) if since_ns < idle_since_ns]
        active = [index for index in range(len(self._cores)) if index not in idle]
        lenders = idle[active.index(self._index) :: len(active)]
        return self._cores[self._index] + tuple(core for index in lenders for core in self._cores[index])

    def end_step(self) -> None:
        """Mark this worker as idle from now on."""
        self._entries[self._index] = time.monotonic_ns()

    def close(self) -> None:
        """Mark this worker as idle for good, and close the file."""
        self._entries[self._index] = 0
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
        """Compute the step with one thread per available core."""
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
