"""Has the numbers of workers of a live cluster follow its load, by the changes that `pdserve scale` makes.

`pdserve.planner.autoscale` decides. The supervisor calls `Autoscaling.turn` in its loop, which asks the routers
for the demand every `WINDOW_S`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from math import inf

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.changes import Changes
from pdserve.deploy.cluster.fleet import Fleet
from pdserve.deploy.cluster.router_process import RouterProcess
from pdserve.deploy.launch import Launch
from pdserve.planner.autoscale import NUM_WINDOWS_DOWN, ROLES, WINDOW_S, Autoscaler, Bounds, Decision, Replicas
from pdserve.router.requests.demand import Demand

RETRY_S = NUM_WINDOWS_DOWN * WINDOW_S
"""After a worker that did not start; hosts without room are asked again when there are others, or fewer workers."""


class Autoscaling:
    def __init__(self, launch: Launch, fleet: Fleet, changes: Changes) -> None:
        bounds = {
            role: Bounds(max(1, phase.min_replicas), phase.max_replicas)
            for role in ROLES
            if (phase := launch.config.phase(role)).max_replicas
        }
        self.is_on = bool(bounds)
        self._autoscaler = Autoscaler(bounds)
        self._fleet = fleet
        self._changes = changes
        self._due_s = 0.0
        self._launch = launch
        self._refused: tuple[int, int] | None = None
        """Number of hosts, and of workers, when no more could start."""
        self._refused_until_s = 0.0
        self._requested: Replicas = {}
        """Workers for which hosts were requested."""

    def turn(self, now_s: float, routers: Sequence[RouterProcess], *, is_busy: bool) -> Iterator[str] | None:
        """The change to make, if any, beside those that go on. While a command ``is_busy``, only looks."""
        if not self.is_on or now_s < self._due_s:
            return None
        self._due_s = now_s + WINDOW_S
        if now_s >= self._refused_until_s:
            self._refused = None
        demands = [router.demand() for router in routers]
        known = [demand for demand in demands if demand is not None]
        self._autoscaler.observe(now_s, reduce(Demand.beside, known) if known and len(known) == len(demands) else None)
        if is_busy:
            return None
        replicas = self._fleet.present
        decision = self._autoscaler.decide(replicas, self._most(sum(replicas.values())))
        if self._autoscaler.wanted != self._requested:
            self._requested = self._autoscaler.wanted
            self._fleet.request_hosts(self._requested)
        return self._carry_out(decision, routers, now_s) if decision is not None else None

    def _most(self, num_workers: int) -> int | None:
        """Workers that the hosts hold, as far as is known."""
        if self._refused is not None and (self._refused[0] != len(self._fleet.hosts) or num_workers < self._refused[1]):
            self._refused = None
        if self._refused is not None:
            return self._refused[1]
        # More workers on the same cores compute no more.
        return None if self._launch.emulate or self._fleet.is_on_gpus else len(self._launch.roles)

    def _carry_out(self, decision: Decision, routers: Sequence[RouterProcess], now_s: float) -> Iterator[str]:
        numbers = " ".join(f"{role.value}={count}" for role, count in decision.replicas.items())
        yield f"the load asks for {numbers} ({decision.reason})"
        has_room = False
        try:
            for said in self._changes.scale(decision.replicas):
                has_room = True  # without, it would have raised first
                yield said
        except DeployError:
            self._refused_until_s = now_s + RETRY_S if has_room else inf
            self._refused = len(self._fleet.hosts), len(self._fleet.workers)
            routers[0].count_change("failed")
            raise
        routers[0].count_change(decision.reason)
