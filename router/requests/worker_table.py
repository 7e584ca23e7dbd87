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
from pdserve.model.cost.cost_model import OnlineCorrection
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
    num_tokens_in_flight: FloatArray
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
    answer_s: FloatArray
    """... what another one adds ..."""
    token_s: FloatArray
    """... and each token of context."""


class _Seen(NamedTuple):
    """A worker when it was last seen to have taken a step."""

    num_steps: int
    stepped_s: float = 0.0
    step_s: float = 0.0
    """Predicted seconds of the next step; 0 before the first one that counts: the worker was idle before."""
    prefill_s: float = 0.0
    """Predicted seconds of prompts that were sent since then, to be computed beside the answers."""


class WorkerTable:
    """Rows of all workers ever seen; a restarted worker keeps its row.

    Predicted steps are held against those that end between two snapshots of a worker that decodes all the while, and
    corrected: what the worker reports as its correction may be wrong, or miss what delays its tokens.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._rows: dict[str, int] = {}
        self._snapshots: list[WorkerSnapshot | None] = []
        self._values = np.zeros((len(WorkerColumns._fields), 8))
        self.is_stale = np.ones(8, np.bool_)
        """By row: whether what others derive from it is older than the row."""
        self._steps: list[OnlineCorrection] = []
        """Observed over predicted time of steps, by row."""
        self._seen: list[_Seen | None] = []
        """By row; None if no answer is known to decode there."""

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
            self._steps.append(OnlineCorrection())
            self._seen.append(None)
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
            for row, worker in changed:
                self._observe(row, worker)
            index = [row for row, _ in changed]
            self._values[:, index] = np.array([self._row_values(row, worker) for row, worker in changed]).T
            self.is_stale[index] = True
            for row, worker in changed:
                snapshots[row] = worker
        return np.array(rows, np.int64)

    def columns(self, rows: IntArray | slice) -> WorkerColumns:
        return WorkerColumns(*self._values[:, rows])

    def answer_began(self, row: int, num_steps: int) -> None:
        """An answer decodes on the worker, which has taken so many steps."""
        self.is_stale[row] = True
        if self._seen[row] is None:
            self._seen[row] = _Seen(num_steps)

    def prefills(self, row: int, seconds: float) -> None:
        """A prompt of so many predicted seconds is computed beside the answers on the worker."""
        seen = self._seen[row]
        if seen is not None:
            self._seen[row] = seen._replace(prefill_s=seen.prefill_s + seconds)

    def answer_left(self, row: int, *, was_last: bool) -> None:
        self.is_stale[row] = True
        if was_last:
            self._seen[row] = None

    def _observe(self, row: int, worker: WorkerSnapshot) -> None:
        """Hold predicted steps against those that ended since the last snapshot."""
        last = self._seen[row]
        if last is None or worker.num_steps == last.num_steps:
            return
        num_decoding, num_context = max(1, worker.num_decoding), worker.num_context_tokens
        step_s = self._costs[worker.role].decode_s(num_decoding, num_context) * worker.decode_correction
        self._seen[row] = _Seen(worker.num_steps, worker.stepped_s, step_s)
        if last.step_s and worker.num_steps > last.num_steps:
            predicted_s = (worker.num_steps - last.num_steps) * (last.step_s + step_s) / 2 + last.prefill_s
            self._steps[row].observe(predicted_s, worker.stepped_s - last.stepped_s)

    def _row_values(self, row: int, worker: WorkerSnapshot) -> tuple[float, ...]:
        cost, num_decoding = self._costs[worker.role], worker.num_decoding
        correction = worker.decode_correction * self._steps[row].factor
        step_s = next_step_s = answer_s = token_s = 0.0
        if worker.role is not WorkerRole.PREFILL:
            num_context = worker.num_context_tokens
            step_s = cost.decode_s(num_decoding, num_context) * correction if num_decoding else 0.0
            next_step_s = cost.decode_s(num_decoding + 1, num_context) * correction
            answer_s = cost.decode_s(num_decoding + 2, num_context) * correction - next_step_s
            token_s = cost.decode_token_s * correction
        return (
            ROLES.index(worker.role),
            worker.max_batch_tokens,
            worker.max_batch_size,
            worker.num_waiting_tokens,
            worker.num_tokens_in_flight,
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
            answer_s,
            token_s,
        )
