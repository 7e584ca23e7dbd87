"""Reads a trace file of any supported format, recognised by its content, never by its name.

Called by the CLI. The formats are those of `pdserve.planner.workload.trace_lines` and
`pdserve.planner.workload.trace_sharegpt`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from pdserve.planner.workload.trace import Trace
from pdserve.planner.workload.trace_lines import (
    AZURE_FIELDS,
    BURSTGPT_FIELDS,
    MOONCAKE_FIELDS,
    PLAIN_FIELDS,
    read_azure,
    read_burstgpt,
    read_mooncake,
    read_plain,
)
from pdserve.planner.workload.trace_sharegpt import read_sharegpt

_MAX_FIRST_LINE_CHARACTERS = 1 << 22


class TraceFormat(Enum):
    """Supported trace formats."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    SHAREGPT = "sharegpt"
    PLAIN = "plain"


_FIELDS = {
    TraceFormat.MOONCAKE: MOONCAKE_FIELDS,
    TraceFormat.AZURE: AZURE_FIELDS,
    TraceFormat.BURSTGPT: BURSTGPT_FIELDS,
    TraceFormat.PLAIN: PLAIN_FIELDS,
}


def recognise(path: Path) -> TraceFormat:
    """The format of a file, from its first line.

    Raises:
        ValueError: the format is unknown.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        line = next((line for line in iter(lambda: file.readline(_MAX_FIRST_LINE_CHARACTERS), "") if line.strip()), "")
    line = line.strip()
    if line.startswith("["):
        return TraceFormat.SHAREGPT
    names = _names(line)
    for trace_format, fields in _FIELDS.items():
        if names.issuperset(fields):
            return trace_format
    known = "; ".join(f"{each.value} ({', '.join(fields)})" for each, fields in _FIELDS.items())
    raise ValueError(
        f"{path}:1: no known trace begins with {line[:80]!r}: use {known}; or sharegpt (a JSON array of conversations)"
    )


def _names(line: str) -> set[str]:
    """Names of the fields of a JSON object or of the columns of a CSV header."""
    if not line.startswith("{"):
        return {name.strip() for name in next(csv.reader([line]), [])}
    try:
        return set(json.loads(line))
    except (ValueError, RecursionError):
        return set()


def read_trace(
    path: Path,
    *,
    lenient: bool = False,
    num_tokens: Callable[[str], int] | None = None,
    multi_turn: bool = False,
) -> Trace:
    """The trace in a file of any supported format.

    Args:
        lenient: skip lines that cannot be read, and count them.
        num_tokens: counts the tokens of a text, for files with texts; estimated from its characters by default.
        multi_turn: keep the later turns of conversations, if the file has them.

    Raises:
        ValueError: the format is unknown, a line is malformed (the message names file and line), or no request is left.
        OSError: the file cannot be read.
    """
    match recognise(path):
        case TraceFormat.MOONCAKE:
            return read_mooncake(path, lenient=lenient)
        case TraceFormat.AZURE:
            return read_azure(path, lenient=lenient)
        case TraceFormat.BURSTGPT:
            return read_burstgpt(path, lenient=lenient)
        case TraceFormat.PLAIN:
            return read_plain(path, lenient=lenient)
        case TraceFormat.SHAREGPT:
            return read_sharegpt(path, num_tokens=num_tokens, multi_turn=multi_turn, lenient=lenient)
