"""``scripts/measure_code``, run as a command on a tree of a few lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_code"
SOURCE = '''"""A module
of two lines."""

# a comment
from typing import Protocol

class Load(Protocol):  # not a comment line
    """Documented."""

    def take(self) -> int:
        return 1
'''


def test_a_tree_is_counted_room_by_room_with_sub_rooms(tmp_path: Path) -> None:
    for name in ("router", "router/http", "deploy", "deploy/commands", "proto", "proto/v1", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    for name in ("router/http/load.py", "deploy/commands/plan.py", "proto/v1/stubs_pb2.py", "tests/test_load.py"):
        (tmp_path / name).write_text(SOURCE)
    output = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=True).stdout
    rows = {line[:16].strip(): line[16:].split() for line in output.splitlines() if line[16:].split()[0].isdigit()}
    counted = ["4", "3", "1"]  # code, docstring, comment
    assert rows["router"] == [*counted, "3", "1", "1", "1", "2", "2"]
    assert rows["deploy"][:3] == counted
    assert rows["proto"][0] == "0"
    assert rows["all"][:3] == ["8", "6", "2"]
    assert rows["serving path"][:3] == counted
    assert "classes named for a load: 1 (Load)" in output
    assert "lines of tests for each line of source: 0.50" in output
