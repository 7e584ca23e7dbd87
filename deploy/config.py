"""Reads a deployment file (YAML, so JSON too) into `pdserve.contracts.deployment` and checks that its values fit.

The command line calls it before anything starts. Never touches the network or the model.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pdserve.contracts.codec import from_plain, to_plain
from pdserve.contracts.deployment import DeploymentConfig, KvTierConfig, ModelConfig, PhaseConfig
from pdserve.contracts.errors import ConfigError
from pdserve.contracts.worker_config import TlsFiles, WorkerRole
from pdserve.model.config.dtype import checkpoint_dtype
from pdserve.model.cost.hardware import Hardware
from pdserve.planner.hardware_file import read_hardware_file
from pdserve.planner.yaml_file import parse_value, read_yaml

_NAME = "the deployment file"


Use = Literal["serve", "emulate", "simulate"]
"""Purpose of a deployment: emulation and simulation support more than serving."""

_ROUTER_FILES = ("keys_file", "admin_token_file", "tls_certificate", "tls_key", "request_log")
_ORIGIN = re.compile(r"\*|https?://[^/\s*]+")


def read_deployment(path: Path, *, use: Use = "serve") -> DeploymentConfig:
    """Read and check the file at ``path``; relative paths in it start from its folder.

    Args:
        use: purpose; unsupported values for it are refused.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or describes a deployment that cannot run.
    """
    file = read_yaml(path)
    try:
        config = parse_deployment(file.value, use=use)
    except ConfigError as error:
        raise file.error(error) from error

    def from_folder(section: object, *names: str) -> dict[str, str]:
        given = ((name, getattr(section, name)) for name in names)
        return {
            name: value and str((path.parent / Path(os.path.expandvars(value)).expanduser()).absolute())
            for name, value in given
        }

    config = override(config, "model", **from_folder(config.model, "path", "profile"))
    for role in WorkerRole:
        if (phase := config.phase(role)).draft_path:
            speculation = {"draft": from_folder(phase, "draft_path")["draft_path"]}
            config = override(config, role.value, speculation=speculation)
        if (tier := phase.kv_tier) is not None:
            config = override(config, role.value, kv_tier=dataclasses.replace(tier, **from_folder(tier, "path")))
    config = override(config, "router", **from_folder(config.router, *_ROUTER_FILES))
    if tls := config.security.tls:
        tls = TlsFiles(**from_folder(tls, *to_plain(tls)))
        config = dataclasses.replace(config, security=dataclasses.replace(config.security, tls=tls))
    return config


def names_pools(path: Path) -> bool:
    """Whether the file at ``path``, which has been read before, has a section of workers."""
    return any(role.value in read_yaml(path).lines for role in WorkerRole)


def read_profile(config: DeploymentConfig) -> dict[str, Hardware]:
    """Devices of ``model.profile``, by name; none if it is empty.

    Raises:
        ConfigError: the file cannot be read, or is not a hardware file.
    """
    try:
        return read_hardware_file(Path(config.model.profile)) if config.model.profile else {}
    except ConfigError as error:
        raise ConfigError(f"model.profile: {error}") from error


def find_dtype(model: ModelConfig, slow_reason: Callable[[str], str] = lambda dtype: "") -> tuple[ModelConfig, str]:
    """Replace a dtype ``auto`` by the checkpoint's, or by float32 if ``slow_reason`` says why that is faster; returns
    the model, and why it has its dtype.

    Raises:
        ConfigError: the checkpoint's dtype is not served.
    """
    if model.dtype != "auto":
        return model, "model.dtype"
    dtype = checkpoint_dtype(Path(model.path))
    if slow := slow_reason(dtype):
        return dataclasses.replace(model, dtype="float32"), f"the checkpoint's is {dtype}, and {slow}"
    return dataclasses.replace(model, dtype=dtype), "as the checkpoint"


def parse_deployment(document: object, *, use: Use = "serve") -> DeploymentConfig:
    """Build and check a deployment from a parsed YAML document; ``None`` (an empty file) gives the defaults.

    Raises:
        ConfigError: the deployment cannot run as written.
    """
    config = from_plain(DeploymentConfig, {} if document is None else document, _NAME)
    _check_fit(config, use)
    return config


def override(
    config: DeploymentConfig, section: str, **values: str | int | float | dict[str, str] | KvTierConfig | None
) -> DeploymentConfig:
    """Replace fields of one section by the ``values`` that are not None. Check the result afterwards."""
    given = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **given)})


def read_settings(settings: Sequence[str]) -> dict[str, object]:
    """Values of options such as ``decode.replicas=3``, by dotted key; the last one of a key counts.

    Raises:
        ConfigError: a setting has no key or no value, or its value is not YAML.
    """
    values = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not (key and equals):
            raise ConfigError(f"--set is {setting!r}; write a key and its value, such as --set decode.replicas=3")
        try:
            values[key] = parse_value(text)
        except ConfigError as error:
            raise ConfigError(f"--set {key}: {error}", key) from error
    return values


def with_settings(config: DeploymentConfig, settings: Sequence[str]) -> DeploymentConfig:
    """Replace any keys of a deployment file, as `read_settings` reads them. Check the result afterwards.

    Raises:
        ConfigError: an unknown key, or a bad value.
    """
    if not settings:
        return config
    document = to_plain(config)
    for key, value in read_settings(settings).items():
        *sections, name = key.split(".")
        place = document
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[name] = value
    try:
        return from_plain(DeploymentConfig, document, "a deployment")
    except ConfigError as error:
        raise ConfigError(f"--set: {error}", error.key) from error


def check_deployment(config: DeploymentConfig, *, use: Use = "serve") -> None:
    """Check every value and how they fit together. Call it after overrides.

    Args:
        use: purpose; unsupported values for it are refused.

    Raises:
        ConfigError: the first value that cannot run.
    """
    parse_deployment(to_plain(config), use=use)


def _check_fit(config: DeploymentConfig, use: Use) -> None:
    for role in WorkerRole:
        _check_phase(role.value, config.phase(role))
        _check_bounds(role.value, config.phase(role), config)
    if not config.mixed.replicas and not (config.prefill.replicas and config.decode.replicas):
        raise ConfigError(
            f"prefill.replicas is {config.prefill.replicas} and decode.replicas is {config.decode.replicas}; "
            "give both at least 1, or mixed.replicas at least 1"
        )
    if config.prefill.replicas and not config.decode.replicas:
        raise ConfigError(
            f"prefill.replicas is {config.prefill.replicas} and decode.replicas is 0: prefill workers hand off to "
            "decode workers; set prefill.replicas to 0, or decode.replicas to at least 1",
            "decode.replicas",
        )
    if use == "serve" and config.model.quantization == "fp8":
        raise ConfigError(
            "model.quantization is fp8, to which pdserve rounds no weights when it serves; use auto for one in "
            "fp8, or int8",
            "model.quantization",
        )
    if not config.router.host:
        raise ConfigError(
            "router.host is empty; write 127.0.0.1 for this machine only or 0.0.0.0 for every interface", "router.host"
        )
    if config.router.admin_port and config.router.admin_port + config.router.replicas > 2**16:
        key = "router.admin_port"
        raise ConfigError(
            f"{key} is {config.router.admin_port}, and {config.router.replicas} routers take the ports from there on; "
            f"write at most {2**16 - config.router.replicas}, or 0 for any free ones",
            key,
        )
    for origin in config.router.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"router.cors_origins has {origin!r}; write origins as browsers send them, such as "
                "https://chat.example.com, or * for every one",
                "router.cors_origins",
            )


def _check_bounds(name: str, phase: PhaseConfig, config: DeploymentConfig) -> None:
    if not phase.max_replicas and phase.min_replicas:
        key = f"{name}.min_replicas"
        raise ConfigError(f"{key} is {phase.min_replicas}, and {name}.max_replicas is not given: give both", key)
    if phase.max_replicas and phase.min_replicas > phase.max_replicas:
        key = f"{name}.min_replicas"
        raise ConfigError(
            f"{key} is {phase.min_replicas}, above {name}.max_replicas, {phase.max_replicas}: lower it, or raise that",
            key,
        )
    if phase.max_replicas and config.mixed.replicas:
        key = f"{name}.max_replicas"
        raise ConfigError(
            f"{key} is {phase.max_replicas}, and there are mixed workers; the load is followed by prefill and decode "
            "workers alone: leave it out",
            key,
        )
    if phase.max_replicas and not max(1, phase.min_replicas) <= phase.replicas <= phase.max_replicas:
        key = f"{name}.replicas"
        raise ConfigError(
            f"{key} is {phase.replicas}; write a number from {name}.min_replicas, {max(1, phase.min_replicas)}, to "
            f"{name}.max_replicas, {phase.max_replicas}",
            key,
        )


def _check_phase(name: str, phase: PhaseConfig) -> None:
    if name == "prefill" and phase.swap_memory_bytes:
        key = "prefill.swap_memory"
        raise ConfigError(f"{key} is {phase.swap_memory}; prefill workers preempt nothing: leave it out", key)
    if phase.drafter != "none" and name == "prefill":
        key = "prefill.speculation"
        raise ConfigError(f"{key} is {phase.drafter}; prefill workers decode nothing: leave it out", key)
    if phase.batching != "continuous" and name != "mixed":
        key = f"{name}.batching"
        raise ConfigError(f"{key} is {phase.batching}; batches are for mixed workers: leave it out", key)
    if phase.kv_tier is not None and (phase.device == "cuda" or phase.pipeline_parallel > 1):
        key = f"{name}.kv_tier"
        raise ConfigError(
            f"{key} is set; there is one on CPUs only so far, with pipeline_parallel 1: leave it out", key
        )
    if phase.draft_path and (phase.device == "cuda" or phase.pipeline_parallel > 1):
        key = f"{name}.speculation"
        needs = "guesses on CPUs only so far" if phase.device == "cuda" else "needs pipeline_parallel 1"
        raise ConfigError(f"{key} has a draft model, which {needs}; use ngram or none", key)
