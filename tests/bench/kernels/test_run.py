from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.bench.kernels.case import Case
from pdserve.bench.kernels.measure import Result, measure
from pdserve.bench.kernels.report import NoGpuError, limits_of, write_dated
from pdserve.bench.kernels.run import measure_all, run
from tests.bench.kernels.scripted_case import fails, fake_timer, gives, scripted_case


def measured(folder: Path, *cases: Case) -> tuple[list[Result], dict[str, Any]]:
    document: dict[str, Any] = {"measured": "2026-11-21T10:00", "hardware": "h200", "clocks": {}, "failures": {}}
    measure_one = partial(measure, timer=fake_timer(), limits=limits_of("h200"), num_rounds=3)
    write = partial(write_dated, document, folder, "kernels", document["hardware"])
    return measure_all(list(cases), torch.device("cpu"), measure_one, document, write), document


def test_a_kernel_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = scripted_case(shape="broken", own=lambda: fails(RuntimeError("out of memory\nmore")))
    results, document = measured(tmp_path, broken, scripted_case(shape="good"))
    assert [result.case.shape for result in results] == ["good"]
    assert document["failures"] == {"scripted: broken": "out of memory"}
    assert json.loads((tmp_path / "2026-11-21_kernels_h200.json").read_text()) == document


def test_a_lost_device_ends_it(tmp_path: Path) -> None:
    lost = scripted_case(shape="lost", own=lambda: fails(torch.AcceleratorError("CUDA error: illegal address")))
    cases = (scripted_case(shape="before"), lost, scripted_case(shape="after"), scripted_case(kernel="other"))
    results, document = measured(tmp_path, *cases)
    assert [result.case.shape for result in results] == ["before"]
    assert document["failures"] == {"scripted: lost": "CUDA error: illegal address"}
    assert len(json.loads((tmp_path / "2026-11-21_kernels_h200.json").read_text())["results"]) == 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of which only the name is there."""
    where = "pdserve.bench.kernels.run"
    monkeypatch.setattr(f"{where}.cuda_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(f"{where}.gpu_timer", fake_timer())
    monkeypatch.setattr(
        f"{where}.measured_limits", lambda *_: {"torch_matmul_tflops": 700.0, "torch_copy_gbytes_per_s": 3e3}
    )
    monkeypatch.setattr("pdserve.bench.kernels.report.platform.machine", lambda: "NVIDIA H100 80GB HBM3")
    return monkeypatch


def test_a_run_from_the_gpu_to_the_file(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    cases = [scripted_case(), scripted_case(kernel="other")]
    gpu.setattr("pdserve.bench.kernels.run.chosen_cases", lambda only, quick: cases)
    printed: list[str] = []
    assert run(printed.append, folder=tmp_path, as_json=True, hardware="h100-sxm") == 0
    document = json.loads(printed[0])
    assert (document["device"], document["hardware"]) == ("NVIDIA H100 80GB HBM3", "h100-sxm")
    assert document["torch_matmul_tflops"] == 700
    assert document["torch"] == torch.__version__
    # 1.8 MB at 0.9 of 3.35 TB/s, in the microsecond of the timer.
    assert document["results"][0]["limit_share"] == pytest.approx(1800e3 / (0.9 * 3.35e12) / 1e-6)
    assert json.loads(next(tmp_path.glob("*_kernels_h100-sxm.json")).read_text()) == document
    run(printed.append, folder=tmp_path, hardware="h100-sxm")
    assert printed[2].startswith("scripted on NVIDIA H100")


@pytest.mark.parametrize(
    "case",
    [
        scripted_case(peer=lambda: gives(7.0, 7.0)),
        scripted_case(own=lambda: fails(RuntimeError("broken"))),
    ],
)
def test_failures_and_differences_are_in_the_status(case: Case, tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr("pdserve.bench.kernels.run.chosen_cases", lambda only, quick: [case])
    assert run(lambda line: None, folder=tmp_path, hardware="h100-sxm", as_json=True) == 1


def test_the_remedy_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoGpuError, match="--compile-only"):
        run(lambda line: None)


def test_names_are_checked_before_compiling() -> None:
    with pytest.raises(ValueError, match="no launch is named 'gaze'"):
        run(lambda line: None, compile_only=True, only="gaze")
    with pytest.raises(ValueError, match="not compiled for capability 75: use one of 80, 86, 89, 90, 100, 120"):
        run(lambda line: None, compile_only=True, capability=75)
