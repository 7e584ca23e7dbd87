"""The supervisor's side of an autoscaler: what routers say becomes a change. Nothing is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.contracts.deployment import DeploymentConfig, PhaseConfig
from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.cluster.autoscaling import Autoscaling
from pdserve.deploy.launch import Launch
from pdserve.planner.autoscale import WINDOW_S
from pdserve.router.requests.demand import Demand

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
BOUNDED = DeploymentConfig(prefill=PhaseConfig(max_replicas=4), decode=PhaseConfig(max_replicas=4))


class Router:
    """Is asked for so many decode workers."""

    def __init__(self) -> None:
        self.num_answers, self.need, self.is_silent = 0, 2, False
        self.counted: list[str] = []

    def demand(self) -> Demand | None:
        self.num_answers += round(self.need * WINDOW_S)
        return None if self.is_silent else Demand(num_answers=self.num_answers, answer_s=0.99)

    def count_change(self, reason: str) -> None:
        self.counted.append(reason)


class Cluster:
    def __init__(self, launch: Launch, *, has_room: bool = True) -> None:
        self.fleet: Any = cast(
            Any,
            SimpleNamespace(
                present={PREFILL: 1, DECODE: 1},
                hosts=[1],
                workers=[1, 2],
                is_on_gpus=False,
                request_hosts=lambda replicas: self.requested.append(sum(replicas.values())),
            ),
        )
        self.requested: list[int] = []
        """Numbers of workers for which hosts were requested."""
        self.has_room, self.starts = has_room, True
        self.router = Router()
        self.autoscaling = Autoscaling(launch, cast(Any, self.fleet), cast(Any, self))
        self.now_s = 0.0

    def scale(self, replicas: Mapping[WorkerRole, int]) -> Iterator[str]:
        if sum(replicas.values()) > len(self.fleet.workers) and not self.has_room:
            raise DeployError("no host has room")
        if not self.starts:
            yield "decode-1 starts"
            raise DeployError("decode-1 did not start")
        self.fleet.present = dict(replicas)
        self.fleet.workers = [None] * sum(replicas.values())
        yield "done"

    def turns(self, number: int, *, is_busy: bool = False) -> list[str]:
        said: list[str] = []
        for _ in range(number):
            self.now_s += WINDOW_S
            change = self.autoscaling.turn(self.now_s, [cast(Any, self.router)], is_busy=is_busy)
            said += change or ()
        return said


def test_the_load_is_followed_and_changes_are_counted() -> None:
    cluster = Cluster(Launch(config=BOUNDED, emulate="h100-sxm"))
    assert cluster.turns(3) == ["the load asks for prefill=1 decode=2 (decode_short)", "done"]
    assert cluster.router.counted == ["decode_short"]
    cluster.router.need = 1
    assert cluster.turns(31) == ["the load asks for prefill=1 decode=1 (surplus)", "done"]


def test_a_deployment_without_bounds_asks_routers_nothing() -> None:
    cluster = Cluster(Launch(config=DeploymentConfig(), emulate="h100-sxm"))
    assert cluster.turns(20) == []
    assert cluster.router.num_answers == 0


def test_another_change_is_waited_for() -> None:
    cluster = Cluster(Launch(config=BOUNDED, emulate="h100-sxm"))
    assert cluster.turns(5, is_busy=True) == []
    assert cluster.turns(1)[-1] == "done", "what was seen meanwhile counts"


def test_a_router_that_does_not_answer_holds_what_is_there() -> None:
    cluster = Cluster(Launch(config=BOUNDED, emulate="h100-sxm"))
    cluster.router.is_silent = True
    assert cluster.turns(20) == []


def test_where_hosts_have_no_room_roles_move_and_nothing_is_tried_again_before_a_host_joins() -> None:
    cluster = Cluster(Launch(config=BOUNDED, emulate="h100-sxm"), has_room=False)
    cluster.fleet.present = {PREFILL: 1, DECODE: 1}
    with pytest.raises(DeployError, match="no host has room"):
        cluster.turns(3)
    assert cluster.router.counted == ["failed"]
    assert cluster.turns(20) == []
    assert cluster.requested == [2, 3], "the request stands"
    cluster.has_room, cluster.fleet.hosts = True, [1, 2]
    assert cluster.turns(1)[-1] == "done"
    assert cluster.requested == [2, 3]


def test_a_host_that_the_load_does_not_need_any_more_is_given_up() -> None:
    cluster = Cluster(Launch(config=BOUNDED, emulate="h100-sxm"), has_room=False)
    with pytest.raises(DeployError, match="no host has room"):
        cluster.turns(3)
    cluster.router.need = 1
    cluster.turns(10)
    assert cluster.requested == [2, 3, 2]


def test_workers_on_cores_are_not_more_than_the_deployment_has() -> None:
    config = replace(BOUNDED, prefill=replace(BOUNDED.prefill, replicas=2))
    cluster = Cluster(Launch(config=config))
    cluster.fleet.present, cluster.router.need = {PREFILL: 2, DECODE: 1}, 4
    assert cluster.turns(3) == ["the load asks for prefill=1 decode=2 (decode_short)", "done"]


def test_a_worker_that_did_not_start_is_tried_again_after_two_minutes() -> None:
    cluster = Cluster(Launch(config=BOUNDED, emulate="h100-sxm"))
    cluster.starts = False
    with pytest.raises(DeployError, match="did not start"):
        cluster.turns(3)
    cluster.starts = True
    assert cluster.turns(23) == []
    assert cluster.turns(1)[-1] == "done"
