"""A device as JSON text: how a measured one gets into worker and router processes, which read no YAML.

Written by whoever starts them, from a file that `pdserve.planner.hardware_file` has checked value by value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from pdserve.model.curve import Curve
from pdserve.model.hardware import Hardware, Measured

_CURVES = ("compute_efficiency", "prefill_attention_efficiency")


def hardware_to_json(device: Hardware) -> str:
    return json.dumps(asdict(device))


def hardware_from_json(text: str) -> Hardware:
    """Raises ValueError for text that is no device."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"a worker's hardware is no device as JSON: {error}") from error
    return hardware_from_fields(values)


def hardware_from_fields(fields_of_json: Mapping[str, Any]) -> Hardware:
    """The same of an object that was part of a larger one."""
    try:
        values = dict(fields_of_json)
        unknown = values.keys() - {field.name for field in fields(Hardware)}
        if unknown:
            raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
        for name in _CURVES:
            values[name] = Curve(tuple((count, share) for count, share in values[name]["points"]))
        if values.get("measured") is not None:
            ranges = {name: tuple(values["measured"][name]) for name in ("step_tokens", "batch_size", "context_tokens")}
            values["measured"] = Measured(**{**values["measured"], **ranges})
        return Hardware(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"a worker's hardware is no device as JSON: {error!r}") from error
