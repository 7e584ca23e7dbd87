from __future__ import annotations

import json

import pytest

from pdserve.bench.kernels.measure import Result
from pdserve.bench.kernels.report import Report

MACHINE = {"measured": "2026-11-21T10:00:00+00:00", "device": "GPU", "hardware": "h100-sxm", "commit": "abc"}


def result(kernel: str, shape: str, **seconds: float) -> Result:
    """Of one GB and one TFLOP, for which 1 ms is allowed."""
    return Result(
        kernel=kernel,
        shape=shape,
        num_bytes=1e9,
        flops=1e12,
        limit_s=1e-3,
        seconds=seconds,
        differences={name: 0.0 for name in seconds if name != "pdserve"},
        tolerance=0.01,
        absent={"fa3": "names no library"} | ({} if "flex" in seconds else {"flex": "rows differ"}),
    )


def shown(report: Report) -> list[str]:
    lines: list[str] = []
    report.show(lines.append)
    return lines


def test_a_table_for_each_kernel_with_its_peers() -> None:
    results = [
        result("decode", "1 x 16384", pdserve=2e-3, flex=3e-3),
        result("decode", "mixed", pdserve=4e-3),
        result("gate", "64", pdserve=1e-3, torch=1.5e-3, flex=2e-3),
    ]
    lines = shown(Report(MACHINE, results, {"decode": {"clocks.sm": "1980 MHz"}}, {}))
    assert lines == [
        "decode on GPU (clocks.sm 1980 MHz)",
        "shape          us  TFLOP/s  GB/s  % of limit   flex",
        "1 x 16384  2000.0    500.0   500         50%  1.50x",
        "mixed      4000.0    250.0   250         25%      -",
        "  fa3 is absent: names no library",
        "  flex is absent: rows differ (mixed)",
        "gate on GPU (clocks unknown)",
        "shape      us  TFLOP/s  GB/s  % of limit  torch   flex",
        "64     1000.0   1000.0  1000        100%  1.50x  2.00x",
        "  fa3 is absent: names no library",
    ]


def test_what_the_device_itself_reaches_comes_first() -> None:
    machine = {**MACHINE, "torch_matmul_tflops": 712.3, "torch_copy_gbytes_per_s": 3021.9}
    lines = shown(Report(machine, [], {}, {}))
    assert lines == ["GPU: torch's large product 712 TFLOP/s, its large copy 3022 GB/s"]


def test_what_is_wrong_is_said() -> None:
    odd = result("gate", "64", pdserve=1e-3, torch=1e-3)
    odd.differences["torch"] = 0.5
    lines = shown(Report({**MACHINE, "hardware": None}, [odd], {}, {"norm: 3": "out of memory"}))
    assert lines[0] == "GPU is not in the catalogue, so there are no limits: name one like it with --hardware"
    assert any("1.00x !" in line for line in lines)
    assert "  ! torch computes something else for 64: 0.5 of the largest value" in lines
    assert lines[-1] == "FAILED: norm: 3: out of memory"


def test_all_of_it_is_in_the_document() -> None:
    report = Report(MACHINE, [result("gate", "64", pdserve=1e-3, torch=2e-3)], {"gate": {"a": "b"}}, {"x": "y"})
    document = json.loads(json.dumps(report.as_dict()))
    assert (document["device"], document["commit"]) == ("GPU", "abc")
    assert document["failures"] == {"x": "y"}
    assert document["clocks"] == {"gate": {"a": "b"}}
    assert document["results"][0]["us"] == {"pdserve": pytest.approx(1000), "torch": pytest.approx(2000)}
    assert document["results"][0]["absent"]["fa3"] == "names no library"
