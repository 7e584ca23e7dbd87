from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdserve.bench.gpu_model.report import Report, Row

MACHINE: dict[str, Any] = {
    "measured": "2026-11-22T01:00:00+00:00",
    "part": "",
    "device": "GPU",
    "hardware": "h200",
    "commit": "abc",
    "torch_matmul_tflops": 700.0,
    "torch_copy_gbytes_per_s": 4000.0,
    "peak_tflops": 989.0,
    "peak_gbytes_per_s": 4800.0,
}


def row(phase: str = "decode", **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "phase": phase,
        "engine": "pdserve",
        "held": "bfloat16 weights, bfloat16 KV",
        "num_rows": 64,
        "context_tokens": 2048,
        "num_tokens": 64,
        "step_s": 0.01,
        "limit_s": 0.008,
    }
    return Row(**fields | changes)


def test_rows_are_told_as_shares_of_their_limit() -> None:
    assert (row().limit_share, row().tokens_per_s) == (0.8, 6400)


def test_a_table_for_each_phase() -> None:
    report = Report(
        MACHINE, [row("prefill"), row(num_rows=256), row(device_s=0.009, host_s=0.001), row(engine="transformers")]
    )
    report.clocks["decoding"] = {"clocks.sm": "1980 MHz"}
    report.notes.append("a note")
    report.failures.append("broken")
    lines: list[str] = []
    report.show(lines.append)
    assert lines[0] == (
        "GPU: torch's large product 700 TFLOP/s, its large copy 4000 GB/s; by its data sheet 989 and 4800"
    )
    assert [line.split(",")[0] for line in lines if line.endswith((", a step", ", a prompt"))] == ["decode", "prefill"]
    assert lines[3].split()[-5:] == ["10.000", "6400", "80.0%", "9.000", "1.000"]
    assert [line.split(",")[0].split()[-1] for line in lines[3:6]] == ["pdserve", "transformers", "pdserve"]
    assert lines[4].split()[-2:] == ["-", "-"]
    assert lines[-3:] == ["decoding: clocks.sm 1980 MHz", "a note", "FAILED: broken"]


def test_a_dated_file_has_it_all(tmp_path: Path) -> None:
    file = Report(MACHINE, [row()], notes=["a note"]).write(tmp_path)
    assert file.name == "2026-11-22_gpu_model_h200.json"
    document = json.loads(file.read_text())
    assert document["commit"] == "abc"
    assert document["notes"] == ["a note"]
    assert document["rows"][0]["limit_share"] == 0.8
    part = Report({**MACHINE, "part": "decode_quick", "hardware": None}).write(tmp_path)
    assert part.name == "2026-11-22_gpu_model_decode_quick_unknown.json"
