"""Host costs fitted to runs: simulated runs of known costs give them back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench import vllm_runs
from pdserve.bench.vllm_runs import HOST_COSTS, HostCosts, Run, Times, read_runs, simulated
from pdserve.model.cost.hardware import hardware

H100 = hardware("h100")
TABLE = """# source: a comment
model,gpu,tensor_parallel,workload,input_tokens,output_tokens,requests_per_s,max_batch_tokens,ttft_mean,itl_mean
Qwen/Qwen2.5-7B-Instruct,H100,1,chat,300,40,40,2048,20,6.5
meta-llama/Llama-3.1-70B-Instruct,H100,4,chat,300,40,12,2048,50,20
"""


def test_runs_are_read_and_their_costs_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_runs, "_NUM_REQUESTS", 250)
    (tmp_path / "runs.csv").write_text(TABLE)
    runs = read_runs(tmp_path / "runs.csv")
    assert runs[0] == Run("Qwen/Qwen2.5-7B-Instruct", 1, 40.0, 300, 40, 2048, Times(0.020, 0.0065))
    costs: dict[str, Any] = {"step_overhead_s": 900e-6, "ranks_overhead_s": 2e-3, "row_overhead_s": 30e-6}
    device = replace(H100, **costs)
    made = [run._replace(times=simulated(run, device)) for run in runs]
    fitted = HostCosts(made, H100).fit([0, 1])
    for run in made:
        start, end = (simulated(run, replace(H100, **found)).itl_s / run.times.itl_s for found in (HOST_COSTS, fitted))
        assert abs(end - 1) < 0.7 * abs(start - 1)
