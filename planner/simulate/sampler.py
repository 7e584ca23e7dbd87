"""Samples simulated workers at fixed intervals, for the curves of a report."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.placement import WorkerRole
from pdserve.planner.simulate.simulation import Timeline


class Sampler:
    """Collects one row per role and sample."""

    def __init__(self) -> None:
        self._rows: dict[WorkerRole, list[tuple[float, int, int, float]]] = {}

    def sample(self, now_s: float, loads: Iterable[tuple[WorkerRole, SchedulerLoad]]) -> None:
        """Record the loads of all workers at one instant."""
        by_role: dict[WorkerRole, list[SchedulerLoad]] = {}
        for role, load in loads:
            by_role.setdefault(role, []).append(load)
        for role, of_role in by_role.items():
            num_waiting, num_running, num_referenced, num_free, num_cached = (
                sum(getattr(load, f"num_{name}") for load in of_role)
                for name in ("waiting", "running", "blocks_referenced", "blocks_free", "blocks_cached")
            )
            share = num_referenced / (num_referenced + num_free + num_cached)
            self._rows.setdefault(role, []).append((now_s, num_waiting, num_running, share))

    def timelines(self) -> list[Timeline]:
        return [
            Timeline(role, np.array(at_s), np.array(num_waiting), np.array(num_running), np.array(kv_share))
            for role, rows in self._rows.items()
            for at_s, num_waiting, num_running, kv_share in [zip(*rows, strict=True)]
        ]
