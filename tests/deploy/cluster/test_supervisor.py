"""Signals to the supervisor; clusters as a whole are in `tests.deploy.test_up`."""

from __future__ import annotations

import signal
from pathlib import Path

from rich.console import Console

from pdserve.contracts.deployment import DeploymentConfig, RouterConfig
from pdserve.deploy.cluster.supervisor import Supervisor
from pdserve.deploy.commands.progress import Progress
from pdserve.deploy.launch import Launch
from pdserve.router.process_config import RouterProcessConfig
from tests.deploy.cluster.test_router_process import AnsweringRouter, checked


def test_two_signals_before_the_drain_cut_it_short(tmp_path: Path) -> None:
    supervisor = Supervisor(Launch(config=DeploymentConfig()), Progress(Console(quiet=True)))
    supervisor._is_ready = True
    router = AnsweringRouter(RouterProcessConfig(deployment=DeploymentConfig(router=RouterConfig(port=0))), tmp_path)
    supervisor._routers = [checked(checked(router))]
    for _ in range(2):
        supervisor._count_signal(signal.SIGINT, None)
    assert supervisor._drain() == 1
