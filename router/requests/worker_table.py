"""Workers as columns of one array, a row each, so that a decision takes a fixed number of array operations.

`pdserve.router.requests.goodput` owns the table and hands it the snapshots of every decision. A row is computed anew
when its worker has another snapshot: a frame came, or a request was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.contracts.placement import WorkerRole
from pdserve.router.requests.policy import Costs, WorkerSnapshot, mixed_correction, queue_s

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ROLES = (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED)
"""Roles by the numbers in `WorkerColumns.role`."""


class WorkerColumns(NamedTuple):
    """Fields of `WorkerSnapshot`, and what follows from them alone, of N workers."""

    role: FloatArray
    """Index in `ROLES`."""
    max_batch_tokens: FloatArray
    max_batch_size: FloatArray
    num_waiting_tokens: FloatArray
    num_context_tokens: FloatArray
    num_decoding: FloatArray
    num_free_blocks: FloatArray
    prefill_correction: FloatArray
    mixed_correction: FloatArray
    num_steps: FloatArray
    stepped_s: FloatArray
    queue_s: FloatArray
    """Uncorrected seconds of the prompts that wait."""
    step_s: FloatArray
    """Seconds of a decode step; 0 on a worker that decodes nothing."""
    next_step_s: FloatArray
    """The same with one more answer of no context ..."""
    token_s: FloatArray
    """... and what each token of its context adds."""


class WorkerTable:
    """Rows of all workers ever seen; a restarted worker keeps its row."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._rows: dict[str, int] = {}
        self._snapshots: list[WorkerSnapshot | None] = []
        self._values = np.zeros((len(WorkerColumns._fields), 8))
        self.is_stale = np.ones(8, np.bool_)
        """By row: whether what others derive from it is older than the row."""

    @property
    def num_rows(self) -> int:
        """Rows that there is space for."""
        return len(self.is_stale)

    def row(self, worker_id: str) -> int:
        """Row of the worker."""
        row = self._rows.get(worker_id)
        if row is None:
            row = self._rows[worker_id] = len(self._rows)
            self._snapshots.append(None)
            if row == self.num_rows:
                self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
                self.is_stale = np.concatenate([self.is_stale, np.ones_like(self.is_stale)])
        return row

    def rows(self, workers: Sequence[WorkerSnapshot]) -> IntArray:
        """Row of each worker, brought up to date."""
        snapshots = self._snapshots
        rows = [self.row(worker.worker_id) for worker in workers]
        changed = [(row, worker) for row, worker in zip(rows, workers, strict=True) if snapshots[row] is not worker]
        if changed:
            index = [row for row, _ in changed]
            self._values[:, index] = np.array([self._row_values(worker) for _, worker in changed]).T
            self.is_stale[index] = True
            for row, worker in changed:
                snapshots[row] = worker
        return np.array(rows, np.int64)

    def columns(self, rows: IntArray | slice) -> WorkerColumns:
        return WorkerColumns(*self._values[:, rows])

    def _row_values(self, worker: WorkerSnapshot) -> tuple[float, ...]:
        cost, correction, num_decoding = self._costs[worker.role], worker.decode_correction, worker.num_decoding
        step_s = next_step_s = token_s = 0.0
        if worker.role is not WorkerRole.PREFILL:
            num_context = worker.num_context_tokens
            step_s = cost.decode_s(num_decoding, num_context) * correction if num_decoding else 0.0
            next_step_s = cost.decode_s(num_decoding + 1, num_context) * correction
            token_s = cost.decode_token_s * correction
        return (
            ROLES.index(worker.role),
            worker.max_batch_tokens,
            worker.max_batch_size,
            worker.num_waiting_tokens,
            worker.num_context_tokens,
            num_decoding,
            worker.num_free_blocks,
            worker.prefill_correction,
            mixed_correction(worker),
            worker.num_steps,
            worker.stepped_s,
            queue_s(worker.num_waiting_tokens, worker.max_batch_tokens, cost),
            step_s,
            next_step_s,
            token_s,
        )
