"""`WorkerConfig` and `WorkerEndpoint` as JSON values: what goes into a worker process and what comes out of it.

Used by the process entry, the Ray actors and whoever starts workers. Never reads the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from pdserve.contracts.placement import WorkerConfig, WorkerEndpoint, WorkerRole


def config_to_fields(config: WorkerConfig) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {**asdict(config), "role": config.role.value}


def config_from_json(text: str) -> WorkerConfig:
    """Raises ValueError for text that is not a worker's configuration."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the worker's configuration is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("the worker's configuration must be a JSON object")
    return config_from_fields(values)


def config_from_fields(values: Mapping[str, Any]) -> WorkerConfig:
    """Raises ValueError for an unknown key, a missing one or an unknown role."""
    unknown = values.keys() - {field.name for field in fields(WorkerConfig)}
    if unknown:
        raise ValueError(f"unknown keys in the worker's configuration: {', '.join(sorted(unknown))}")
    missing = {"worker_id", "role", "model_path"} - values.keys()
    if missing:
        raise ValueError(f"missing keys in the worker's configuration: {', '.join(sorted(missing))}")
    cores = {name: tuple(values.get(name, ())) for name in ("cpu_cores", "transfer_cpu_cores")}
    seats = tuple(map(tuple, values.get("core_seats", ())))
    return WorkerConfig(**{**values, **cores, "core_seats": seats, "role": WorkerRole(values["role"])})


def endpoint_to_fields(endpoint: WorkerEndpoint) -> dict[str, Any]:
    """Plain values: for JSON, and for the answer of a Ray actor."""
    return {**asdict(endpoint), "role": endpoint.role.value}


def endpoint_from_fields(values: Mapping[str, Any]) -> WorkerEndpoint:
    """Raises ValueError for an unknown role, KeyError for a missing field."""
    return WorkerEndpoint(
        worker_id=values["worker_id"],
        role=WorkerRole(values["role"]),
        address=values["address"],
        epoch=values["epoch"],
    )
