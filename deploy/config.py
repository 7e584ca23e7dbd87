"""Reads a deployment file (YAML, so JSON too) into `pdserve.contracts.deployment` and checks it.

The only place where a user's configuration is judged: unknown keys, wrong types, values out of range and settings that
are not supported yet each raise `ConfigError` with one line that names the key and the remedy. The CLI calls it before
anything is started. It never touches the network or the model.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from pathlib import Path

import yaml

from pdserve.contracts.deployment import QUANTIZATION_SETTINGS, DeploymentConfig, PhaseConfig
from pdserve.contracts.kv_layout import KV_DTYPE_SETTINGS
from pdserve.contracts.placement import DEVICE_SETTINGS
from pdserve.model.hardware import Hardware
from pdserve.planner.hardware_file import HardwareFileError, read_hardware_file

PHASES = ("prefill", "decode", "mixed")
MAX_REPLICAS = 64
MAX_DEGREE = 64
"""Of tensor or pipeline parallelism."""
_BYTE_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_TYPE_NAMES: dict[object, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str | int: "auto, 0, or bytes with a unit, such as 4GiB",
}


class ConfigError(ValueError):
    """A deployment that cannot be run as written. Its text is one line that names the key and the remedy."""


class Use(Enum):
    """What a deployment is read for. Not all that can be simulated can be run yet."""

    SERVE = "serve"
    EMULATE = "emulate"
    """Run, on GPUs that are not here."""
    SIMULATE = "simulate"


def read_deployment(path: Path, *, use: Use = Use.SERVE) -> DeploymentConfig:
    """Read and check the file at ``path``; relative paths in it are taken from its folder.

    Args:
        use: refuse what is not supported yet for it.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or says something that cannot be run.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except (yaml.YAMLError, ValueError) as error:  # PyYAML lets pass what int() and its like say of a value
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; a deployment has sections with keys in them") from None
    try:
        config = parse_deployment(document, use=use)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    model_path, profile = (
        given and str(path.parent / Path(given).expanduser()) for given in (config.model.path, config.model.profile)
    )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=model_path, profile=profile))


def read_profile(config: DeploymentConfig) -> dict[str, Hardware]:
    """The devices of ``model.profile``, by name; none where it is empty.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        return read_hardware_file(Path(config.model.profile)) if config.model.profile else {}
    except HardwareFileError as error:
        raise ConfigError(f"model.profile: {error}") from error


def parse_deployment(document: object, *, use: Use = Use.SERVE) -> DeploymentConfig:
    """Build and check a deployment from what a YAML document holds; ``None`` (an empty file) is all defaults.

    Raises:
        ConfigError: see the module.
    """
    config = typing.cast(DeploymentConfig, _read_section(DeploymentConfig, "the deployment file", document))
    check_deployment(config, use=use)
    return config


def override(config: DeploymentConfig, section: str, **values: str | int | float | None) -> DeploymentConfig:
    """``config`` with those of ``values`` that are not None in a section. Check it afterwards."""
    given = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **given)})


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``512MiB`` or ``8GiB`` (binary units; a bare number is bytes).

    Raises:
        ConfigError: it is not a positive size.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i)?B?\s*", text)
    try:
        num_bytes = int(float(match[1]) * _BYTE_UNITS[match[2] or ""]) if match else 0
    except (ValueError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise ConfigError(f"{text!r} is not a size; write bytes with a unit, such as 512MiB or 8GiB")
    return num_bytes


def kv_memory_bytes(phase: PhaseConfig) -> int:
    """Bytes of KV cache that each worker of ``phase`` was given; 0 for ``auto``."""
    return 0 if phase.kv_memory == "auto" else parse_bytes(phase.kv_memory)


def swap_memory_bytes(phase: PhaseConfig) -> int | None:
    """Bytes of host memory that each worker of ``phase`` may swap KV to; ``None`` for ``auto``."""
    if phase.swap_memory == "auto":
        return None
    return parse_bytes(str(phase.swap_memory)) if phase.swap_memory not in (0, "0") else 0


def check_deployment(config: DeploymentConfig, *, use: Use = Use.SERVE) -> None:
    """Check every value's range and how they fit together. Call it again after overrides.

    Args:
        use: refuse what is not supported yet for it.

    Raises:
        ConfigError: the first thing found that cannot be run.
    """
    model, slo, router = config.model, config.slo, config.router
    _one_of("model.dtype", model.dtype, ("float32", "bfloat16", "float16"))
    _one_of("model.kv_dtype", model.kv_dtype, KV_DTYPE_SETTINGS)
    _one_of("model.quantization", model.quantization, QUANTIZATION_SETTINGS)
    _in_range("model.max_model_len", model.max_model_len, 0, 2**24)
    _in_range("model.block_size", model.block_size, 1, 256)
    _positive("slo.ttft_seconds", slo.ttft_seconds)
    _positive("slo.tpot_seconds", slo.tpot_seconds)
    _share("slo.attainment", slo.attainment, "requests")
    for name in PHASES:
        _check_phase(name, getattr(config, name), use)
    if not config.mixed.replicas and not (config.prefill.replicas and config.decode.replicas):
        raise ConfigError(
            f"prefill.replicas is {config.prefill.replicas} and decode.replicas is {config.decode.replicas}; "
            "give both at least 1, or mixed.replicas at least 1"
        )
    _one_of("kv_transfer.transport", config.kv_transfer.transport, ("auto", "memfd", "grpc"))
    if not router.host:
        raise ConfigError("router.host is empty; write 127.0.0.1 for this machine only or 0.0.0.0 for every interface")
    _in_range("router.port", router.port, 0, 65535)
    _in_range("router.admin_port", router.admin_port, 0, 65535)
    _in_range("router.max_queued_requests", router.max_queued_requests, 1, 2**20)
    _supported_once("router.replicas", router.replicas)


def _check_phase(name: str, phase: PhaseConfig, use: Use) -> None:
    _in_range(f"{name}.replicas", phase.replicas, 0, MAX_REPLICAS)
    for degree in ("tensor_parallel", "pipeline_parallel"):
        _in_range(f"{name}.{degree}", getattr(phase, degree), 1, MAX_DEGREE)
    if use is Use.SERVE:
        _supported_once(f"{name}.tensor_parallel", phase.tensor_parallel, "; pdserve up --emulate GPU takes more")
    if use is not Use.SIMULATE:
        _supported_once(f"{name}.pipeline_parallel", phase.pipeline_parallel)
    _one_of(f"{name}.device", phase.device, DEVICE_SETTINGS)
    _share(f"{name}.gpu_memory_utilization", phase.gpu_memory_utilization, "a GPU's memory")
    _in_range(f"{name}.max_batch_tokens", phase.max_batch_tokens, 1, 2**20)
    _in_range(f"{name}.max_batch_size", phase.max_batch_size, 1, 2**16)
    try:
        kv_memory_bytes(phase)
    except ConfigError as error:
        raise ConfigError(f"{name}.kv_memory: {error}, or auto") from error
    try:
        swap_bytes = swap_memory_bytes(phase)
    except ConfigError as error:
        raise ConfigError(f"{name}.swap_memory: {error}, auto or 0") from error
    if name == "prefill" and swap_bytes:
        raise ConfigError(f"prefill.swap_memory is {phase.swap_memory}; prefill workers preempt nothing: leave it out")
    for resource, amount in phase.resources.items():
        _positive(f"{name}.resources.{resource}", amount)


def _in_range(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{key} is {value}; write a number from {low} to {high}")


def _positive(key: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{key} is {value}; write a number above 0")


def _share(key: str, value: float, whole: str) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"{key} is {value}; it is a share of {whole}: write 0.9 for 90 %")


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key} is {value!r}; write one of {', '.join(choices)}")


def _supported_once(key: str, value: int, remedy: str = "") -> None:
    if value != 1:
        raise ConfigError(f"{key} is {value}; only 1 is supported today{remedy}")


def _read_section(section: type, name: str, raw: object) -> object:
    """An instance of the dataclass ``section`` from ``raw``; keys that are absent keep their defaults."""
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name} holds {_describe(raw)}; write keys and values, as in {{replicas: 1}}")
    types = typing.get_type_hints(section)
    values = {}
    for key, value in raw.items():
        if key not in types:
            raise ConfigError(f"unknown key {str(key)!r} in {name}{_suggest(str(key), list(types))}")
        full_name = key if section is DeploymentConfig else f"{name}.{key}"
        values[key] = _read_value(types[key], full_name, value)
    default = _MIXED_DEFAULT if name == "mixed" else section()
    return dataclasses.replace(default, **values)


_MIXED_DEFAULT = DeploymentConfig().mixed
"""The one section whose defaults differ from its class's: no colocated workers unless asked for."""


def _read_value(expected: type, name: str, value: object) -> object:
    if dataclasses.is_dataclass(expected):
        return _read_section(expected, name, value)
    if expected == dict[str, float]:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {_describe(value)}; write names and amounts, as in {{host_a: 1}}")
        return {str(key): _read_value(float, f"{name}.{key}", amount) for key, amount in value.items()}
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} is larger than any number that is of use; write a smaller one") from None
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise ConfigError(f"{name} is {_describe(value)}; write {_TYPE_NAMES[expected]}")
    return value


def _describe(value: object) -> str:
    return "empty" if value is None else f"{value!r} ({type(value).__name__})"


def _suggest(key: str, valid: list[str]) -> str:
    nearest = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    return f"; did you mean {nearest[0]!r}? (valid: {', '.join(valid)})"


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice, of which the plain loader silently drops the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        construct: Callable[..., object] = self.construct_object
        for key_node, _ in node.value:
            key = construct(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
