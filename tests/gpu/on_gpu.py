"""Runs test files on a GPU, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_VARIABLE = "PDSERVE_TESTS_ON_GPU"
IS_ON_GPU = os.environ.get(_VARIABLE) == "1"
"""Whether this is such a process."""

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_on_gpu.py")
"""Of tests that run so."""
DEADLINE_S = 480.0
"""A kernel that does not come back must not take all the time there is."""
_OPTIONS = ("-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=")


def failures(path: Path, deselected: Sequence[str] = ()) -> str:
    """What pytest says of a file some of whose tests failed, empty where all passed.

    Args:
        deselected: names of tests that are left out.
    """
    command = [sys.executable, "-m", "pytest", *_OPTIONS, str(path.relative_to(ROOT))]
    command += [f"--deselect={path.relative_to(ROOT)}::{name}" for name in deselected]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, _VARIABLE: "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return f"{output}\nnot done in {DEADLINE_S} s"
    return "" if process.returncode == 0 else f"{output}\nexit status {process.returncode}"
