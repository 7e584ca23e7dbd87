"""What the router process is told when it starts: one JSON object.

Built by the supervisor from the deployment file, read by `pdserve.router.main`. Holds values and checks their names;
never reads the environment.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields

from pdserve.contracts.deployment import SloConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterProcessConfig:
    """Everything a router process needs. Its workers come later, through the admin port."""

    model_path: str
    """Folder with config.json and the tokenizer."""
    served_name: str
    """What clients call the model."""
    host: str = "127.0.0.1"
    port: int = 8000
    """Of the API; 0 picks a free one."""
    admin_host: str = "127.0.0.1"
    admin_port: int = 0
    """Of metrics, targets, drain and status; 0 picks a free one."""
    slo: SloConfig = field(default_factory=SloConfig)
    max_queued_requests: int = 1024
    """Answers asked for and not finished, at most."""
    cluster_token: str = ""
    """Bearer token that workers ask for."""
    hardware: str = "cpu"
    """What a worker's rank runs on: a name of `pdserve.model.hardware`, for predictions."""
    devices: dict[str, str] = field(default_factory=dict)
    """The same by role of the workers, as JSON (`pdserve.model.hardware_json`), where it was measured."""
    cores_per_worker: int = 1
    """Of a worker on ``cpu``."""
    time_scale: float = 1.0
    """Steps of an emulated worker last this many times those of ``hardware``."""
    tensor_parallel: dict[str, int] = field(default_factory=dict)
    """Ranks of a worker, by its role, where they are more than one."""
    dtype: str = "float32"
    """Of weights and activations."""
    kv_dtype: str = "auto"
    """``auto``, which is ``dtype``, ``int8`` or ``float8_e4m3fn``."""
    quantization: str = "none"
    """Of the weights: ``none``, ``int8`` or ``int4``."""
    drain_timeout_s: float = 30.0
    """Seconds that requests in flight may take after SIGTERM."""


def config_to_json(config: RouterProcessConfig) -> str:
    return json.dumps(asdict(config))


def config_from_json(text: str) -> RouterProcessConfig:
    """Raises ValueError for text that is not a router's configuration; it names the key."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the router's configuration is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("the router's configuration must be a JSON object")
    _check_keys(values, RouterProcessConfig)
    if "slo" in values:
        _check_keys(values["slo"], SloConfig)
        values["slo"] = SloConfig(**values["slo"])
    missing = {"model_path", "served_name"} - values.keys()
    if missing:
        raise ValueError(f"missing keys in the router's configuration: {', '.join(sorted(missing))}")
    return RouterProcessConfig(**values)


def _check_keys(values: dict[str, object], kind: type[RouterProcessConfig] | type[SloConfig]) -> None:
    unknown = values.keys() - {known.name for known in fields(kind)}
    if unknown:
        raise ValueError(f"unknown keys in the router's configuration: {', '.join(sorted(unknown))}")
