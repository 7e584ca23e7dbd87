"""A router that ends reports the reason in one line."""

from __future__ import annotations

from pathlib import Path

from pdserve.deploy.cluster.router_process import RouterProcess
from pdserve.model.weights.demo_model import DEMO_MODEL
from pdserve.router.process_config import RouterProcessConfig
from tests.deploy.clusters import wait_for


def test_a_router_that_cannot_start_and_one_that_is_killed_say_why(tmp_path: Path) -> None:
    config = RouterProcessConfig(model_path="/nowhere", served_name="s", port=0)
    router = RouterProcess(config, tmp_path / "log")
    try:
        wait_for(lambda: router.exit_code is not None, "its end")
        assert "/nowhere" in router.failure
        assert not router.failure.startswith("python -m")
    finally:
        router.close()
    router = RouterProcess(RouterProcessConfig(model_path=str(DEMO_MODEL), served_name="s", port=0), tmp_path / "log")
    try:
        wait_for(router.check_listening, "its ports")
        router.kill()
        wait_for(lambda: router.exit_code is not None, "its end")
        assert router.failure == "killed by SIGKILL"
    finally:
        router.close()
