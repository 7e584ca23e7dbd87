"""The formulas by which kernels are judged, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from pdserve.bench.kernels.attention import AttentionCase, Row
from pdserve.bench.kernels.contest import Case, Limits, PeerAbsentError, Work, import_peer
from pdserve.bench.kernels.copies import CopyCase
from pdserve.bench.kernels.draws import DrawCase, TopPCase
from pdserve.bench.kernels.pointwise import GateCase, NormCase, RopeCase
from pdserve.bench.kernels.products import ProductCase

LIMITS = Limits(flops=1000e12, bandwidth=4e12, link_bandwidth=64e9)
INT8 = torch.int8


def attention(kernel: str, *rows: Row, kv_dtype: torch.dtype = torch.bfloat16) -> AttentionCase:
    return AttentionCase(kernel=kernel, rows=rows, num_heads=32, kv_dtype=kv_dtype)


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
        (NormCase(num_tokens=10), 2 * 10 * 4096 * 2, 0),
        (GateCase(num_tokens=10), 3 * 10 * 14336 * 2, 0),
        (RopeCase(num_tokens=10, is_prompt=True), 10 * 128 * 2 * (2 * 32 + 4 * 8), 0),
        (RopeCase(num_tokens=10, is_prompt=True, kv_dtype=INT8), 10 * 128 * (2 * (2 * 32 + 2 * 8) + 2 * 8), 0),
        (
            ProductCase(weight="int8", num_tokens=3, num_inputs=256, num_outputs=100),
            256 * 100 + 4 * 100,
            2 * 3 * 256 * 100,
        ),
        (
            ProductCase(weight="int4", num_tokens=3, num_inputs=256, num_outputs=100),
            128 * 100 + 4 * 2 * 100,
            2 * 3 * 256 * 100,
        ),
        (CopyCase(num_blocks=3), 2 * 3 * 2**21, 0),
        (CopyCase(num_blocks=3, moved_heads=4), 2 * 3 * 2**20, 0),
        (CopyCase(num_blocks=3, to_host=True), 3 * 2**21, 0),
        (DrawCase(num_rows=3, vocab_size=1000), 4 * 3 * 1000, 0),
        (TopPCase(num_rows=3, vocab_size=1000), 8 * 3 * 1000, 0),
    ],
    ids=lambda value: value.shape if hasattr(value, "shape") else "",
)
def test_what_a_kernel_has_to_do(case: Case, num_bytes: float, flops: float) -> None:
    assert case.work.num_bytes == num_bytes
    assert case.work.flops == flops


def test_the_limit_is_what_takes_longer() -> None:
    assert Work(3.6e9).limit_s(LIMITS) == pytest.approx(1e-3)
    assert Work(3.6e9, flops=2e12).limit_s(LIMITS) == pytest.approx(2e-3)
    assert Work(0, flops=7e11, flops_share=0.7).limit_s(LIMITS) == pytest.approx(1e-3)
    assert Work(64e6, crosses_link=True).limit_s(LIMITS) == pytest.approx(1e-3)


def test_products_are_asked_for_a_share_of_the_peak_only() -> None:
    assert ProductCase(weight="int8", num_tokens=1, num_inputs=1, num_outputs=1).work.flops_share == 0.7
    assert CopyCase(num_blocks=1, to_host=True).work.crosses_link


def test_a_peer_that_is_not_installed() -> None:
    with pytest.raises(PeerAbsentError, match="cannot be imported: No module named 'no_such_peer'"):
        import_peer("no_such_peer")
    assert import_peer("json").dumps(1) == "1"
