"""The check of the cost model against published step times: its readers, and that a fit finds what is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdserve.bench.cost_check import (
    SHAPES,
    Group,
    Row,
    check,
    device_of,
    distserve_rows,
    errors,
    fit,
    held_out,
    splitwise_rows,
)
from pdserve.contracts.precision import Precision
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware

DISTSERVE = """# source: a comment
engine,model,tp,phase,bs_threshold,a_ms,b_ms_per_token,c
distserve,facebook/opt-13b,2,prefill,95,10,0.05,1e-5
distserve,facebook/opt-13b,2,decoding_smallbs,95,10,0.001,0.1
distserve,facebook/opt-13b,2,decoding_largebs,95,20,0.001,0.2
vllm,facebook/opt-66b,3,prefill,95,30,0.2,1e-5
"""
SPLITWISE = """# source: a comment
model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time_ms,n,token_time_ms,e2e_time_ms
llama2-70b,h100-80gb,8,512,2,128,50,5,30,100
llama2-70b,h100-80gb-pcap,8,512,2,128,50,5,30,100
llama2-70b,a100-80gb,2,512,32,128,50,5,30,100
"""


def test_coefficients_become_steps(tmp_path: Path) -> None:
    path = tmp_path / "distserve.csv"
    path.write_text(DISTSERVE)
    rows = list(distserve_rows(path))
    prefill = [row for row in rows if row.group.phase == "prefill"]
    assert {row.group for row in prefill} == {Group("DistServe", "a100-80gb-sxm", "opt-13b", 2, "prefill", True)}
    assert [row.seconds for row in prefill if row.rows == [(512, 0)]] == [
        pytest.approx(0.010 + 0.05e-3 * 512 + 1e-8 * 512**2)
    ]
    decode = {(len(row.rows), row.rows[0][1]): row.seconds for row in rows if row.group.phase == "decode"}
    assert decode[16, 512] == pytest.approx(0.010 + 1e-6 * 16 * 512 + 0.1e-3 * 16)
    assert decode[128, 64] == pytest.approx(0.020 + 1e-6 * 128 * 64 + 0.2e-3 * 128)
    assert (128, 512) not in decode


def test_medians_become_steps(tmp_path: Path) -> None:
    path = tmp_path / "splitwise.csv"
    path.write_text(SPLITWISE)
    group = Group("Splitwise", "h100-sxm", "llama2-70b", 8, "prefill", False)
    assert list(splitwise_rows(path)) == [
        Row(group, [(512, 0)] * 2, 0.050),
        Row(group._replace(phase="decode"), [(1, 576)] * 2, 0.030),
    ]


def test_a_fit_tells_costs_of_the_host_from_those_of_the_device() -> None:
    base = hardware("a100")
    figures = {
        "step_overhead_s": 2e-3,
        "ranks_overhead_s": 4e-3,
        "layer_launch_s": 4e-4,
        "row_overhead_s": 3e-5,
        "products": 0.8,
        "prefill_attention": 0.5,
    }
    device = device_of(base, figures)

    def rows(ranks: int, steps: list[list[tuple[int, int]]]) -> list[Row]:
        cost = CostModel(SHAPES["opt-13b"], device, Precision(dtype="float16"), ranks)
        group = Group("made up", "a100-80gb-sxm", "opt-13b", ranks, "", True)
        return [Row(group, step, cost.step_s(step)) for step in steps]

    steps = [[(count, 0)] for count in (64, 256, 1000, 2000)]
    steps += [[(1, context)] * size for size in (1, 8, 48) for context in (100, 1000)]
    fitted = fit([*rows(1, steps), *rows(4, steps)], base)
    assert fitted["layer_launch_s"] == pytest.approx(4e-4, rel=0.1)
    assert fitted["row_overhead_s"] == pytest.approx(3e-5, rel=0.1)
    unseen = rows(8, [[(500, 0)], [(1, 500)] * 20, [(1500, 0)]])
    assert np.abs(errors(unseen, base)).max() > 0.4
    assert np.abs(errors(unseen, device_of(base, fitted))).max() < 0.05


def test_errors_are_summed_up_by_group(tmp_path: Path) -> None:
    path = tmp_path / "distserve.csv"
    path.write_text(DISTSERVE + DISTSERVE.partition("\n")[2].partition("\n")[2].replace("13b", "66b"))
    groups, fits = check([row for row in distserve_rows(path) if row.group.engine == "DistServe"])
    sizes = [("opt-13b", 13), ("opt-13b", 6), ("opt-66b", 13), ("opt-66b", 6)]
    assert [(group["model"], group["num_rows"]) for group in groups] == sizes
    assert set(fits) == {"DistServe on a100-80gb-sxm"}
    assert all(abs(group["fitted"]["bias"]) <= group["fitted"]["mean"] for group in groups)
    assert max(group["fitted"]["mean"] for group in groups if group["is_seen"]) < 0.2
    unseen = {group["phase"]: group["fitted"]["mean"] for group in groups if not group["is_seen"]}
    assert held_out(groups) == {"DistServe on a100-80gb-sxm": unseen}
