"""Reads numbers out of a checkpoint's config.json: each is there and positive, or an error names it.

Used by the parsers beside it; never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping


def positive_int(values: Mapping[str, object], key: str, default: int | None = None) -> int:
    """The integer at ``key``; ``default`` where it is missing or null.

    Raises:
        ValueError: it is no positive integer, or is missing and there is no default.
    """
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}; download it again")
    return value


def positive_float(values: Mapping[str, object], key: str, default: float | None = None) -> float:
    """The number at ``key``; ``default`` where it is missing or null.

    Raises:
        ValueError: it is no positive number, or is missing and there is no default.
    """
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive number, not {value!r}; download it again")
    return float(value)
