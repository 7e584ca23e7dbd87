from __future__ import annotations

import re

import pytest
import torch

from pdserve.bench.kernels.attention import AttentionShape, Row, attention_case
from pdserve.bench.kernels.case import AbsentError, Case, Limits, Work, import_peer
from pdserve.bench.kernels.cases import KERNELS, MAX_DECODE_TOKENS, chosen_cases
from pdserve.bench.kernels.layers import draw_case, gate_case, norm_case, product_case, rope_case, top_p_case

MAX_BYTES = 10 * 2**30


@pytest.mark.parametrize("kernel", KERNELS)
def test_cases_are_of_their_kernel_and_differ(kernel: str) -> None:
    cases, few = list(KERNELS[kernel](quick=False)), list(KERNELS[kernel](quick=True))
    assert {case.kernel for case in (*cases, *few)} == {kernel}
    assert len({case.shape for case in cases}) == len(cases)
    assert 1 <= len({case.shape for case in few}) == len(few) < len(cases)


def test_every_case_fits_into_a_gpu() -> None:
    for case in chosen_cases("", quick=False):
        assert 0 < case.work.num_bytes < MAX_BYTES, case.shape
        if alike := re.search(r"(\d+) x 1 after (\d+)", case.shape):
            assert int(alike[1]) * (int(alike[2]) + 1) <= MAX_DECODE_TOKENS


def test_the_shapes_that_serving_is_made_of_are_there() -> None:
    shapes = {case.shape for case in chosen_cases("", quick=False)}
    assert "32/8 heads D128, 1 x 16384" in shapes
    assert "32/8 heads D128, 1 x 2048 after 14336" in shapes
    assert "32/8 heads D128, 256 x 1 after 1023" in shapes
    for dtype in ("int8", "float8_e4m3fn"):
        assert f"32/8 heads D128, 64 x 1 after 32767, KV {dtype}" in shapes
    assert "64/8 heads D128, 2 x 8192" in shapes
    assert "32/8 heads D128, 32 rows of 128 to 32768" in shapes
    assert "int4 14336 -> 4096, 16 tokens" in shapes
    assert {case.work.num_bytes for case in KERNELS["rms_norm"](quick=False)} == {
        mib * 2**20 for mib in (1, 4, 16, 32, 64, 256)
    }


def test_kernels_are_chosen_by_a_part_of_their_names() -> None:
    assert {case.kernel for case in chosen_cases("attention", quick=True)} == {"prefill_attention", "decode_attention"}
    with pytest.raises(ValueError, match="no kernel is named 'attent1on': use one of prefill_attention, decode_att"):
        chosen_cases("attent1on", quick=True)


LIMITS = Limits(flops=1000e12, bandwidth=4e12)
INT8 = torch.int8


def attention(kernel: str, *rows: Row, kv_dtype: torch.dtype = torch.bfloat16) -> Case:
    return attention_case(AttentionShape(kernel=kernel, rows=rows, num_heads=32, kv_dtype=kv_dtype))


@pytest.mark.parametrize(
    ("case", "num_bytes", "flops"),
    [
        # 1 + 2 + 3 + 4 keys are seen; 2 vectors of 8 heads, and queries and results of 32.
        (attention("prefill_attention", Row(4)), 4 * 8 * 512 + 2 * 4 * 32 * 256, 4 * 32 * 128 * 10),
        # After 3 tokens: 4 + 5 keys, and another row with one.
        (
            attention("prefill_attention", Row(2, 3), Row(1)),
            (5 + 1) * 8 * 512 + 2 * 3 * 32 * 256,
            4 * 32 * 128 * (9 + 1),
        ),
        (attention("decode_attention", Row(1, 1023), Row(1)), 1025 * 8 * 512, 4 * 32 * 128 * 1025),
        (attention("decode_attention", Row(1, 99), kv_dtype=INT8), 100 * 8 * (2 * 128 + 8), 4 * 32 * 128 * 100),
        (norm_case(10), 2 * 10 * 4096 * 2, 0),
        (gate_case(10), 3 * 10 * 14336 * 2, 0),
        (rope_case(10, is_prompt=True), 10 * 128 * 2 * (2 * 32 + 4 * 8), 0),
        (rope_case(10, is_prompt=True, kv_dtype=INT8), 10 * 128 * (2 * (2 * 32 + 2 * 8) + 2 * 8), 0),
        (product_case("int8", 3, 256, 100), 256 * 100 + 4 * 100, 2 * 3 * 256 * 100),
        (product_case("int4", 3, 256, 100), 128 * 100 + 4 * 2 * 100, 2 * 3 * 256 * 100),
        (draw_case(3, 1000), 4 * 3 * 1000, 0),
        (top_p_case(3, 1000), 8 * 3 * 1000, 0),
    ],
    ids=lambda value: value.shape if hasattr(value, "shape") else "",
)
def test_work_of_a_kernel(case: Case, num_bytes: float, flops: float) -> None:
    """Against numbers worked out by hand."""
    assert case.work.num_bytes == num_bytes
    assert case.work.flops == flops


def test_the_limit_is_the_longer_of_bytes_and_flops() -> None:
    assert Work(3.6e9).limit_s(LIMITS) == pytest.approx(1e-3)
    assert Work(3.6e9, flops=2e12).limit_s(LIMITS) == pytest.approx(2e-3)
    assert Work(0, flops=7e11, flops_share=0.7).limit_s(LIMITS) == pytest.approx(1e-3)


def test_products_are_asked_for_a_share_of_the_peak_only() -> None:
    assert product_case("int8", 1, 1, 1).work.flops_share == 0.7


def test_a_peer_that_is_not_installed() -> None:
    with pytest.raises(AbsentError, match="cannot be imported: No module named 'no_such_peer'"):
        import_peer("no_such_peer")
    assert import_peer("json").dumps(1) == "1"
