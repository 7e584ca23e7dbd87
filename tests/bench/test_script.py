from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.bench.script import commit, publish, script_parser


def test_a_result_names_its_origin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    publish({"rate": 3.5, "samples": [1, 2]}, file, unshown=["samples"])
    written, shown = json.loads(file.read_text()), json.loads(capsys.readouterr().out)
    assert (written["rate"], written["samples"], written["commit"]) == (3.5, [1, 2], commit())
    assert {"measured", "machine"} <= written.keys()
    assert written.keys() - shown.keys() == {"samples"}


def test_a_file_is_optional(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = script_parser("Text.").parse_args([])
    publish({"rate": 1}, arguments.json)
    assert json.loads(capsys.readouterr().out)["rate"] == 1
    assert script_parser(None).parse_args(["--json", "x"]).json == Path("x")


def test_the_commit_is_known() -> None:
    assert commit()
