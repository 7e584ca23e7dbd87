from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.bench.kernels.contest import Case
from pdserve.bench.kernels.report import Report
from pdserve.bench.kernels.run import (
    NoGpuError,
    Request,
    commit,
    limits_of,
    measure_all,
    measured_limits,
    publish,
    run,
    write,
)
from tests.bench.kernels.fake_timer import FakeTimer
from tests.bench.kernels.scripted_case import ScriptedCase, fails, gives

MACHINE: dict[str, Any] = {
    "measured": "2026-11-21T10:00:00+00:00",
    "device": "GPU",
    "hardware": "h200",
    "commit": "abc",
}


def report_of(*cases: Case) -> Report:
    report, device = Report(MACHINE, [], {}, {}), torch.device("cpu")
    list(measure_all(list(cases), device, FakeTimer(), Request(), limits=limits_of("h200"), report=report))
    return report


def test_a_kernel_that_fails_does_not_stop_the_others() -> None:
    broken = ScriptedCase(shape="broken", own=lambda: fails(RuntimeError("out of memory\nmore")))
    report = report_of(broken, ScriptedCase(shape="good"))
    assert [result.shape for result in report.results] == ["good"]
    assert report.failures == {"scripted: broken": "out of memory"}


def test_a_device_that_is_lost_ends_it() -> None:
    lost = ScriptedCase(shape="lost", own=lambda: fails(torch.AcceleratorError("CUDA error: illegal address")))
    report = report_of(ScriptedCase(shape="before"), lost, ScriptedCase(shape="after"))
    assert [result.shape for result in report.results] == ["before"]
    assert report.failures == {"scripted: lost": "CUDA error: illegal address"}


def test_a_dated_file_is_written(tmp_path: Path) -> None:
    file = write(report_of(ScriptedCase()), Request(only="scripted", folder=tmp_path))
    assert file == tmp_path / "2026-11-21_kernels_scripted_h200.json"
    document = json.loads(file.read_text())
    assert document["results"][0]["shape"] == "2 x 3"
    assert document["commit"] == "abc"


def test_tables_or_json_are_printed() -> None:
    printed: list[str] = []
    assert publish(report_of(ScriptedCase()), Request(), printed.append) == 0
    assert printed[0].startswith("scripted on GPU")
    publish(report_of(ScriptedCase()), Request(as_json=True), printed.append)
    assert json.loads(printed[-1])["device"] == "GPU"


@pytest.mark.parametrize(
    "case",
    [
        ScriptedCase(peers={"peer": lambda: gives(7.0, 7.0)}),
        ScriptedCase(own=lambda: fails(RuntimeError("broken"))),
    ],
)
def test_failures_and_differences_are_in_the_status(case: ScriptedCase) -> None:
    assert publish(report_of(case), Request(), lambda line: None) == 1


def test_limits_are_the_data_sheets() -> None:
    assert limits_of("h100-sxm") == (989e12, 3.35e12, 64e9)
    with pytest.raises(ValueError, match="unknown hardware 'h300'"):
        limits_of("h300")


def test_without_a_gpu_there_is_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoGpuError, match="--compile-only"):
        run(Request(), lambda line: None)


def test_the_machine_is_measured_by_large_products_and_copies() -> None:
    told = measured_limits(torch.device("cpu"), FakeTimer(iter([1e-3, 1e-6])), size=100)
    assert told == {"torch_matmul_tflops": pytest.approx(2e-3), "torch_copy_gbytes_per_s": pytest.approx(160.0)}


def test_a_run_from_the_gpu_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what needs a GPU there is only the outside."""
    where = "pdserve.bench.kernels.run"
    monkeypatch.setattr(f"{where}.cuda_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(f"{where}.CudaTimer", lambda device: FakeTimer())
    monkeypatch.setattr(f"{where}.measured_limits", lambda device, timer: {"torch_matmul_tflops": 700.0})
    monkeypatch.setattr(f"{where}.chosen_cases", lambda only, quick: [ScriptedCase(), ScriptedCase(kernel="other")])
    written: list[int] = []

    def write_and_count(report: Report, request: Request) -> Path:
        written.append(len(report.results))
        return write(report, request)

    monkeypatch.setattr(f"{where}.write", write_and_count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    printed: list[str] = []
    assert run(Request(folder=tmp_path, as_json=True), printed.append) == 0
    document = json.loads(printed[0])
    assert (document["device"], document["hardware"]) == ("NVIDIA H100 80GB HBM3", "h100-sxm")
    assert document["torch_matmul_tflops"] == 700
    assert document["torch"] == torch.__version__
    # 1.8 MB at 0.9 of 3.35 TB/s, in the microsecond that the timer says.
    assert document["results"][0]["limit_share"] == pytest.approx(1800e3 / (0.9 * 3.35e12) / 1e-6)
    assert written == [1, 2]  # After each kernel, so that what was measured is kept.
    assert json.loads(next(tmp_path.glob("*_kernels_h100-sxm.json")).read_text()) == document


def test_pictures_are_not_found_impossible_after_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.bench.kernels.run.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="need matplotlib"):
        run(Request(with_plot=True), lambda line: None)


def test_names_are_checked_before_anything_is_compiled() -> None:
    with pytest.raises(ValueError, match="no launch is named 'gaze'"):
        run(Request(compile_only=True, only="gaze"), lambda line: None)


def test_results_name_their_commit() -> None:
    assert commit()
