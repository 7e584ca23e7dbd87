from __future__ import annotations

import pytest

from pdserve.bench.kernels.attention import AttentionCase
from pdserve.bench.kernels.cases import KERNELS, MAX_DECODE_TOKENS, chosen_cases

MAX_BYTES = 10 * 2**30


@pytest.mark.parametrize("kernel", KERNELS)
def test_cases_are_of_their_kernel_and_differ(kernel: str) -> None:
    cases, few = KERNELS[kernel](quick=False), KERNELS[kernel](quick=True)
    assert {case.kernel for case in (*cases, *few)} == {kernel}
    assert len({case.shape for case in cases}) == len(cases)
    assert 1 <= len({case.shape for case in few}) == len(few) < len(cases)


def test_every_case_fits_into_a_gpu() -> None:
    for case in chosen_cases("", quick=False):
        assert 0 < case.work.num_bytes < MAX_BYTES, case.shape
        if isinstance(case, AttentionCase):
            assert sum(row.keys for row in case.rows) <= MAX_DECODE_TOKENS


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
