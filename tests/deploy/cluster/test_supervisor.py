"""Ends of a supervisor; clusters as a whole are in `tests.deploy.test_up`."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from pdserve.contracts.codec import from_json
from pdserve.contracts.deployment import DeploymentConfig, RouterConfig
from pdserve.contracts.errors import DeployError
from pdserve.deploy.checks import preflight
from pdserve.deploy.cluster import supervisor as module
from pdserve.deploy.cluster.folder import ClusterNote
from pdserve.deploy.cluster.router_process import RouterProcess
from pdserve.deploy.cluster.supervised_process import ProcessState
from pdserve.deploy.cluster.supervisor import Supervisor
from pdserve.deploy.commands.progress import Progress
from pdserve.deploy.launch import Launch
from pdserve.router.process_config import RouterProcessConfig
from tests.deploy.cluster.test_router_process import AnsweringRouter, checked
from tests.deploy.cluster.test_supervised_process import FakeProcess


@pytest.fixture
def signals() -> Iterator[None]:
    """Restores what signals do."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("is_under_nohup", [True, False])
def test_the_end_of_a_terminal_ends_it_unless_nohup_says_otherwise(is_under_nohup: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_under_nohup else signal.SIG_DFL)
    Supervisor(Launch(config=DeploymentConfig()), Progress(Console(quiet=True)))._take_signals()
    assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is is_under_nohup


def with_one_worker(tmp_path: Path) -> tuple[Supervisor, FakeProcess, io.StringIO]:
    """A supervisor that serves, its worker, and what it says."""
    said, worker = io.StringIO(), FakeProcess("decode-0")
    supervisor = Supervisor(Launch(config=DeploymentConfig()), Progress(Console(file=said)))
    supervisor._is_ready, supervisor._folder, supervisor._admin_token_file = True, tmp_path, tmp_path / "token"
    supervisor._signals, supervisor._ray = [], cast(Any, None)
    supervisor._fleet = cast(Any, SimpleNamespace(workers=[worker]))
    supervisor._autoscaling = cast(Any, SimpleNamespace(is_on=False))
    supervisor._routers = [RouterProcess(RouterProcessConfig(deployment=DeploymentConfig()), tmp_path)]
    return supervisor, worker, said


def test_a_full_disk_ends_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, worker, said = with_one_worker(tmp_path / "cluster")
    for _ in range(2):
        supervisor._reconcile(worker)
    for _ in range(2):
        supervisor._write_note()
    assert said.getvalue().count("until then pdserve status may be out of date") == 1
    (tmp_path / "cluster").mkdir()
    monkeypatch.setattr(supervisor, "_reconcile_processes", lambda: None)
    monkeypatch.setattr(supervisor, "_control", SimpleNamespace(turn=lambda begin: ""), raising=False)
    supervisor._tick()
    note = from_json(ClusterNote, (tmp_path / "cluster/cluster.json").read_text(), "note")
    assert note.admin_token_file == str(tmp_path / "cluster/token")


def test_a_process_that_cannot_be_started_is_said(tmp_path: Path) -> None:
    supervisor, worker, said = with_one_worker(tmp_path)
    worker.error = OSError(28, "No space left on device")
    supervisor._reconcile(worker)
    assert worker.state is ProcessState.STOPPED
    assert "[Errno 28] No space left on device; starting it again" in said.getvalue()


def test_two_signals_before_the_drain_cut_it_short(tmp_path: Path) -> None:
    supervisor = Supervisor(Launch(config=DeploymentConfig()), Progress(Console(quiet=True)))
    supervisor._is_ready = True
    router = AnsweringRouter(RouterProcessConfig(deployment=DeploymentConfig(router=RouterConfig(port=0))), tmp_path)
    supervisor._routers = [checked(checked(router))]
    for _ in range(2):
        supervisor._count_signal(signal.SIGINT, None)
    assert supervisor._drain() == 1


def test_a_cluster_that_ray_has_lost_finishes_its_requests_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def tick(supervisor: Supervisor) -> None:
        supervisor._ray.is_lost = len(done) == 2
        done.append("tick")

    def drain(supervisor: Supervisor) -> int:
        done.append(f"drain after {supervisor._num_signals}")
        return 0

    monkeypatch.setattr(preflight, "check_launch", lambda launch: None)
    monkeypatch.setattr(module, "check_model", lambda launch: "")
    monkeypatch.setattr(Supervisor, "_begin", lambda supervisor, warning: None)
    monkeypatch.setattr(Supervisor, "_tick", tick)
    monkeypatch.setattr(Supervisor, "_drain", drain)
    launch = Launch(config=DeploymentConfig(), ray_address="127.0.0.1:9")
    with pytest.raises(DeployError, match="start Ray on every host"):
        Supervisor(launch, Progress(Console(quiet=True))).run()
    assert done == ["tick", "tick", "tick", "drain after 1"]


@pytest.mark.parametrize("state", [ProcessState.STARTING, ProcessState.UP])
def test_routers_are_asked_whether_they_are_ready_once_a_worker_is_up(
    state: ProcessState, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def is_ready() -> bool:
        asked.append(True)
        return False

    supervisor = Supervisor(Launch(config=DeploymentConfig()), Progress(Console(quiet=True)))
    monkeypatch.setattr(supervisor, "_reconcile_processes", lambda: None)
    monkeypatch.setattr(supervisor, "_follow_load", lambda routers: None)
    router = SimpleNamespace(state=ProcessState.UP, are_lists_due=False, is_ready=is_ready)
    monkeypatch.setattr(supervisor, "_routers", [router], raising=False)
    monkeypatch.setattr(supervisor, "_fleet", SimpleNamespace(workers=[SimpleNamespace(state=state)]), raising=False)
    monkeypatch.setattr(supervisor, "_start_deadline_s", inf, raising=False)
    supervisor._tick()
    assert bool(asked) == (state is ProcessState.UP)
