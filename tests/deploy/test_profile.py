"""`pdserve profile` as a user runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.deploy.cli import run
from pdserve.kernels.cpu_threads import use_threads
from pdserve.model.random_checkpoint import write_random_checkpoint
from pdserve.planner.hardware_file import read_hardware_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    return write_random_checkpoint(path, hidden_size=32, intermediate_size=64, num_layers=2, max_position_embeddings=64)


@pytest.fixture
def _unpinned() -> Iterator[None]:
    """Measuring gives the kernels of this process as many threads as were asked for."""
    yield
    use_threads(1)


@pytest.mark.usefixtures("_unpinned")
def test_a_profile_is_a_hardware_file_to_which_others_are_added(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, steps = tmp_path / "hardware.yaml", tmp_path / "steps.json"
    output.write_text("devices: {my-gpu: {base: h100}}")
    affinity = os.sched_getaffinity(0)
    arguments = ["profile", "--cores", "1", "--budget", "30", "--output", str(output), "--json", str(steps)]
    assert run([*arguments, "--model", str(folder / "config.json")]) == 0
    assert os.sched_getaffinity(0) == affinity
    devices = read_hardware_file(output)
    assert devices.keys() == {"my-gpu", "cpu-1"}
    measured = devices["cpu-1"].measured
    assert measured is not None
    assert measured.model == "small float32"
    assert measured.context_tokens[1] == 63
    assert measured.errors.keys() == {"prefill", "decode", "mixed"}
    (profile,) = json.loads(steps.read_text())["profiles"]
    assert profile["device"] == "cpu-1"
    assert {entry["num_layers"] for entry in profile["steps"]} == {2, 1}
    printed = capsys.readouterr().out
    assert f"model: {{profile: {output}}}" in printed
    assert "row_overhead_s" in printed


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--model", "nowhere"], 1, "no model at nowhere; give --model a folder with config.json, or that config.json"),
        (["--cores", "4096"], 1, "--cores 4096: this machine has"),
        (["--dtype", "float8"], 2, "model.dtype is 'float8'; write one of"),
        (["--max-model-len", "65"], 1, "max_model_len 65 is outside 0..64"),
        (["--output", "damaged.yaml"], 1, "repair it, or name another --output"),
        (["--output", "no/where.yaml"], 1, "there is no folder no; make it"),
        (["--budget", "1", "--cores", "1", "--cores", "2"], 1, "raise --budget, or profile a smaller model"),
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
