"""A router that ends reports the reason in one line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, RouterConfig
from pdserve.deploy.cluster import router_process
from pdserve.deploy.cluster.router_process import RouterProcess
from pdserve.deploy.cluster.supervised_process import ProcessState
from pdserve.model.weights.demo_model import DEMO_MODEL
from pdserve.router.process_config import RouterProcessConfig
from tests.deploy.clusters import wait_for


def router_config(model_path: str) -> RouterProcessConfig:
    model = ModelConfig(path=model_path, served_name="s", dtype="float32")
    return RouterProcessConfig(deployment=DeploymentConfig(model=model, router=RouterConfig(port=0)))


def checked(router: RouterProcess) -> RouterProcess:
    router.check(time.monotonic())
    return router


def test_a_router_that_cannot_start_and_one_that_is_killed_say_why(tmp_path: Path) -> None:
    config = router_config("/nowhere")
    router = RouterProcess(config, tmp_path)
    try:
        wait_for(lambda: checked(router).failure, "its end")
        assert "/nowhere" in router.failure
        assert not router.failure.startswith("python -m")
    finally:
        router.end()
    router = RouterProcess(router_config(str(DEMO_MODEL)), tmp_path)
    try:
        wait_for(lambda: checked(router).state is ProcessState.UP, "its ports")
        os.kill(router.process_id, signal.SIGKILL)
        wait_for(lambda: checked(router).failure, "its end")
        assert router.failure == "killed by SIGKILL"
    finally:
        router.end()


def accepts_lists(router: RouterProcess) -> bool:
    router.are_lists_due = True
    router.put_lists([], [router.config.router.admin_port])
    return not router.are_lists_due


class AnsweringRouter(RouterProcess):
    """Answers while ``answers`` is true; has no process."""

    answers = True

    def _start(self) -> None:
        pass

    def _check_starting(self, now_s: float) -> bool:
        return True

    def _answers(self) -> bool:
        return self.answers


def test_a_router_counts_as_hung_only_some_time_after_its_last_answer(tmp_path: Path) -> None:
    router = AnsweringRouter(router_config(""), tmp_path)
    for now_s in 0.0, 0.0, 100.0:
        router.check(now_s)
    router.answers = False
    router.check(103.0)
    assert router.state is ProcessState.UP
    router.check(101.0 + router_process.HANG_S)
    assert router.failure == "no answer for 10 s"


def test_a_router_that_hangs_is_killed_and_restarted_at_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_process, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(router_process, "HANG_S", 1.0)
    monkeypatch.setattr(router_process, "_HTTP_TIMEOUT_S", 0.2)
    router = RouterProcess(router_config(str(DEMO_MODEL)), tmp_path)
    try:
        wait_for(lambda: checked(router).state is ProcessState.UP, "its ports")
        address = router.address
        assert accepts_lists(router)
        os.kill(router.process_id, signal.SIGSTOP)
        assert not accepts_lists(router)
        wait_for(lambda: checked(router).failure, "its end")
        assert router.failure == "no answer for 1 s"
        wait_for(lambda: checked(router).state is ProcessState.UP, "its successor")
        assert router.address == address
        assert accepts_lists(router)
    finally:
        router.end()
