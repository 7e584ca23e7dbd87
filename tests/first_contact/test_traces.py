"""Traces as users have them, through `pdserve simulate`. A case is a file in ``traces/``, with what is right beside it:
the options to add, and either what the error says, or the requests, their prompt tokens and what the answer says."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from pdserve.deploy.cli import run
from pdserve.model.weights.demo_model import DEMO_MODEL
from tests.planner.test_planned_model import written

FOLDER = Path(__file__).parent / "traces"
CASES = [
    pytest.param(file.with_suffix(".jsonl"), case, id=" ".join((file.stem, *case["options"])))
    for file in sorted(FOLDER.glob("*.json"))
    for case in json.loads(file.read_text())
]


def test_every_trace_has_what_is_right_beside_it() -> None:
    assert {file.stem for file in FOLDER.glob("*.jsonl")} == {file.stem for file in FOLDER.glob("*.json")}


@pytest.mark.parametrize(("trace", "case"), CASES)
def test_a_trace_is_read_or_one_line_says_why_not(
    trace: Path, case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "Llama-3-8B")
    tokenized = shutil.copytree(folder, tmp_path / "tokenized")
    shutil.copy(DEMO_MODEL / "tokenizer.json", tokenized)
    options = [str(tokenized) if option == "TOKENIZED" else option for option in case["options"]]
    status = run(["simulate", "--gpu", "h100", "--model", str(folder), "--trace", str(trace), "--json", "-", *options])
    captured = capsys.readouterr()
    if "refused" in case:
        assert status in (1, 2)
        assert case["refused"] in captured.err
        assert captured.err.count("\n") == 1
        return
    assert status == 0, captured.err
    result = json.loads(captured.out)
    assert (result["completed"], result["total_input_tokens"]) == (case["requests"], case["prompt_tokens"])
    assert case["says"] in " ".join((result["traffic"], *result["notes"]))


def test_a_trace_may_come_through_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, trace = tmp_path / "pipe", FOLDER / "array.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(trace.read_bytes(),), daemon=True)
    writer.start()
    model = str(written(tmp_path / "Llama-3-8B"))
    assert run(["simulate", "--gpu", "h100", "--model", model, "--trace", str(pipe), "--json", "-"]) == 0
    writer.join()
    [case] = json.loads(trace.with_suffix(".json").read_text())
    assert json.loads(capsys.readouterr().out)["completed"] == case["requests"]
