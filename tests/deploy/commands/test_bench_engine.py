"""`pdserve bench engine`: figures of a small model, the predictions beside them, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pdserve.contracts.precision import Precision
from pdserve.deploy.cli import app
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.model.weights.random_checkpoint import write_random_checkpoint

SMALL = ("--prompts", "8,24", "--batches", "1,2", "--output-tokens", "3", "--rounds", "1", "--requests", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), num_layers=1, max_position_embeddings=256)


def run(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["bench", "engine", "--model", str(folder), "--cores", "1", *options])


def figures(result: Result) -> dict[tuple[str, int, int], dict[str, Any]]:
    answer = json.loads(result.stdout.splitlines()[-1])
    return {(each["name"], each["batch"], each["prompt_tokens"]): each for each in answer["figures"]}


def test_every_figure_is_measured_and_predicted(folder: Path, tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    report = tmp_path / "engine.html"
    result = run(folder, *SMALL, "--dataset-name", "random", "--report", str(report), "--json")
    assert result.exit_code == 0, result.output
    assert os.sched_getaffinity(0) == cores
    found = figures(result)
    assert set(found) == {
        *(("TTFT", batch, length) for batch in (1, 2) for length in (8, 24)),
        *(("TPOT", batch, 24) for batch in (1, 2)),
        ("throughput", 2, 24),
        ("trace", 3, 24),
    }
    assert all(each["measured"] > 0 for each in found.values())
    cost = CostModel(DecoderConfig.from_folder(folder).shape, hardware("cpu", num_cores=1), Precision())
    steps_s = [cost.step_s([(24, 0)] * 2), cost.decode_s(2, 2 * 24), cost.decode_s(2, 2 * 25)]
    assert found["TTFT", 2, 24]["predicted"] == pytest.approx(steps_s[0])
    assert found["TPOT", 2, 24]["predicted"] == pytest.approx(sum(steps_s[1:]) / 2)
    assert found["throughput", 2, 24]["predicted"] == pytest.approx(2 * 3 / sum(steps_s))
    assert report.read_text().count("<svg") == 2


def test_cases_without_room_or_time_are_left_out(folder: Path) -> None:
    result = run(
        folder, "--prompts", "8,9999", "--batches", "1", "--output-tokens", "3", "--requests", "2", "--rounds", "1"
    )
    assert "left out: 1 x (9999 + 1) tokens: does not fit" in result.output
    slow = run(folder, *SMALL, "--budget", "1", "--rounds", "1000000")
    assert "raise --budget" in slow.output
    assert slow.exit_code == result.exit_code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prompts", "8,x"), "--prompts '8,x' is not a list of numbers above 0"),
        (("--batches", "0"), "--batches '0' is not a list of numbers above 0"),
        (("--dataset-name", "nothing"), "nothing"),
        (("--cores", "9999"), "usable cores; ask for fewer"),
        (("--hardware-file", "/nowhere"), "--hardware-file"),
        (("--model", "/nowhere"), "no model at /nowhere"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(folder: Path, options: tuple[str, str], said: str) -> None:
    result = run(folder, *SMALL, *options)
    assert result.exit_code != 0
    assert said in " ".join(f"{result.output}{result.exception}".replace("│", "").split())
