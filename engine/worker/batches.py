"""Static and dynamic batches, to compare continuous batching with: a gate before the admission of a `Scheduler`.

A *static* batch is admitted when it is full, a *dynamic* one also when its first request has waited for some time, as
in Triton Inference Server; both only after the last answer of the batch before. With ``continuous`` a worker has the
scheduler itself, which knows nothing of batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from pdserve.engine.scheduling.table import AdmissionBudget, PlannedStep
from pdserve.engine.worker.scheduler import Scheduler


class BatchScheduler(Scheduler):
    """Admits whole batches of prompts, of ``max_batch_size`` at most, each after the last answer of the one before."""

    def __init__(self, *arguments: Any, max_wait_s: float, **options: Any) -> None:
        """
        Args:
            max_wait_s: of the first request, for a batch to fill; infinite: until it is full.
        """
        super().__init__(*arguments, **options)
        self._max_wait_s = max_wait_s
        self._num_to_admit = 0
        """Of the batch that is being admitted."""

    def plan_new_work(self, step: PlannedStep, now_s: float) -> None:
        waiting, size = self.prompts.waiting, self._max_batch_size
        if not self.running and not self.prompts.admitted and not self.table.steps_in_flight:
            first = waiting.first()
            is_due = first is not None and now_s >= first.arrived_s + self._max_wait_s
            self._num_to_admit = min(len(waiting), size) if is_due or len(waiting) >= size else 0
        num_waiting = len(waiting)
        super().plan_new_work(step, now_s)
        self._num_to_admit -= num_waiting - len(waiting)

    def _budget(self) -> AdmissionBudget:
        budget = super()._budget()
        return AdmissionBudget(min(budget.num_slots, self._num_to_admit), budget.num_blocks)

    def next_deadline_s(self) -> float:
        deadline_s, first = super().next_deadline_s(), self.prompts.waiting.first()
        return deadline_s if self.running or first is None else min(deadline_s, first.arrived_s + self._max_wait_s)


def scheduler_with(batching: str | float) -> Callable[..., Scheduler]:
    """The scheduler of ``batching``: ``continuous``, ``static``, or the seconds that a dynamic batch waits."""
    if batching == "continuous":
        return Scheduler
    return partial(BatchScheduler, max_wait_s=inf if batching == "static" else float(batching))
