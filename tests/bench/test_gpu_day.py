"""The parts of a GPU day: their limits, thresholds and page; the machine and a tiny model run, as in the dry run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from pdserve.bench.gpu_day import PARTS, Check, Part, kernel_checks, model_checks, run_all, run_part

ROOT = Path(__file__).parents[2]


def part(name: str, code: str, *, limit_s: float = 60, is_needed: bool = False) -> Part:
    return Part(name, f"Does {name} run?", limit_s, ("-c", code), ("-c", "pass"), is_needed=is_needed)


def run(parts: list[Part], out: Path, seconds: float = 120) -> list[str]:
    return [outcome.verdict for outcome in run_all(parts, out, seconds, is_dry=False, echo=lambda line: None)]


def test_a_part_that_fails_leaves_its_log_and_the_next_ones_run(tmp_path: Path) -> None:
    assert run([part("one", "raise SystemExit('broken')"), part("two", "print('here')")], tmp_path) == [
        "failed",
        "passed",
    ]
    assert (tmp_path / "one.log").read_text() == "broken\n"
    document = json.loads((tmp_path / "gpu_day.json").read_text())
    assert [(each["name"], each["verdict"], each["is_good"]) for each in document["parts"]] == [
        ("one", "failed", False),
        ("two", "passed", True),
    ]
    assert "- Does one run? one: **failed**" in (tmp_path / "gpu_day.md").read_text()


def test_nothing_runs_where_the_machine_lacks_something(tmp_path: Path) -> None:
    parts = [part("machine", "import no_such_module", is_needed=True), part("two", "pass")]
    assert run(parts, tmp_path) == ["failed", "left out"]


def test_a_part_without_time_is_left_out(tmp_path: Path) -> None:
    assert run([part("one", "pass")], tmp_path, seconds=5) == ["left out"]


def test_a_part_out_of_time_ends_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    started_s = monotonic()
    outcome = run_part(part("slow", child), tmp_path, 2.0, is_dry=False)
    assert outcome.verdict == "out of time"
    assert not outcome.is_good
    assert monotonic() - started_s < 30


@pytest.mark.parametrize(("value", "is_passed"), [(0.84, False), (0.85, True)])
def test_thresholds_of_a_model(value: float, is_passed: bool, tmp_path: Path) -> None:
    row = {"phase": "decode", "num_rows": 64, "context_tokens": 2048, "limit_share": value, "host_s": 1, "device_s": 2}
    document = {
        "torch_copy_gbytes_per_s": 3000, "torch_matmul_tflops": 720, "failures": [],
        "rows": [row, {**row, "phase": "handoff", "host_s": None}],
    }  # fmt: skip
    (tmp_path / "2026-11-27_gpu_model_quick_h100-sxm.json").write_text(json.dumps(document))
    checks = model_checks(tmp_path)
    assert [check.what for check in checks if not check.is_passed] == (
        ["decode 64 x 2048, share of the limit"] * (not is_passed)
    )
    assert (
        str(checks[3]) == f"{'ok  ' if is_passed else 'MISS'} decode 64 x 2048, share of the limit: {value} (>= 0.85)"
    )


def test_a_kernel_that_failed_misses_a_threshold(tmp_path: Path) -> None:
    (tmp_path / "2026-11-27_kernels_h100-sxm.json").write_text(json.dumps({"failures": {"gate": "lost"}}))
    assert kernel_checks(tmp_path) == [Check("kernels that failed", 1, most=0)]
    assert not kernel_checks(tmp_path)[0].is_passed


def test_what_the_parts_run_is_here() -> None:
    arguments = {argument for each in PARTS for argument in (*each.arguments, *each.dry_arguments)}
    files = {argument for argument in arguments if argument.startswith("tests/")}
    assert len(files) == 5
    assert all((ROOT / file).is_file() for file in files)
    assert sum(each.limit_s for each in PARTS) <= 30 * 60
    assert all(each.limit_s < 600 for each in PARTS)


def test_a_dry_run(tmp_path: Path) -> None:
    dry = [sys.executable, "-m", "pdserve.bench.gpu_day", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(
        [*dry, "--only", "machine", "model-speed"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model-speed: **passed**" in done.stdout
    (results,) = tmp_path.glob("*_gpu_model_*.json")
    assert json.loads(results.read_text())["rows"]
