"""Host costs fitted to runs: simulated runs of known costs give them back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.bench import vllm_runs
from pdserve.bench.vllm_runs import HostCosts, Run, Times, read_runs, simulated
from pdserve.model.cost.hardware import hardware

H100 = hardware("h100")
TABLE = """# source: a comment
model,gpu,tensor_parallel,workload,input_tokens,output_tokens,requests_per_s,max_batch_tokens,ttft_mean,itl_mean
Qwen/Qwen2.5-7B-Instruct,H100,1,chat,300,40,12,2048,20,6.5
meta-llama/Llama-3.1-70B-Instruct,H100,4,chat,300,40,3,2048,50,20
"""


def test_runs_are_read_and_their_costs_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_runs, "_NUM_REQUESTS", 250)
    (tmp_path / "runs.csv").write_text(TABLE)
    runs = read_runs(tmp_path / "runs.csv")
    assert runs[0] == Run("Qwen/Qwen2.5-7B-Instruct", 1, 12.0, 300, 40, 2048, Times(0.020, 0.0065))
    costs = {"step_overhead_s": 400e-6, "ranks_overhead_s": 800e-6, "row_overhead_s": 12e-6}
    device = replace(H100, **costs)
    made = [run._replace(times=simulated(run, device)) for run in runs]
    fitted = HostCosts(made, H100).fit([0, 1])
    # Four means leave the three figures open enough for the pull of the start to show.
    assert fitted["step_overhead_s"] == pytest.approx(400e-6, rel=0.2)
    assert fitted["ranks_overhead_s"] == pytest.approx(800e-6, rel=0.2)
