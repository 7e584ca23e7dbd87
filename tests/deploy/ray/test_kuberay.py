"""The file for KubeRay is a RayCluster, and its pods are those that its deployment asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pdserve.contracts.deployment import DeploymentConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.config import parse_deployment

FILE = Path(__file__).parents[3] / "deploy/ray/kuberay.yaml"
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
CONTAINER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "image"],
    "properties": {
        name: {}
        for name in ("name", "image", "command", "args", "ports", "readinessProbe", "resources", "volumeMounts")
    },
}
POD = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {
        "metadata": {"type": "object", "properties": {"annotations": TEXTS}},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"containers": {"type": "array", "items": CONTAINER}, "volumes": {"type": "array"}},
        },
    },
}
GROUP = {
    "type": "object",
    "additionalProperties": False,
    "required": ["groupName", "minReplicas", "maxReplicas", "template"],
    "properties": {
        "groupName": {"type": "string"},
        **{name: {"type": "integer", "minimum": 0} for name in ("replicas", "minReplicas", "maxReplicas")},
        "rayStartParams": TEXTS,
        "template": POD,
    },
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["headGroupSpec"],
    "properties": {
        "rayVersion": {"type": "string"},
        "authOptions": {"properties": {"mode": {"enum": ["disabled", "token"]}}, "additionalProperties": False},
        "headGroupSpec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["template"],
            "properties": {"rayStartParams": TEXTS, "template": POD},
        },
        "workerGroupSpecs": {"type": "array", "items": GROUP},
    },
}
"""The part of the schema of a RayCluster (``ray.io/v1``) that the file uses; Kubernetes drops unknown keys."""


@pytest.fixture
def documents() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(FILE.read_text())}


@pytest.fixture
def deployment(documents: dict[str, dict[str, Any]]) -> DeploymentConfig:
    return parse_deployment(yaml.safe_load(documents["ConfigMap"]["data"]["deployment.yaml"]))


def test_it_is_a_ray_cluster(documents: dict[str, dict[str, Any]]) -> None:
    cluster = documents["RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1"
    jsonschema.validate(cluster["spec"], SCHEMA)
    cluster["spec"]["workerGroupSpecs"][0]["num-hosts"] = 1
    with pytest.raises(jsonschema.ValidationError, match="num-hosts"):
        jsonschema.validate(cluster["spec"], SCHEMA)


def test_each_group_has_a_pod_for_each_worker_of_its_role(
    documents: dict[str, dict[str, Any]], deployment: DeploymentConfig
) -> None:
    spec = documents["RayCluster"]["spec"]
    for group in spec["workerGroupSpecs"]:
        phase = deployment.phase(WorkerRole(group["groupName"]))
        assert phase.replicas == group["replicas"] == group["minReplicas"] == group["maxReplicas"]
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == phase.resources
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    (num_hosts,) = re.findall(r"--hosts (\d+)", head["args"][0])
    assert int(num_hosts) == 1 + sum(group["replicas"] for group in spec["workerGroupSpecs"])
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert len({pod["template"]["spec"]["containers"][0]["image"] for pod in pods}) == 1
    assert {"name": "api", "containerPort": deployment.router.port} in head["ports"]


def test_other_pods_reach_the_api_only(documents: dict[str, dict[str, Any]], deployment: DeploymentConfig) -> None:
    assert deployment.security.plaintext
    policy, label = documents["NetworkPolicy"]["spec"], {"ray.io/cluster": documents["RayCluster"]["metadata"]["name"]}
    own, others = policy["ingress"]
    assert policy["podSelector"]["matchLabels"] == own["from"][0]["podSelector"]["matchLabels"] == label
    assert others == {"ports": [{"port": deployment.router.port}]}
