"""`pdserve profile` as a user runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.contracts.precision import Precision
from pdserve.deploy.cli import run
from pdserve.deploy.commands import profile
from pdserve.deploy.commands.profile import show
from pdserve.kernels.cpu.threads import use_threads
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.model.cost.profiling import MeasuredStep
from pdserve.model.cost.step_grid import GridLimits, step_grid
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.planner.cost_fit import TimedStep, fit_hardware
from pdserve.planner.hardware_file import read_hardware_file
from pdserve.planner.layout import PlannedModel

SHAPE = ModelShape(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    return write_random_checkpoint(path, hidden_size=32, intermediate_size=64, num_layers=2, max_position_embeddings=64)


@pytest.fixture
def _unpinned() -> Iterator[None]:
    """Measuring changes the number of kernel threads of this process; restore it."""
    yield
    use_threads(1)


@pytest.mark.usefixtures("_unpinned")
def test_a_profile_is_a_hardware_file_to_which_others_are_added(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, steps = tmp_path / "hardware.yaml", tmp_path / "steps.json"
    output.write_text("devices: {my-gpu: {base: h100}}")
    affinity = os.sched_getaffinity(0)
    arguments = ["profile", "--cores", "1", "--budget", "24", "--output", str(output), "--json", str(steps)]
    assert run([*arguments, "--model", str(folder / "config.json")]) == 0
    assert os.sched_getaffinity(0) == affinity
    devices = read_hardware_file(output)
    assert devices.keys() == {"my-gpu", "cpu-1"}
    measured = devices["cpu-1"].measured
    assert measured is not None
    assert measured.model == "small float32"
    assert measured.context_tokens[1] == 63
    assert measured.errors.keys() == {"prefill", "decode", "mixed"}
    (written,) = json.loads(steps.read_text())["profiles"]
    assert written["device"] == "cpu-1"
    assert {entry["num_layers"] for entry in written["steps"]} == {2, 1}
    printed = capsys.readouterr().out
    assert f"model: {{profile: {output}}}" in printed
    assert "row_overhead_s" in printed


@pytest.mark.usefixtures("_unpinned")
def test_a_budget_that_is_too_small_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "_MIN_STEPS", 1000)
    output = tmp_path / "hardware.yaml"
    assert run(["profile", "--model", str(folder), "--cores", "1", "--budget", "1", "--output", str(output)]) == 1
    assert "raise --budget, or profile a smaller model" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(("spread", "is_said"), [(0.02, False), (0.3, True)])
def test_a_busy_machine_is_said(spread: float, is_said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = PlannedModel(name="small", precision=Precision(dtype="float32"), shape=SHAPE)
    cost = CostModel(SHAPE, hardware("cpu"), Precision(dtype="float32"))
    steps = step_grid(GridLimits(max_model_len=512, max_batch_size=8, num_kv_blocks=1000))
    times_s = [cost.step_s(step.rows) for step in steps]
    fit = fit_hardware(
        hardware("cpu"),
        model,
        [TimedStep(step, seconds, 2) for step, seconds in zip(steps, times_s, strict=True)],
        date="2026-11-21",
        source="nothing",
    )
    measured = [
        MeasuredStep(step, 2, seconds, seconds, spread, 9) for step, seconds in zip(steps, times_s, strict=True)
    ]
    show(fit, measured, Console(width=120))
    assert ("something else ran here" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--model", "nowhere"], 1, "no model at nowhere; give --model a folder with config.json, or that config.json"),
        (["--cores", "4096"], 1, "--cores 4096: this machine has"),
        (["--dtype", "float8"], 2, "model.dtype is 'float8'; write one of"),
        (["--max-model-len", "65"], 1, "max_model_len 65 is outside 0..64"),
        (["--output", "damaged.yaml"], 1, "repair it, or name another --output"),
        (["--output", "no/where.yaml"], 1, "there is no folder no; make it"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged.yaml").write_text("devices: [")
    assert run(["profile", "--model", str(folder), *arguments]) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
