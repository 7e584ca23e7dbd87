from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.bench.kernels.case import Case, Work
from pdserve.bench.kernels.measure import Result
from pdserve.bench.kernels.report import limits_of, measured_limits, show_kernels, write_dated
from tests.bench.kernels.scripted_case import fake_timer

DOCUMENT: dict[str, Any] = {
    "measured": "2026-11-21T10:00:00+00:00",
    "device": "GPU",
    "hardware": "h100-sxm",
    "commit": "abc",
    "clocks": {},
    "failures": {},
}


def result(kernel: str, shape: str, **seconds: float) -> Result:
    """One GB and one TFLOP, for which the formula allows 1 ms."""
    return Result(
        case=Case(kernel, shape, Work(1e9, flops=1e12), lambda device: {}, 0.01),
        limit_s=1e-3,
        seconds=seconds,
        differences={name: 0.0 for name in seconds if name != "pdserve"},
        absent={"cudnn": "no kernel"} | ({} if "flash" in seconds else {"flash": "rows differ"}),
    )


def shown(results: list[Result], **changes: Any) -> list[str]:
    lines: list[str] = []
    show_kernels({**DOCUMENT, **changes}, results, lines.append)
    return lines


def test_a_table_for_each_kernel_with_its_peers() -> None:
    results = [
        result("decode", "1 x 16384", pdserve=2e-3, flash=3e-3),
        result("decode", "mixed", pdserve=4e-3),
        result("gate", "64", pdserve=1e-3, torch=1.5e-3, flash=2e-3),
    ]
    assert shown(results, clocks={"decode": {"clocks.sm": "1980 MHz"}}) == [
        "decode on GPU (clocks.sm 1980 MHz)",
        "shape          us  TFLOP/s  GB/s  % of limit  flash",
        "1 x 16384  2000.0    500.0   500         50%  1.50x",
        "mixed      4000.0    250.0   250         25%      -",
        "  cudnn is absent: no kernel",
        "  flash is absent: rows differ (mixed)",
        "gate on GPU (clocks unknown)",
        "shape      us  TFLOP/s  GB/s  % of limit  torch  flash",
        "64     1000.0   1000.0  1000        100%  1.50x  2.00x",
        "  cudnn is absent: no kernel",
    ]


def test_the_speed_of_the_device_comes_first() -> None:
    lines = shown([], torch_matmul_tflops=712.3, torch_copy_gbytes_per_s=3021.9)
    assert lines == ["GPU: torch's large product 712 TFLOP/s, its large copy 3022 GB/s"]


def test_failures_and_differences_are_shown() -> None:
    odd = result("gate", "64", pdserve=1e-3, torch=1e-3)
    odd.differences["torch"] = 0.5
    lines = shown([odd], hardware=None, failures={"norm: 3": "out of memory"})
    assert lines[0] == "GPU is not in the catalogue, so there are no limits: name one like it with --hardware"
    assert any("1.00x !" in line for line in lines)
    assert "  ! torch differs for 64: by 0.5 of the largest value" in lines
    assert lines[-1] == "FAILED: norm: 3: out of memory"


def test_files_are_named_by_date_and_part(tmp_path: Path) -> None:
    assert write_dated(DOCUMENT, tmp_path, "kernels", "", "h200").name == "2026-11-21_kernels_h200.json"
    assert write_dated(DOCUMENT, tmp_path, "kernels", "gate", None).name == "2026-11-21_kernels_gate.json"


def test_limits_are_the_data_sheets() -> None:
    assert limits_of("h100-sxm") == (989e12, 3.35e12)
    with pytest.raises(ValueError, match="unknown hardware 'h300'"):
        limits_of("h300")


def test_the_machine_is_measured_by_large_products_and_copies() -> None:
    measured = measured_limits(torch.device("cpu"), fake_timer(iter([1e-3, 1e-6])), size=100)
    assert measured == {"torch_matmul_tflops": pytest.approx(2e-3), "torch_copy_gbytes_per_s": pytest.approx(160.0)}
