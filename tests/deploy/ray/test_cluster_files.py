"""The files for ``ray up`` pass Ray's own checks, and name nothing that its providers ignore."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.deploy.commands.ray_file import ray_cluster_text
from pdserve.deploy.config import read_deployment

FOLDER = Path(__file__).parents[3] / "deploy/ray"
CHECK = """
import sys, yaml
from ray.autoscaler._private.util import prepare_config, validate_config
validate_config(prepare_config(yaml.safe_load(sys.stdin)))
"""
PROVIDER_KEYS = {"local": {"type", "head_ip", "worker_ips"}, "aws": {"type", "region", "cache_stopped_nodes"}}
"""Keys of ``provider`` that the files use; Ray lets any pass."""


@pytest.fixture(params=sorted(PROVIDER_KEYS))
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{request.param}.yaml").read_text())
    assert found["provider"]["type"] == request.param
    return found


def test_ray_accepts_the_file(cluster: dict[str, Any]) -> None:
    # Ray reads its settings when it is imported, so this process must not.
    subprocess.run([sys.executable, "-c", CHECK], input=yaml.safe_dump(cluster), text=True, check=True)
    assert set(cluster["provider"]) == PROVIDER_KEYS[cluster["provider"]["type"]]


def test_as_many_hosts_are_started_as_are_waited_for(cluster: dict[str, Any]) -> None:
    types = cluster.get("available_node_types", {}).values()
    num_workers = sum(each.get("min_workers", 0) for each in types) or len(cluster["provider"]["worker_ips"])
    assert cluster["max_workers"] == num_workers
    (command,) = (each for each in cluster["head_start_ray_commands"] if each.startswith("pdserve up"))
    assert f"--hosts {num_workers + 1} " in f"{command} "


@pytest.mark.parametrize(("provider", "num_workers"), [("local", 3), ("aws", 4)])
def test_a_plan_brings_its_hosts(tmp_path: Path, provider: str, num_workers: int) -> None:
    deployment = tmp_path / "planned.yaml"
    text = ray_cluster_text(provider, deployment, num_hosts=4, gpus_per_host=8, gpu="h100-sxm")
    cluster = yaml.safe_load(text)
    test_ray_accepts_the_file(cluster)
    test_as_many_hosts_are_started_as_are_waited_for(cluster)
    assert cluster["max_workers"] == num_workers
    assert cluster["file_mounts"]["~/pdserve/deployment.yaml"] == str(deployment)
    assert re.search(rf"# +(RAY_.* )?ray up --yes .*{tmp_path}/planned.ray-{provider}.yaml\n", text), "the file itself"
    assert os.access(cluster["file_mounts"]["~/pdserve/keep-control-store"], os.X_OK)
    if provider == "aws":
        assert cluster["available_node_types"]["worker"]["resources"]["GPU"] == 8
        assert "<- with 8 x h100-sxm" in text
    else:
        assert cluster["provider"]["worker_ips"] == ["10.0.0.11", "10.0.0.12", "10.0.0.13"]


def test_the_deployment_is_one(cluster: dict[str, Any]) -> None:
    path = cluster["file_mounts"]["~/pdserve/deployment.yaml"]
    config = read_deployment(FOLDER.parents[1] / path)
    assert config.decode.replicas == 2
    assert config.router.host == "0.0.0.0"
