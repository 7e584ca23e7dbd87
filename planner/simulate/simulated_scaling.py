"""Carries out an autoscaler's decisions on a simulated cluster, as `pdserve.deploy.cluster.changes` does on a live one.

Workers that are too many take roles that have too few, at once; others start, and serve after a time;
others take nothing more, and leave once they are idle.
"""

from __future__ import annotations

from itertools import count

from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.autoscale import ROLES, Autoscaler
from pdserve.planner.layout import Pool
from pdserve.planner.simulate.event_queue import EventQueue
from pdserve.planner.simulate.simulated_cluster import ClusterBuilder, VirtualWorker
from pdserve.planner.simulate.simulation import Scaled
from pdserve.router.requests.dispatch import Dispatcher


class Scaling:
    """Of one simulation. Workers are not pipelines."""

    def __init__(
        self,
        autoscaler: Autoscaler,
        start_s: float,
        builder: ClusterBuilder,
        workers: dict[str, VirtualWorker],
        dispatcher: Dispatcher,
        queue: EventQueue,
    ) -> None:
        """``workers``: all that there have been, by id; new ones are added."""
        self._autoscaler = autoscaler
        self._start_s = start_s
        self._builder = builder
        self._workers = workers
        self._dispatcher = dispatcher
        self._queue = queue
        self._pools: dict[WorkerRole, Pool] = {pool.role: pool for pool in builder.layout.pools}
        assert all(pool.pipeline_parallel == 1 for pool in self._pools.values())
        self._numbers = count(len(workers))
        self._began_s = dict.fromkeys(workers, 0.0)
        self._ended_s: dict[str, float] = {}
        self._present = list(workers.values())
        """Those that serve or start."""
        self._leaving: list[VirtualWorker] = []
        self.history: list[Scaled] = []

    def worker_s(self, ended_s: float) -> float:
        """Seconds of all workers."""
        return sum(self._ended_s.get(name, ended_s) - began_s for name, began_s in self._began_s.items())

    def turn(self) -> None:
        """Look at the demand, and change the workers as is decided."""
        self._let_go()
        self._autoscaler.observe(self._queue.now_s, self._dispatcher.demand())
        replicas = {role: sum(worker.role is role for worker in self._present) for role in ROLES}
        decision = self._autoscaler.decide(replicas)
        if decision is None:
            return
        self.history.append(Scaled(self._queue.now_s, decision.reason, decision.replicas))
        surplus = [
            worker
            for role, wanted in decision.replicas.items()
            for worker in [each for each in self._present if each.role is role][wanted:]
        ]
        for role, wanted in decision.replicas.items():
            for _ in range(wanted - replicas[role]):
                if surplus:
                    self._relabel(surplus.pop(), role)
                else:
                    self._add(role)
        for worker in surplus:
            worker.is_draining = True
            self._present.remove(worker)
        self._leaving += surplus

    def _relabel(self, worker: VirtualWorker, role: WorkerRole) -> None:
        worker.take_role(role)
        self._dispatcher.worker_up(worker)

    def _add(self, role: WorkerRole) -> None:
        (worker,) = self._builder.micro_batches(self._pools[role], next(self._numbers), "0")
        self._workers[worker.worker_id] = worker
        self._began_s[worker.worker_id] = self._queue.now_s
        self._present.append(worker)
        self._queue.at(self._queue.now_s + self._start_s, lambda: self._dispatcher.worker_up(worker))

    def _let_go(self) -> None:
        """End those that leave and are idle."""
        busy = {worker for attempt in self._dispatcher.attempts.all.values() for worker in attempt.state.workers}
        for worker in [each for each in self._leaving if each not in busy]:
            self._leaving.remove(worker)
            self._dispatcher.worker_lost(worker)
            self._ended_s[worker.worker_id] = self._queue.now_s
