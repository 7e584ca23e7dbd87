from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.bench.gpu_model.limits import DeviceLimits, Variant
from pdserve.bench.gpu_model.measure import Bench, DeviceLostError, agreement
from pdserve.bench.gpu_model.own import OwnModel
from pdserve.bench.gpu_model.plan import ON_CPU
from pdserve.bench.gpu_model.report import Report
from tests.bench.gpu_model.test_report import MACHINE

FLOAT32 = Variant(dtype="float32")


def bench_of(folder: Path, kept: list[int], free_bytes: int | None = None) -> Bench:
    report = Report(MACHINE)
    return Bench(
        folder=folder,
        plan=ON_CPU,
        device=torch.device("cpu"),
        limits=DeviceLimits(flops=1e9, bandwidth=1e9),
        free_bytes=free_bytes,
        report=report,
        keep=lambda: kept.append(len(report.rows)),
    )


def test_every_row_is_kept_as_it_comes(tiny: Path) -> None:
    kept: list[int] = []
    bench = bench_of(tiny, kept)
    assert len(bench.own(FLOAT32, decode=True, prefill=True)) == 8
    shapes = [(row.phase, row.num_rows, row.context_tokens, row.num_tokens) for row in bench.report.rows]
    assert shapes == [("decode", 1, 64, 1), ("decode", 3, 64, 3), ("prefill", 1, 40, 40)]
    assert set(kept) == {1, 2, 3}
    one, three, _ = bench.report.rows
    # Of the two steps in the middle, on average: what two rows more read.
    assert three.limit_s - one.limit_s == pytest.approx(2 * 61.5 * (2 * 2 * 2 * 16 * 4) / 1e9)


def test_a_shape_that_fails_does_not_stop_the_others(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr(OwnModel, "decode", fails)
    bench = bench_of(tiny, [])
    assert bench.own(FLOAT32, decode=True, prefill=True)
    assert bench.report.failures == ["pdserve, 1 rows: out of memory", "pdserve, 3 rows: out of memory"]
    assert [row.phase for row in bench.report.rows] == ["prefill"]


def test_a_device_that_is_lost_ends_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_lost(*arguments: Any) -> None:
        raise torch.AcceleratorError("CUDA error: illegal address")

    monkeypatch.setattr(OwnModel, "decode", is_lost)
    bench = bench_of(tiny, [])
    with pytest.raises(DeviceLostError):
        bench.own(FLOAT32, decode=True, prefill=True)
    assert bench.report.failures == ["pdserve, 1 rows: CUDA error: illegal address"]


def test_what_does_not_fit_is_named(tiny: Path) -> None:
    bench = bench_of(tiny, [], free_bytes=0)
    bench.own(FLOAT32, decode=True, prefill=False)
    assert len(bench.report.notes) == 2
    assert all("not half of their context fits" in note for note in bench.report.notes)
    assert not bench.report.rows


def test_a_peer_that_is_not_installed_is_absent(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    bench = bench_of(tiny, [])
    bench.peer([])
    assert bench.report.notes[0].startswith("transformers is absent: cannot be imported")
    assert not bench.report.failures


def test_agreement_is_in_words() -> None:
    assert agreement([1, 2, 3], [1, 2, 4]) == "greedy answers to one prompt: the first 2 of 3 tokens are the same"
    assert "first 3 of 3" in agreement([1, 2, 3], [1, 2, 3])
