"""Common parts of the measurement scripts: arguments, and a result with its date, commit and machine.

Tables and progress go to standard error, the result to standard output and, with ``--json``, to a file.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Echo = Callable[[str], None]


def script_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    return parser


def csv_records(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a table whose first lines may be comments."""
    with path.open(encoding="utf-8") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def show_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], echo: Echo = log) -> None:
    """Print a table whose columns but the first are aligned to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    echo(title)
    for first, *others in lines:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        echo("  ".join((f"{first:<{widths[0]}}", *cells)))


def commit() -> str:
    """Commit of the running code, if git knows it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


def publish(result: Mapping[str, Any], file: Path | None, *, unshown: Collection[str] = ()) -> None:
    """Write a result with its origin.

    Args:
        unshown: long parts that only the file gets.
    """
    document = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
        },
        **result,
    }
    if file is not None:
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    shown = {name: value for name, value in document.items() if name not in unshown}
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")
