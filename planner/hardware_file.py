"""Reads and writes a file of devices: a user's hardware, or measurements of `pdserve profile`.

    devices:
      my-l40s:                      # any name; the name of a catalogue device changes that device
        base: l40s
        price_per_hour_usd: 1.2
        link_bandwidth: 28e9
      this-machine:
        base: cpu
        num_cores: 4                # with base cpu only
        peak_flops: {float32: 4.1e11, bfloat16: 4.1e11}
        compute_efficiency: [[1, 0.2], [64, 0.7], [512, 0.9]]      # [tokens, share], or one number
        decode_attention_efficiency: 0.6
        layer_overhead_s: 4.0e-5
        measured: {date: 2026-11-21, model: tiny float32, step_tokens: [1, 2048], batch_size: [1, 64],
                   context_tokens: [0, 4096], errors: {prefill: 0.04, decode: 0.06}}
        sources: {compute_efficiency: pdserve profile}

The keys are ``base``, ``num_cores`` and the fields of `pdserve.model.cost.hardware.Hardware`, which documents their
units. Without a base, every field without a default is required. A figure without a source cites the file's name.

The command line and the search read the file and pass its devices to `pdserve.model.cost.hardware.hardware` as
``added``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import yaml

from pdserve.contracts.codec import between, from_plain, nearest, read_fields, read_value, to_plain
from pdserve.contracts.errors import ConfigError
from pdserve.model.cost.curve import Curve
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.model.cost.hardware_catalogue import ALIASES
from pdserve.planner.yaml_file import read_yaml

_NAME = "the hardware file"
_CURVES = ("compute_efficiency", "prefill_attention_efficiency")
_FIGURES = [field.name for field in fields(Hardware) if field.name not in ("name", "sources", "measured")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device(Hardware):
    """The keys of a device."""

    base: str = ""
    num_cores: Annotated[int, between(1, 2**16)] = 1


@dataclass(frozen=True, slots=True)
class _File:
    devices: dict[str, dict[str, Any]]


def read_hardware_file(path: Path) -> dict[str, Hardware]:
    """Devices of the file at ``path``, by lower-case name; an alias counts as the device that it stands for.

    Raises:
        ConfigError: the file cannot be read or does not describe devices; the message names the line and the key.
    """
    file = read_yaml(path)
    if file.value is None:
        raise ConfigError(f"{path} is empty; write devices: and a device below it")
    found: dict[str, Hardware] = {}
    try:
        for written, values in from_plain(_File, file.value, _NAME).devices.items():
            name, key = ALIASES.get(written.lower(), written.lower()), f"devices.{written}"
            if name in found:
                raise ConfigError(f"{key}: a device of the name {name} stands above; give each one name", key)
            found[name] = _read_device(name, key, values, found, path.name)
    except ConfigError as error:
        raise file.error(error) from error
    return found


def write_hardware_file(path: Path, devices: Iterable[Hardware]) -> None:
    """Write ``devices`` so that `read_hardware_file` returns the same again."""
    document = {"devices": {device.name: _plain(device) for device in devices}}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
    path.write_text(
        f"# Devices in addition to the catalogue of pdserve. Units are in docstrings of Hardware.\n{text}",
        "utf-8",
    )


def _plain(device: Hardware) -> dict[str, object]:
    values = to_plain(device)
    curves = {name: values[name]["points"] for name in _CURVES}
    return {name: value for name, value in {**values, **curves}.items() if name != "name" and value is not None}


def _read_device(
    name: str, key: str, values: Mapping[str, Any], above: Mapping[str, Hardware], file_name: str
) -> Hardware:
    """The device called ``name``; ``key`` is the position of ``values`` in the file."""
    if "name" in values:
        raise ConfigError(f"unknown key 'name' in {key}; the name is {name}, the key above", f"{key}.name")
    curves = {field: _read_curve(values[field], f"{key}.{field}") for field in _CURVES if field in values}
    read = read_fields(_Device, {**values, **curves}, _NAME, key)
    base = _base(name, key, read, above)
    figures = {field: value for field, value in read.items() if field not in ("base", "num_cores")}
    for field in figures.get("sources", {}):
        if field not in _FIGURES:
            raise ConfigError(
                f"unknown key {field!r} in {key}.sources{nearest(field, _FIGURES)}", f"{key}.sources.{field}"
            )
    sources = {field: file_name for field in figures if field in _FIGURES} | figures.get("sources", {})
    if base is not None:
        return replace(base, **{**figures, "name": name, "sources": {**base.sources, **sources}})
    try:
        return from_plain(Hardware, {**figures, "name": name, "sources": sources}, _NAME, key)
    except ConfigError as error:
        raise ConfigError(f"{error}, or give a base, such as base: h100", key) from error


def _read_curve(value: object, key: str) -> Curve:
    """One share, or points of [tokens, share]."""
    try:
        if not isinstance(value, list):
            return Curve.constant(read_value(float, value, _NAME, key))
        return Curve(read_value(tuple[tuple[int, float], ...], value, _NAME, key))
    except ConfigError as error:
        pairs = "one share, or [tokens, share] pairs, as in [[1, 0.2], [512, 0.8]]"
        raise ConfigError(f"{str(error).partition('; write')[0]}; write {pairs}", key) from error
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", key) from error


def _base(name: str, key: str, read: Mapping[str, Any], above: Mapping[str, Hardware]) -> Hardware | None:
    """The base of a device, or the catalogue device that it changes."""
    base_name = read.get("base", name)
    if "num_cores" in read and base_name.lower() != "cpu":
        raise ConfigError(f"{key}.num_cores is of base: cpu; leave it out for other devices", f"{key}.num_cores")
    try:
        return hardware(base_name, num_cores=read.get("num_cores", 1), added=above)
    except ValueError as error:
        if "base" in read:
            raise ConfigError(f"{key}.base: {error}", f"{key}.base") from error
        return None
