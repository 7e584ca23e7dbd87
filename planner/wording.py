"""Formats figures for people, uniformly in tables, reports and files."""

from __future__ import annotations

from math import inf, isfinite

from pdserve.contracts.worker_config import WorkerRole

ROLE_NAMES = {WorkerRole.PREFILL: "prefill", WorkerRole.DECODE: "decode", WorkerRole.MIXED: "colocated"}
_PLAIN = (-5, 15)
"""Range of powers of ten (from, below) that are written without an exponent."""
_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def number(value: float, digits: int = 3) -> str:
    """Rounded to significant digits: ``12.3``, ``1,230``, ``0.0012``, and ``1.2e-9`` for tiny numbers."""
    if not isfinite(value):
        return "never" if value == inf else "-"
    if value == 0:
        return "0"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    exponent = int(power)
    if not _PLAIN[0] <= exponent < _PLAIN[1]:
        return f"{float(mantissa):g}e{exponent}"
    text = f"{float(f'{mantissa}e{power}'):,.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0") if exponent < 0 else text


def seconds(value: float) -> str:
    """``250 ms``, ``1.2 s``, ``2 h``."""
    if not isfinite(value):
        return number(value)
    amount, unit = (value, "s") if abs(value) >= 1 else (value * 1e3, "ms")
    if abs(value) >= 3600:
        amount, unit = value / 3600, "h"
    text = number(amount)
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def share(value: float) -> str:
    """``93.1 %``, ``90 %``."""
    return f"{value * 100:.1f}".removesuffix(".0") + " %"


def size(num_bytes: float) -> str:
    """Bytes in decimal units, as memory is sold: ``80 GB``."""
    for unit, name in _BYTE_UNITS:
        if num_bytes >= unit:
            return f"{number(num_bytes / unit)} {name}"
    return f"{num_bytes:.0f} B"


def dollars(value: float | None) -> str:
    """``$2.10``; a dash if the price is unknown."""
    if value is None or not isfinite(value):
        return "-"
    return f"${value:,.2f}" if value >= 0.1 else f"${number(value, 2)}"


def rate(value: float) -> str:
    """``12.3 requests/s``."""
    return f"{number(value)} requests/s"
