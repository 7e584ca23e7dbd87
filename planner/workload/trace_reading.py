"""Reads a trace file of any supported format, recognised by its content, never by its name.

Called by the CLI. The formats are those of `pdserve.planner.workload.trace_lines` and
`pdserve.planner.workload.trace_sharegpt`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from pdserve.planner.workload import trace_lines as lines
from pdserve.planner.workload.sessions import in_sessions
from pdserve.planner.workload.trace import Trace
from pdserve.planner.workload.trace_sharegpt import CONVERSATIONS, read_sharegpt

_MAX_FIRST_LINE_CHARACTERS = 1 << 22
_OF_LINES: dict[str, tuple[lines.Fields, Callable[..., Trace]]] = {
    "mooncake": (lines.MOONCAKE_FIELDS, lines.read_mooncake),
    "azure": (lines.AZURE_FIELDS, lines.read_azure),
    "burstgpt": (lines.BURSTGPT_FIELDS, lines.read_burstgpt),
    "plain": (lines.PLAIN_FIELDS, lines.read_plain),
}
"""Formats with a request per line: the fields that they are known by, and their readers."""


def recognise(path: Path) -> str:
    """The format of a file, from its first line: ``sharegpt``, or one of the formats with a request per line.

    Raises:
        ValueError: the format is unknown.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        line = next((line for line in iter(lambda: file.readline(_MAX_FIRST_LINE_CHARACTERS), "") if line.strip()), "")
    line = line.strip()
    if "\0" in line or "\ufffd" in line:
        raise ValueError(f"{path} is no text in UTF-8: unpack it if it is compressed, or save it as UTF-8")
    names = _names(_first_object(path)) if line.startswith("[") else _names(line)
    if line.startswith("[") and not names & {"arrived_s", "input_length", "text_input"}:
        return "sharegpt"
    if line.startswith(("{", "[")) and {"input_length", "text_input"} & names and "output_length" in names:
        return "mooncake"
    for name, (fields, _) in _OF_LINES.items():
        if names.issuperset(fields) and name != "mooncake":
            return name
    if line.startswith("{") and names & set(CONVERSATIONS):
        return "sharegpt"
    found = f"no known trace begins with {line[:80]!r}" if line else "the file is empty"
    known = "; ".join(f"{name} ({', '.join(fields)})" for name, (fields, _) in _OF_LINES.items())
    raise ValueError(
        f"{path}:1: {found}: use {known}; or sharegpt (a JSON array of "
        "conversations); mooncake is JSON, an object in each line"
    )


def _first_object(path: Path) -> str:
    """First object of an array, as JSON; empty if it has none or cannot be read."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        text = file.read(_MAX_FIRST_LINE_CHARACTERS).strip().removeprefix("[").lstrip()
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return ""


def _names(line: str) -> set[str]:
    """Names of the fields of a JSON object or of the columns of a CSV header."""
    if not line.startswith("{"):
        return {name.strip() for name in next(csv.reader([line], delimiter=lines.delimiter_of(line)), [])}
    try:
        return set(json.loads(line))
    except (ValueError, RecursionError):
        return set()


def read_trace(
    path: Path,
    *,
    lenient: bool = False,
    time_unit: lines.TimeUnit = "auto",
    tokenizer: Path | None = None,
    sessions: bool = False,
) -> Trace:
    """The trace in a file of any supported format.

    Args:
        lenient: skip lines that cannot be read, and count them.
        time_unit: ``s``, ``ms`` or ``auto``, of Mooncake's times; those of other formats have one unit.
        tokenizer: the model's tokenizer.json, for Mooncake's ``text_input``.
        sessions: requests that go on from earlier ones wait for their answers (`in_sessions`).

    Raises:
        ValueError: the format is unknown, a line is malformed (the message names file and line), or no request is left.
        OSError: the file cannot be read.
    """
    if path.is_fifo() or path.is_char_device():  # what comes through a pipe can be read once
        with TemporaryDirectory() as folder:
            copy = Path(folder, path.name)
            copy.write_bytes(path.read_bytes())
            try:
                return read_trace(copy, lenient=lenient, time_unit=time_unit, tokenizer=tokenizer, sessions=sessions)
            except ValueError as error:
                raise ValueError(str(error).replace(str(copy), str(path))) from error
    trace = _read(path, lenient, time_unit, tokenizer)
    return in_sessions(trace) if sessions else trace


def _read(path: Path, lenient: bool, time_unit: lines.TimeUnit, tokenizer: Path | None) -> Trace:
    name = recognise(path)
    if name == "mooncake":
        return lines.read_mooncake(path, lenient=lenient, time_unit=time_unit, tokenizer=tokenizer)
    if time_unit != "auto":
        raise ValueError(f"{path}: the times of a {name} trace have one unit: leave out --trace-time-unit")
    return read_sharegpt(path, lenient=lenient) if name == "sharegpt" else _OF_LINES[name][1](path, lenient=lenient)
