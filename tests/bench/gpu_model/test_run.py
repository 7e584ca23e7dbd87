from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pdserve.bench.gpu_model.run import Request, run
from pdserve.bench.kernels.run import NoGpuError


def test_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    printed: list[str] = []
    assert run(Request(device="cpu", folder=tmp_path), printed.append) == 0
    document = json.loads(next(tmp_path.glob("*_gpu_model_cpu.json")).read_text())
    assert document["torch"] == torch.__version__
    assert not document["failures"]
    told = [(row["engine"], row["phase"], row["num_rows"]) for row in document["rows"]]
    ours = [("pdserve", "decode", 1), ("pdserve", "decode", 3), ("pdserve", "prefill", 1)]
    theirs = [("transformers", "prefill", 1), ("transformers", "decode", 1), ("transformers", "decode", 3)]
    assert told == [*ours, ("pdserve", "handoff", 1), *theirs]
    assert "greedy answers to one prompt: the first 8 of 8 tokens are the same" in document["notes"]
    assert printed[1] == "decode, a step"


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib, of the bench extra")
def test_a_picture_of_a_part(tmp_path: Path) -> None:
    run(Request(device="cpu", folder=tmp_path, only="decode", with_plot=True), lambda line: None)
    assert next(tmp_path.glob("*.png")).stat().st_size > 10_000


@pytest.mark.parametrize("only", ["decode", "handoff"])
def test_a_part_of_it_with_quantised_ones(tmp_path: Path, only: str) -> None:
    run(Request(device="cpu", folder=tmp_path, only=only, quantised=only == "decode"), lambda line: None)
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert {row["phase"] for row in rows} == {only}
    assert len({row["held"] for row in rows}) == (5 if only == "decode" else 1)


def test_without_a_gpu_there_is_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoGpuError, match="--device cpu"):
        run(Request(), lambda line: None)


def test_mistakes_are_found_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no part 'peers': use one of decode, prefill, handoff, peer"):
        run(Request(only="peers"), lambda line: None)
    monkeypatch.setattr("pdserve.bench.gpu_model.run.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="need matplotlib"):
        run(Request(with_plot=True), lambda line: None)
