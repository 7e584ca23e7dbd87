"""A worker's configuration and endpoint as JSON values."""

from __future__ import annotations

import json

import pytest

from pdserve.contracts.placement import WorkerConfig, WorkerEndpoint, WorkerRole
from pdserve.engine.worker_config import (
    config_from_fields,
    config_from_json,
    config_to_fields,
    endpoint_from_fields,
    endpoint_to_fields,
)

CONFIG = WorkerConfig(
    worker_id="decode-1", role=WorkerRole.DECODE, model_path="/m", cpu_cores=(2, 3), emulate="h100-sxm", time_scale=0.5
)


def test_a_configuration_and_an_endpoint_survive_json() -> None:
    assert config_from_json(json.dumps(config_to_fields(CONFIG))) == CONFIG
    endpoint = WorkerEndpoint(worker_id="p", role=WorkerRole.PREFILL, address="h:1", epoch=2**63 - 1)
    assert endpoint_from_fields(json.loads(json.dumps(endpoint_to_fields(endpoint)))) == endpoint


def test_only_three_keys_are_needed() -> None:
    config = config_from_fields({"worker_id": "w", "role": "mixed", "model_path": "m"})
    assert config == WorkerConfig(worker_id="w", role=WorkerRole.MIXED, model_path="m")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"worker_id": "w", "role": "mixed", "model_path": "m", "colour": 1}', "colour"),
        ('{"worker_id": "w", "role": "mixed"}', "model_path"),
        ('{"worker_id": "w", "role": "chef", "model_path": "m"}', "chef"),
    ],
)
def test_what_is_wrong_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        config_from_json(text)
