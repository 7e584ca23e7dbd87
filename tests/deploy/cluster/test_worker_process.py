"""A worker restarts with a fresh epoch after any failure. Real Ray, small real actors."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pdserve.contracts.worker_config import WorkerConfig, WorkerEndpoint, WorkerRole
from pdserve.deploy.cluster.host_facts import LOOPBACK, host_facts
from pdserve.deploy.cluster.hosts import Host
from pdserve.deploy.cluster.ray_cluster import PrivateRay
from pdserve.deploy.cluster.supervised_process import ProcessState
from pdserve.deploy.cluster.worker_process import WorkerProcess
from tests.patience import HANG_S
from tests.private_ray import joined_ray


class EchoWorker:
    """Starts at once and answers pings."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        if config["model_path"] == "no package":
            importlib.import_module("absent_package")
        self.epoch = int.from_bytes(os.urandom(4))

    def process_id(self) -> int:
        return os.getpid()

    def start(self) -> list[dict[str, Any]]:
        if self.config["model_path"] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)  # another thread may take the signal first
        if self.config["model_path"] == "absent":
            raise ValueError("no model at 'absent': name a folder")
        if self.config["model_path"] == "broken":
            logging.getLogger("engine").critical("the step loop died", exc_info=RuntimeError("weights are NaN"))
            os._exit(1)
        endpoint = {
            "worker_id": self.config["worker_id"],
            "role": self.config["role"],
            "address": "127.0.0.1:9",
            "epoch": self.epoch,
        }
        return [endpoint]

    def ping(self) -> int:
        if Path(self.config["model_path"]).exists():
            raise RuntimeError("engine thread died")
        return self.epoch

    def drain(self, timeout_s: float) -> bool:
        return timeout_s > 0

    def stop(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[PrivateRay]:
    with joined_ray() as cluster:
        global joined
        joined = cluster
        yield cluster


joined: PrivateRay
THIS_HOST = Host(host_facts(LOOPBACK, ""), "", {})


def make_worker(model_path: str = "/nowhere", start_timeout_s: float = 60.0) -> WorkerProcess:
    config = WorkerConfig(worker_id="prefill-0", role=WorkerRole.PREFILL, model_path=model_path)
    resources = joined.worker_resources
    return WorkerProcess(joined.desk, config, EchoWorker, resources, THIS_HOST, start_timeout_s=start_timeout_s)


def state_of(worker: WorkerProcess) -> ProcessState:
    """State, read by a call so that the type checker expects it to change."""
    return worker.state


def endpoint_of(worker: WorkerProcess) -> WorkerEndpoint:
    (endpoint,) = worker.endpoints
    return endpoint


def run_until(worker: WorkerProcess, condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{worker.state} {worker.failure}"
        worker.check(time.monotonic())
        time.sleep(0.02)


def test_a_killed_worker_is_replaced_with_a_fresh_epoch() -> None:
    worker = make_worker()
    run_until(worker, lambda: worker.state is ProcessState.UP)
    first = endpoint_of(worker)
    assert psutil.Process(worker.process_id).name().startswith("ray::prefill-0"), "as an operator sees it"
    os.kill(worker.process_id, signal.SIGKILL)
    run_until(worker, lambda: worker.num_failures == 1)
    assert not worker.endpoints
    run_until(worker, lambda: worker.state is ProcessState.UP)
    second = endpoint_of(worker)
    assert second.worker_id == first.worker_id
    assert second.epoch != first.epoch
    worker.clear()


def test_a_worker_that_gets_another_role_while_it_starts_has_that_at_once() -> None:
    worker = make_worker()
    run_until(worker, lambda: worker.process_id > 0)
    assert state_of(worker) is ProcessState.STARTING
    worker.relabel(WorkerRole.DECODE)
    run_until(worker, lambda: worker.state is ProcessState.UP)
    assert endpoint_of(worker).role is WorkerRole.DECODE
    worker.clear()


def test_a_worker_asks_for_its_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    remote, asked = ray.remote, []

    def without_gpus(worker_class: type) -> SimpleNamespace:
        """Stand-in for ``ray.remote`` of a class, in a cluster without GPUs."""

        def options(**values: Any) -> Any:
            asked.append(values["num_gpus"])
            return remote(worker_class).options(**{**values, "num_gpus": 0})

        return SimpleNamespace(options=options)

    monkeypatch.setattr(ray, "remote", without_gpus)
    config = WorkerConfig(worker_id="prefill-0", role=WorkerRole.PREFILL, model_path="/nowhere")
    assert joined.num_gpus == 0
    shared = WorkerProcess(joined.desk, config, EchoWorker, joined.worker_resources, THIS_HOST, 0.5)
    for worker in (make_worker(), shared):
        run_until(worker, lambda worker=worker: worker.state is ProcessState.UP)  # type: ignore[misc]
        worker.clear()
    assert asked == [0, 0.5]


def test_a_worker_whose_ping_fails_is_replaced(tmp_path: Path) -> None:
    failpoint = tmp_path / "failpoint"
    worker = make_worker(str(failpoint))
    run_until(worker, lambda: worker.state is ProcessState.UP)
    process_id = worker.process_id
    failpoint.touch()
    run_until(worker, lambda: worker.num_failures == 1)
    assert worker.failure == "RuntimeError: engine thread died"
    failpoint.unlink()
    run_until(worker, lambda: worker.state is ProcessState.UP)
    assert worker.process_id != process_id
    worker.clear()


def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.deploy.cluster.worker_process.PING_TIMEOUT_S", 1.0)
    worker = make_worker()
    run_until(worker, lambda: worker.state is ProcessState.UP)
    process_id = worker.process_id
    os.kill(process_id, signal.SIGSTOP)
    run_until(worker, lambda: worker.num_failures == 1)
    assert worker.failure == "no answer for 1 s"
    run_until(worker, lambda: worker.state is ProcessState.UP)
    assert worker.process_id != process_id
    worker.clear()


def test_a_worker_that_cannot_start_says_why_and_is_tried_again_later() -> None:
    worker = make_worker("absent")
    run_until(worker, lambda: worker.num_failures == 2)
    assert worker.failure == "no model at 'absent': name a folder"
    assert state_of(worker) is ProcessState.STOPPED
    now_s = time.monotonic()
    worker.check(now_s)
    assert state_of(worker) is ProcessState.STOPPED
    worker.check(now_s + 1.0)
    assert state_of(worker) is ProcessState.STARTING
    worker.clear()


def test_a_worker_whose_process_ends_says_why() -> None:
    worker = make_worker("broken")
    run_until(worker, lambda: worker.num_failures == 1)
    assert worker.failure == "its process ended: RuntimeError: weights are NaN"
    worker.clear()


def test_a_worker_that_is_killed_has_no_reason_of_its_own() -> None:
    worker = make_worker()
    run_until(worker, lambda: worker.state is ProcessState.UP)
    os.kill(worker.process_id, signal.SIGKILL)
    run_until(worker, lambda: worker.num_failures == 1)
    assert worker.failure == "its process ended"
    worker.clear()


def test_nothing_is_restarted_while_ray_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.deploy.cluster.worker_process.PING_TIMEOUT_S", 2.0)
    monkeypatch.setattr("pdserve.deploy.cluster.ray_desk._STUCK_S", 0.2)
    worker = make_worker()
    run_until(worker, lambda: worker.state is ProcessState.UP)
    first = endpoint_of(worker)
    members = map(psutil.Process, joined.process_ids)
    server = next(process for process in members if process.name() == "gcs_server")
    server.suspend()
    try:
        probe = joined.desk.submit(ray_nodes)

        def is_stuck() -> bool:
            nonlocal probe
            if probe.done():  # a server may answer one more call before it stops
                probe = joined.desk.submit(ray_nodes)
            return joined.desk.is_stuck

        run_until(worker, is_stuck)
        os.kill(worker.process_id, signal.SIGKILL)
        for seconds in range(60):
            worker.check(time.monotonic() + seconds)
        assert (state_of(worker), worker.num_failures) == (ProcessState.UP, 0)
        assert not probe.done()
    finally:
        server.resume()
    run_until(worker, lambda: worker.num_failures == 1)
    run_until(worker, lambda: worker.state is ProcessState.UP)
    assert endpoint_of(worker).epoch != first.epoch
    worker.clear()


def ray_nodes() -> object:
    import ray

    return ray.nodes()


def test_a_worker_that_hangs_while_it_starts_is_replaced() -> None:
    worker = make_worker("stopped", start_timeout_s=1.0)
    run_until(worker, lambda: worker.num_failures == 1)
    assert worker.failure == "did not start within 1 s"
    worker.clear()


def test_what_an_actor_raised_when_it_was_created_is_shown() -> None:
    worker = make_worker("no package")
    run_until(worker, lambda: worker.num_failures == 1)
    assert worker.failure == "ModuleNotFoundError: No module named 'absent_package'"
    worker.clear()
