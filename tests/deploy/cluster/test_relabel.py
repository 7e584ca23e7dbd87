"""Scaling gives workers other roles before it starts or ends any. The fleet is real, its workers are not started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, PhaseConfig
from pdserve.contracts.errors import DeployError
from pdserve.contracts.worker_config import WorkerEndpoint, WorkerRole
from pdserve.deploy.cluster.changes import Changes
from pdserve.deploy.cluster.fleet import Fleet
from pdserve.deploy.cluster.supervised_process import ProcessState
from pdserve.deploy.launch import Launch, worker_configs
from pdserve.model.weights.demo_model import DEMO_MODEL

PREFILL, DECODE, MIXED = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED


def a_deployment(num_prefill: int, num_decode: int, **prefill: Any) -> DeploymentConfig:
    model = ModelConfig(path=str(DEMO_MODEL), dtype="float32")
    pools = {"prefill": PhaseConfig(replicas=num_prefill, **prefill), "decode": PhaseConfig(replicas=num_decode)}
    return DeploymentConfig(model=model, **pools)  # type: ignore[arg-type]


def a_fleet(config: DeploymentConfig, folder: Path) -> Fleet:
    """Workers that count as up."""
    pools = (config.prefill, config.decode)
    resources = {name: float(sum(each.replicas for each in pools)) for phase in pools for name in phase.resources}
    ray = SimpleNamespace(resources=resources, worker_resources={}, desk=None)
    fleet = Fleet(cast(Any, ray), Launch(config=config, emulate="h100-sxm"), "", folder)
    fleet.find_hosts()
    assert fleet.place_workers(1.0) == ""
    for worker in fleet.workers:
        worker.state = ProcessState.UP
        worker.endpoints = [WorkerEndpoint(worker_id=worker.name, role=worker.role, address="a:1", epoch=1)]
    return fleet


def roles(fleet: Fleet) -> dict[str, WorkerRole]:
    for worker in fleet.workers:
        assert all(endpoint.role is worker.role for endpoint in worker.endpoints)
        assert worker._config.role is worker.role
    return {worker.name: worker.role for worker in fleet.workers}


def scale(fleet: Fleet, **replicas: int) -> tuple[list[str], int]:
    """What is said, until a worker has to be started or ended; and how often routers are told."""
    changed: list[None] = []
    said = []
    changes = Changes(fleet, 1.0, lambda: changed.append(None))
    for line in changes.scale({WorkerRole(role): number for role, number in replicas.items()}):
        said.append(line)
        if "becomes" not in line and "does not become" not in line:
            break
    return said, len(changed)


def test_roles_change_before_a_worker_starts_or_ends(tmp_path: Path) -> None:
    fleet = a_fleet(a_deployment(3, 1), tmp_path)
    assert scale(fleet, prefill=1, decode=3) == (
        ["prefill-1 becomes a decode worker", "prefill-2 becomes a decode worker"],
        1,
    )
    expected = {"prefill-0": PREFILL, "prefill-1": DECODE, "prefill-2": DECODE, "decode-0": DECODE}
    assert roles(fleet) == expected
    assert fleet.replicas == {PREFILL: 1, DECODE: 3, MIXED: 0}
    assert scale(fleet, decode=3, prefill=1) == ([], 0)


def test_those_go_back_first_that_had_the_role_before(tmp_path: Path) -> None:
    fleet = a_fleet(a_deployment(2, 2), tmp_path)
    scale(fleet, prefill=1, decode=3)
    assert scale(fleet, prefill=2, decode=2)[0] == ["prefill-1 becomes a prefill worker"]


def test_the_one_that_had_the_role_before_goes_back_and_another_leaves(tmp_path: Path) -> None:
    fleet = a_fleet(a_deployment(2, 2), tmp_path)
    scale(fleet, prefill=3, decode=1)
    for worker in fleet.workers:
        worker.drain = lambda timeout_s: SimpleNamespace(done=lambda: True)  # type: ignore[assignment, method-assign, return-value]
    said, _ = scale(fleet, prefill=1, decode=2)
    assert said == ["decode-1 becomes a decode worker", "prefill-1 finishes its requests"]


def test_one_that_cannot_take_a_role_leaves_it_to_one_that_can(tmp_path: Path) -> None:
    fleet = a_fleet(a_deployment(2, 2), tmp_path)
    scale(fleet, prefill=3, decode=1)
    for worker in fleet.workers:
        worker.drain = lambda timeout_s: SimpleNamespace(done=lambda: True)  # type: ignore[assignment, method-assign, return-value]
        worker._config = replace(worker._config, may_decode=worker.name.startswith("decode"))
    said, _ = scale(fleet, prefill=1, decode=2)
    assert said == ["decode-1 becomes a decode worker", "prefill-1 finishes its requests"]


def test_new_workers_get_names_that_no_other_has(tmp_path: Path) -> None:
    fleet = a_fleet(a_deployment(2, 1), tmp_path)
    scale(fleet, prefill=1, decode=2)
    said, _ = scale(fleet, prefill=2)
    assert said == ["prefill-2 starts"]
    assert roles(fleet)["prefill-2"] is PREFILL
    fleet.workers = [worker for worker in fleet.workers if worker.name != "decode-0"]
    said, _ = scale(fleet, decode=2)
    assert said == ["decode-0 starts"], "though the decode worker that is left had another role before"


def test_what_is_left_over_leaves(tmp_path: Path) -> None:
    fleet = a_fleet(a_deployment(3, 1), tmp_path)
    for worker in fleet.workers:
        worker.drain = lambda timeout_s: SimpleNamespace(done=lambda: True)  # type: ignore[assignment, method-assign, return-value]
    said, _ = scale(fleet, prefill=1, decode=2)
    assert said == ["prefill-1 becomes a decode worker", "prefill-2 finishes its requests"]


def test_a_worker_keeps_its_role_over_restarts(tmp_path: Path) -> None:
    fleet = a_fleet(a_deployment(2, 1), tmp_path)
    scale(fleet, prefill=1, decode=2)
    worker = fleet.workers[1]
    worker.clear()
    assert worker.role is worker._config.role is DECODE
    worker.move(worker.host, fleet._homes[worker.name])
    assert worker._config.role is DECODE


@pytest.mark.parametrize(
    ("prefill", "key"),
    [
        ({"tensor_parallel": 2}, "prefill.tensor_parallel is 2 and decode.tensor_parallel is 1"),
        ({"pipeline_parallel": 5}, "prefill.pipeline_parallel is 5 and decode.pipeline_parallel is 1"),
    ],
)
def test_workers_of_different_pools_keep_their_roles_and_the_key_is_named(
    prefill: dict[str, Any], key: str, tmp_path: Path
) -> None:
    fleet = a_fleet(a_deployment(2, 1, **prefill), tmp_path)
    said, _ = scale(fleet, prefill=1, decode=2)
    assert said[0] == f"prefill-1 does not become a decode worker, but leaves: {key}"
    assert roles(fleet)["prefill-1"] is PREFILL


def test_a_cluster_that_starts_anew_has_the_roles_for_which_hosts_have_resources(tmp_path: Path) -> None:
    config = a_deployment(2, 1, resources={"a": 1.0})
    fleet = a_fleet(replace(config, decode=replace(config.decode, resources={"b": 1.0})), tmp_path)
    assert scale(fleet, prefill=1, decode=2)[0] == ["prefill-1 becomes a decode worker"]
    assert fleet.replicas == {PREFILL: 2, DECODE: 1, MIXED: 0}


def test_pools_may_differ_in_what_a_worker_keeps() -> None:
    limits: dict[str, Any] = {"max_batch_tokens": 8192, "max_batch_size": 16, "kv_memory": "1GiB", "swap_memory": 0}
    config = a_deployment(1, 1, lend_cores=False, resources={"a": 1.0}, **limits)
    assert config.difference(PREFILL, DECODE) == config.difference(DECODE, PREFILL) == ""


@pytest.mark.parametrize(
    ("device", "switchable", "is_kept"), [("cuda", False, False), ("cuda", True, True), ("cpu", False, True)]
)
def test_prefill_workers_on_gpus_keep_memory_to_decode_if_they_shall(
    device: str, switchable: bool, is_kept: bool, tmp_path: Path
) -> None:
    config = a_deployment(1, 1, device=device)
    config = replace(config, switchable=switchable, decode=replace(config.decode, device=device))
    launch = Launch(config=config, num_gpus=2)
    prefill, decode = worker_configs(launch)
    assert (prefill.may_decode, decode.may_decode) == (is_kept, True)
    fleet = a_fleet(config, tmp_path)
    worker = fleet.workers[0]
    worker._config = prefill
    assert fleet.why_not_relabel(worker, PREFILL) == ""
    why_not = fleet.why_not_relabel(worker, DECODE)
    assert not why_not if is_kept else why_not.startswith("switchable is false")


def test_what_would_be_done_is_said_and_not_done(tmp_path: Path) -> None:
    fleet = a_fleet(a_deployment(3, 1), tmp_path)
    changes = Changes(fleet, 1.0, lambda: None)
    assert list(changes.preview({PREFILL: 1, DECODE: 4})) == [
        "prefill-1 becomes a decode worker, at once",
        "prefill-2 becomes a decode worker, at once",
        "a decode worker starts",
    ]
    assert list(changes.preview({PREFILL: 2})) == ["prefill-2 finishes its requests and leaves"]
    assert [*roles(fleet).values()] == [PREFILL, PREFILL, PREFILL, DECODE]


def test_what_hosts_do_not_hold_is_refused_before_anything_changes(tmp_path: Path) -> None:
    config = a_deployment(2, 1, resources={"slot": 1.0})
    fleet = a_fleet(replace(config, decode=replace(config.decode, resources={"slot": 1.0})), tmp_path)
    with pytest.raises(DeployError, match="no host has room: none has 1 slot left for decode-1; remove"):
        scale(fleet, prefill=1, decode=3)
    assert [*roles(fleet).values()] == [PREFILL, PREFILL, DECODE]


def test_workers_leave_first_where_hosts_do_not_hold_those_that_replace_them(tmp_path: Path) -> None:
    config = a_deployment(2, 1, resources={"slot": 1.0}, tensor_parallel=2)
    fleet = a_fleet(replace(config, decode=replace(config.decode, resources={"slot": 1.0})), tmp_path)
    said = list(Changes(fleet, 1.0, lambda: None).preview({PREFILL: 1, DECODE: 2}))
    assert said[-2:] == ["prefill-1 finishes its requests and leaves", "a decode worker starts"]
    assert "and the cluster is short of them" in said[-3]
    for worker in fleet.workers:
        worker.drain = lambda timeout_s: SimpleNamespace(done=lambda: True)  # type: ignore[assignment, method-assign, return-value]
        worker.end = lambda: None  # type: ignore[method-assign]
    change = Changes(fleet, 1.0, lambda: None).scale({PREFILL: 1, DECODE: 2})
    assert [next(change) for _ in range(4)][1:] == [
        "prefill-1 finishes its requests",
        "prefill-1 has left",
        "decode-1 starts",
    ]


def test_a_worker_that_joins_others_divides_the_memory_of_their_host(tmp_path: Path) -> None:
    fleet = a_fleet(a_deployment(1, 2), tmp_path)
    assert [worker._config.num_host_workers for worker in fleet.workers] == [3, 3, 3]
    assert fleet.add_worker(DECODE)._config.num_host_workers == 4
