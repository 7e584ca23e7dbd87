"""Changes to the workers of a running cluster: more of them, fewer, of other roles, or each anew.

A change is a generator that the supervisor advances in every turn of its loop; it yields what there is to say, or
nothing while it waits. Workers that leave finish their requests first; those that are cut off by the time limit go on
elsewhere, as after any loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pdserve.contracts.deployment import MAX_REPLICAS
from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.cluster.fleet import Fleet
from pdserve.deploy.cluster.supervised_process import ProcessState
from pdserve.deploy.cluster.worker_process import WorkerProcess

PLACE_TIMEOUT_S = 60.0
"""Time that a change waits for a host with room."""


class _Steps(NamedTuple):
    """Of a change to other numbers of workers."""

    refused: list[str]
    """Workers that might have taken another role, and why they do not."""
    moves: list[tuple[WorkerProcess, WorkerRole]]
    added: list[WorkerRole]
    removed: list[WorkerProcess]
    is_short: bool = False
    """Workers leave before others start: hosts do not hold both."""


class Changes:
    def __init__(self, fleet: Fleet, drain_timeout_s: float, changed: Callable[[], None]) -> None:
        """``changed`` is called when a worker has left, for whatever reason, or has another role."""
        self._fleet = fleet
        self._drain_timeout_s = drain_timeout_s
        self._changed = changed

    def scale(self, replicas: Mapping[WorkerRole, int]) -> Iterator[str]:
        """Have as many workers of each role: the last of those too many take the roles of missing ones, or leave.

        Raises:
            DeployError: a role has no workers, or would have none or too many; or new workers have no room, and then
                nothing has changed, or one does not start.
        """
        steps = self._steps(replicas)
        for worker, role in steps.moves:
            worker.relabel(role)
        for worker in steps.removed:
            worker.is_leaving = True
        if steps.moves:
            self._changed()
        try:
            yield from self._carry_out(steps)
        finally:  # a worker that did not start ends the change
            for worker in steps.removed:
                worker.is_leaving = False

    def _carry_out(self, steps: _Steps) -> Iterator[str]:
        yield from steps.refused
        yield from (f"{worker.name} becomes a {role.value} worker" for worker, role in steps.moves)
        changes = self._add(steps.added), self._remove(steps.removed)
        for change in reversed(changes) if steps.is_short else changes:
            yield from change

    def preview(self, replicas: Mapping[WorkerRole, int]) -> Iterator[str]:
        """What `scale` would do and say, or raise."""
        steps = self._steps(replicas)
        yield from steps.refused
        yield from (f"{worker.name} becomes a {role.value} worker, at once" for worker, role in steps.moves)
        added = [f"a {role.value} worker starts" for role in steps.added]
        removed = [f"{worker.name} finishes its requests and leaves" for worker in steps.removed]
        if steps.is_short:
            yield "hosts have no room for both: workers leave before others start, and the cluster is short of them"
        yield from (*removed, *added) if steps.is_short else (*added, *removed)

    def _steps(self, replicas: Mapping[WorkerRole, int]) -> _Steps:
        """Steps from the workers that there are to as many of each role."""
        for role, count in replicas.items():
            if not self._pool(role):
                raise DeployError(f"this cluster has no {role.value} workers; start it with one to scale them")
            if count < 1:
                raise DeployError(f"{role.value}={count} leaves no {role.value} worker; pdserve down ends the cluster")
            if count > MAX_REPLICAS:
                raise DeployError(f"{role.value}={count} is too many; have at most {MAX_REPLICAS} workers of a role")
        surplus = [worker for role, count in replicas.items() for worker in self._pool(role)[count:]]
        missing = [role for role, count in replicas.items() for _ in range(count - len(self._pool(role)))]
        steps = _Steps([], [], [], [])
        for role in missing:
            if not surplus:
                steps.added.append(role)
                continue
            # One that can, if any, and of these one that had the role before.
            worker = min(
                surplus, key=lambda each: (bool(self._fleet.why_not_relabel(each, role)), not _is_named(each, role))
            )
            surplus.remove(worker)
            if why_not := self._fleet.why_not_relabel(worker, role):
                steps.refused.append(f"{worker.name} does not become a {role.value} worker, but leaves: {why_not}")
                steps.added.append(role)
                steps.removed.append(worker)
            else:
                steps.moves.append((worker, role))
        steps.removed.extend(surplus)
        try:
            self._fleet.find_room(steps.added)
        except DeployError:
            self._fleet.find_room(steps.added, steps.removed)
            return steps._replace(is_short=True)
        return steps

    def drain(self, names: Sequence[str]) -> Iterator[str]:
        """Let workers finish, and end them for good.

        Raises:
            DeployError: a name is no worker's, or its role would have none.
        """
        workers = [self._worker(name) for name in dict.fromkeys(names)]
        for pool in map(self._pool, {worker.role for worker in workers}):
            if set(pool) <= set(workers):
                raise DeployError(f"{' '.join(names)}: no {pool[0].role.value} worker would be left; add one first")
        yield from self._remove(workers)

    def restart(self, names: Sequence[str]) -> Iterator[str]:
        """Start workers anew, one after the other; all without ``names``.

        Raises:
            DeployError: a name is no worker's, the model has changed, or a worker does not start.
        """
        self._fleet.check_model()
        for worker in [self._worker(name) for name in names] or list(self._fleet.workers):
            if len(self._pool(worker.role)) == 1:
                yield f"{worker.name} is the only {worker.role.value} worker: requests wait for it"
            yield from self._finish([worker])
            worker.end()
            self._changed()
            yield f"{worker.name} starts"
            yield from self._start(worker)

    def _add(self, roles: Sequence[WorkerRole]) -> Iterator[str]:
        """Start workers, all at once."""
        added = [self._fleet.add_worker(role) for role in roles]
        yield from (f"{worker.name} starts" for worker in added)
        try:
            for worker in added:
                yield from self._start(worker)
        except DeployError:
            for worker in [each for each in added if each in self._fleet.workers]:
                if worker.state is not ProcessState.UP:
                    self._fleet.workers.remove(worker)
                if worker.state is ProcessState.STARTING:
                    worker.end()
            self._changed()
            raise

    def _remove(self, workers: Sequence[WorkerProcess]) -> Iterator[str]:
        yield from self._finish(workers)
        for worker in workers:
            self._fleet.workers.remove(worker)
            worker.end()
            self._changed()
            yield f"{worker.name} has left"

    def _start(self, worker: WorkerProcess) -> Iterator[str]:
        """Wait until the supervisor has started it."""
        num_failures, deadline_s = worker.num_failures, time.monotonic() + PLACE_TIMEOUT_S
        while worker.state is not ProcessState.UP:
            if worker not in self._fleet.workers:  # another change has ended it
                return
            if worker.num_failures > num_failures:
                raise DeployError(f"{worker.name} did not start: {worker.failure}")
            if worker.state is not ProcessState.STARTING and time.monotonic() > deadline_s:
                raise DeployError(f"no host has had room for {worker.name} for {PLACE_TIMEOUT_S:.0f} s; add a host")
            yield ""
        yield f"{worker.name} is up at {worker.address}"

    def _finish(self, workers: Sequence[WorkerProcess]) -> Iterator[str]:
        """Wait until each has no requests, or is lost; all together for the time limit."""
        drained = {worker: worker.drain(self._drain_timeout_s) for worker in workers if worker.state is ProcessState.UP}
        yield from (f"{worker.name} finishes its requests" for worker in drained)
        while any(worker.state is ProcessState.UP and not each.done() for worker, each in drained.items()):
            yield ""

    def _worker(self, name: str) -> WorkerProcess:
        for worker in self._fleet.workers:
            if worker.name == name:
                return worker
        raise DeployError(
            f"no worker is called {name}: there are {', '.join(each.name for each in self._fleet.workers)}"
        )

    def _pool(self, role: WorkerRole) -> list[WorkerProcess]:
        """Workers of a role: those that have their name of it, the oldest first, then those that had another before."""
        pool = [worker for worker in self._fleet.workers if worker.role is role and not worker.is_leaving]
        return sorted(pool, key=lambda worker: not _is_named(worker, role))


def _is_named(worker: WorkerProcess, role: WorkerRole) -> bool:
    """Whether ``role`` is the first that the worker had."""
    return worker.name.startswith(role.value)
