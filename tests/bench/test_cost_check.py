"""The check of the cost model against published step times: its readers, and that a fit finds what is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.bench.cost_check import SHAPES, Group, Row, check, distserve_rows, errors, fit, splitwise_rows
from pdserve.contracts.precision import Precision
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.curve import Curve
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
llama2-70b,a100-80gb,2,512,2,128,50,5,30,100
bloom-176b,a100-80gb,8,512,2,128,50,5,30,100
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
    group = Group("Splitwise", "h100-sxm", "llama-2-70b", 8, "prefill", False)
    assert list(splitwise_rows(path)) == [
        Row(group, [(512, 0)] * 2, 0.050),
        Row(group._replace(phase="decode"), [(1, 576)] * 2, 0.030),
    ]


def test_a_fit_finds_a_device_again() -> None:
    device = replace(
        hardware("a100"),
        compute_efficiency=Curve(((32, 0.15), (128, 0.3), (512, 0.5), (2048, 0.6))),
        memory_efficiency=0.8,
        layer_overhead_s=1e-4,
        decode_attention_efficiency=0.5,
    )
    cost = CostModel(SHAPES["opt-13b"], device, Precision(dtype="float16"))
    group = Group("made up", "a100-80gb-sxm", "opt-13b", 1, "", True)
    steps = [[(count, 0)] for count in (64, 256, 1000, 2000)]
    steps += [[(1, context)] * size for size in (1, 8, 48) for context in (100, 1000)]
    rows = [Row(group, step, cost.step_s(step)) for step in steps]
    fitted = fit(rows, hardware("a100"))
    assert np.abs(errors(rows, hardware("a100"))).max() > 0.15
    assert np.abs(errors(rows, fitted)).max() < 0.03
    unseen = [[(500, 0)], [(1, 500)] * 20, [(1500, 0)]]
    assert np.abs(errors([Row(group, step, cost.step_s(step)) for step in unseen], fitted)).max() < 0.05


def test_errors_are_summed_up_by_group(tmp_path: Path) -> None:
    path = tmp_path / "distserve.csv"
    path.write_text(DISTSERVE)
    groups, fits = check(list(distserve_rows(path)))
    assert [group["num_rows"] for group in groups] == [13, 6]
    assert set(fits) == {"DistServe on a100-80gb-sxm"}
    for group in groups:
        assert (
            abs(group["catalogue"]["bias"]) <= group["catalogue"]["median"] + 1e-9 <= group["catalogue"]["p90"] + 2e-9
        )
        assert group["fitted"]["median"] < 0.2
