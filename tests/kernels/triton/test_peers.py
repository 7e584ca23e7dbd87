"""What is benchmarked against each other computes the same: every case of `pdserve.bench.kernels` at a tiny size, with
the peers that run on a CPU."""

from __future__ import annotations

import sys

import pytest
import torch

from pdserve.bench.kernels.attention import AttentionCase, Row
from pdserve.bench.kernels.attention_peers import FA3_LIBRARY
from pdserve.bench.kernels.contest import Case
from pdserve.bench.kernels.copies import CopyCase
from pdserve.bench.kernels.draws import DrawCase, TopPCase
from pdserve.bench.kernels.measure import Result, measure
from pdserve.bench.kernels.pointwise import GateCase, NormCase, RopeCase
from pdserve.bench.kernels.products import ProductCase
from tests.bench.kernels import fake_peers
from tests.bench.kernels.fake_timer import FakeTimer

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn


def attention(kernel: str, *rows: Row, kv_dtype: torch.dtype = torch.bfloat16) -> AttentionCase:
    return AttentionCase(kernel=kernel, rows=rows, num_heads=4, num_kv_heads=2, head_dim=32, kv_dtype=kv_dtype)


def copy(*, is_gather: bool, moved_heads: int = 2, to_host: bool = False) -> CopyCase:
    return CopyCase(
        num_blocks=3,
        is_gather=is_gather,
        moved_heads=moved_heads,
        to_host=to_host,
        pool_blocks=7,
        num_heads=2,
        num_layers=2,
        head_dim=32,
    )


FLASH_FLEX = ["sdpa flash", "flex"]
CASES: list[tuple[Case, list[str]]] = [
    (attention("prefill_attention", Row(17), Row(17)), FLASH_FLEX),
    (attention("prefill_attention", Row(5, 20)), FLASH_FLEX),
    (attention("prefill_attention", Row(18, 7), kv_dtype=INT8), FLASH_FLEX),
    (attention("decode_attention", Row(1, 32), Row(1, 32)), FLASH_FLEX),
    (attention("decode_attention", Row(1, 15), kv_dtype=INT8), FLASH_FLEX),
    (attention("decode_attention", Row(1, 15), kv_dtype=FLOAT8), FLASH_FLEX),
    (attention("decode_attention", Row(1, 15), Row(1, 40)), []),
    (NormCase(num_tokens=3, num_features=96), ["torch"]),
    (GateCase(num_tokens=3, num_gates=96), ["torch"]),
    (RopeCase(num_tokens=18, is_prompt=True, num_heads=4, num_kv_heads=2, head_dim=32), ["torch"]),
    (RopeCase(num_tokens=3, is_prompt=False, num_heads=4, num_kv_heads=2, head_dim=32, kv_dtype=INT8), ["torch"]),
    (RopeCase(num_tokens=3, is_prompt=False, num_heads=4, num_kv_heads=2, head_dim=32, kv_dtype=FLOAT8), ["torch"]),
    (ProductCase(weight="int8", num_tokens=3, num_inputs=192, num_outputs=80), ["torch bf16"]),
    (ProductCase(weight="int4", num_tokens=3, num_inputs=192, num_outputs=80), ["torch bf16"]),
    *(
        (copy(is_gather=is_gather, moved_heads=moved_heads), ["torch index", "copy per block"])
        for is_gather in (True, False)
        for moved_heads in (1, 2)
    ),
    (copy(is_gather=True, to_host=True), ["torch index", "copy per block"]),
    (DrawCase(num_rows=2, vocab_size=1500), ["torch gumbel"]),
    (TopPCase(num_rows=2, vocab_size=1500), ["sort", "torch"]),
]


def measured(case: Case) -> Result:
    torch.manual_seed(1)
    return measure(case, torch.device("cpu"), FakeTimer(), limits=None, num_rounds=1)


@pytest.mark.parametrize(("case", "peers"), CASES, ids=[f"{case.kernel} {case.shape}" for case, _ in CASES])
def test_peers_compute_the_same(case: Case, peers: list[str]) -> None:
    result = measured(case)
    assert list(result.ratios) == peers, result.absent
    assert result.disagreeing == [], result.differences


def test_what_is_compared_is_no_constant() -> None:
    case = attention("decode_attention", Row(1, 15))
    contest = case.contest(torch.device("cpu"))
    value = contest.own.read(contest.own.run())
    assert value.shape == (1, 4, 32)
    assert 0.05 < value.float().std() < 1


def test_absent_peers_say_why() -> None:
    absent = measured(attention("decode_attention", Row(1, 15), Row(1, 40))).absent
    assert absent["sdpa flash"] == absent["flex"] == "takes rows of one length"
    assert absent["flashinfer"] == "cannot be imported: No module named 'flashinfer'"
    assert absent["fa3"] == "PDSERVE_FA3_LIBRARY names no library"
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
    monkeypatch.setenv(FA3_LIBRARY, "lib.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    fake_peers.define_fa3()
    result = measured(case)
    assert {"flashinfer", "fa3"} <= result.ratios.keys(), result.absent
    assert result.disagreeing == [], result.differences
