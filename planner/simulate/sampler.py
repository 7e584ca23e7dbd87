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
            num_referenced = sum(load.num_blocks_referenced for load in of_role)
            num_others = sum(load.num_blocks_free + load.num_blocks_cached for load in of_role)
            self._rows.setdefault(role, []).append(
                (
                    now_s,
                    sum(load.num_waiting for load in of_role),
                    sum(load.num_running for load in of_role),
                    num_referenced / (num_referenced + num_others),
                )
            )

    def timelines(self) -> list[Timeline]:
        return [
            Timeline(
                role=role,
                sampled_s=np.array([row[0] for row in rows], np.float64),
                num_waiting=np.array([row[1] for row in rows], np.int64),
                num_running=np.array([row[2] for row in rows], np.int64),
                kv_share=np.array([row[3] for row in rows], np.float64),
            )
            for role, rows in self._rows.items()
        ]
