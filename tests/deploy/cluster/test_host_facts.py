"""What a host's CPU computes fast."""

from __future__ import annotations

import pytest

from pdserve.deploy.cluster import host_facts
from pdserve.deploy.cluster.host_facts import slow_dtype_reason


@pytest.mark.parametrize(
    ("flags", "has_compiler", "slow"),
    [
        (set(), False, set()),  # not x86: unknown
        ({"avx2", "f16c"}, True, set()),
        ({"avx2"}, True, {"float16"}),
        ({"avx2", "f16c"}, False, {"bfloat16", "float16"}),
        ({"avx2", "f16c", "avx512_bf16"}, False, {"float16"}),
        ({"avx2", "f16c", "amx_bf16", "avx512_fp16"}, False, set()),
    ],
)
def test_dtypes_without_a_fast_form_are_known(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], has_compiler: bool, slow: set[str]
) -> None:
    monkeypatch.setattr(host_facts, "cpu_flags", lambda: flags)
    monkeypatch.setattr(host_facts, "slow_kernels_reason", lambda: "" if has_compiler else "no g++")
    assert {dtype for dtype in ("float32", "bfloat16", "float16") if slow_dtype_reason(dtype)} == slow
