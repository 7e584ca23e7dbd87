"""Implementations that are compared compute the same: every case of `pdserve.bench.kernels` at a tiny size, with
the peers that run on a CPU."""

from __future__ import annotations

import sys

import pytest
import torch

from pdserve.bench.kernels.attention import AttentionShape, Row, attention_case
from pdserve.bench.kernels.case import Case
from pdserve.bench.kernels.layers import (
    draw_case,
    experts_case,
    gate_case,
    norm_case,
    product_case,
    rope_case,
    top_p_case,
)
from pdserve.bench.kernels.measure import Result, measure
from tests.bench.kernels import fake_peers
from tests.bench.kernels.scripted_case import fake_timer

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn


def attention(kernel: str, *rows: Row, kv_dtype: torch.dtype = torch.bfloat16) -> Case:
    return attention_case(
        AttentionShape(kernel=kernel, rows=rows, num_heads=4, num_kv_heads=2, head_dim=32, kv_dtype=kv_dtype)
    )


CASES: list[tuple[Case, list[str]]] = [
    (attention("prefill_attention", Row(17), Row(17)), ["sdpa flash"]),
    (attention("prefill_attention", Row(5, 20)), ["sdpa flash"]),
    (attention("prefill_attention", Row(18, 7), kv_dtype=INT8), ["sdpa flash"]),
    (attention("decode_attention", Row(1, 32), Row(1, 32)), ["sdpa flash"]),
    (attention("decode_attention", Row(1, 15), kv_dtype=INT8), ["sdpa flash"]),
    (attention("decode_attention", Row(1, 15), kv_dtype=FLOAT8), ["sdpa flash"]),
    (attention("decode_attention", Row(1, 15), Row(1, 40)), []),
    (norm_case(3, 96), ["torch"]),
    (gate_case(3, 96), ["torch"]),
    (rope_case(18, is_prompt=True, num_heads=4, num_kv_heads=2, head_dim=32), ["torch"]),
    (rope_case(3, is_prompt=False, num_heads=4, num_kv_heads=2, head_dim=32, kv_dtype=INT8), ["torch"]),
    (rope_case(3, is_prompt=False, num_heads=4, num_kv_heads=2, head_dim=32, kv_dtype=FLOAT8), ["torch"]),
    (product_case("int8", 3, 192, 80), ["torch bf16"]),
    (product_case("int4", 3, 192, 80), ["torch bf16"]),
    *(
        (experts_case(form, 3, num_experts=4, per_token=2, num_inputs=192, num_outputs=80), ["torch loop"])
        for form in ("bf16", "int4")
    ),
    (draw_case(2, 1500), ["torch gumbel"]),
    (top_p_case(2, 1500), ["sort", "torch"]),
]


def measured(case: Case) -> Result:
    torch.manual_seed(1)
    return measure(case, torch.device("cpu"), fake_timer(), limits=None, num_rounds=1)


@pytest.mark.parametrize(("case", "peers"), CASES, ids=[f"{case.kernel} {case.shape}" for case, _ in CASES])
def test_peers_compute_the_same(case: Case, peers: list[str]) -> None:
    result = measured(case)
    assert list(result.ratios) == peers, result.absent
    assert result.disagreeing == [], result.differences


def test_compared_results_vary() -> None:
    case = attention("decode_attention", Row(1, 15))
    own = case.own(torch.device("cpu"))
    value = own.read(own.run())
    assert value.shape == (1, 4, 32)
    assert 0.05 < value.float().std() < 1


def test_absent_peers_say_why() -> None:
    absent = measured(attention("decode_attention", Row(1, 15), Row(1, 40))).absent
    assert absent["sdpa flash"] == "takes rows of one length"
    assert absent["flashinfer"] == "cannot be imported: No module named 'flashinfer'"
    absent = measured(attention("prefill_attention", Row(3))).absent
    assert "kernel" in absent["sdpa cudnn"]
    absent = measured(attention("prefill_attention", Row(3, 9))).absent
    assert "first key" in absent["sdpa cudnn"]


@pytest.mark.parametrize(
    "case",
    [
        attention("prefill_attention", Row(17), Row(5, 30)),
        attention("prefill_attention", Row(9, 16), kv_dtype=INT8),
        attention("decode_attention", Row(1, 15), Row(1, 40), Row(1, 3)),
    ],
    ids=lambda case: f"{case.kernel} {case.shape}",
)
def test_peers_of_gpus_get_the_batch_in_their_layouts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_peers.flashinfer())
    result = measured(case)
    assert "flashinfer" in result.ratios, result.absent
    assert result.disagreeing == [], result.differences
