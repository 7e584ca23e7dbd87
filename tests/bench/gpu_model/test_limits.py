from __future__ import annotations

import pytest

from pdserve.bench.gpu_model.checkpoint import LLAMA_8B
from pdserve.bench.gpu_model.limits import (
    DeviceLimits,
    Variant,
    decode_bytes,
    decode_limit_s,
    kv_token_bytes,
    prefill_flops,
    prefill_limit_s,
)
from pdserve.model.config.shape import ModelShape

LLAMA = ModelShape.from_hf_config(LLAMA_8B)
BF16 = Variant(dtype="bfloat16")
LIMITS = DeviceLimits(flops=700e12, bandwidth=3e12)
LAYER_WEIGHTS = 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14336)
TABLE = 128256 * 4096


def test_a_decode_step_reads_the_weights_and_the_kv() -> None:
    assert kv_token_bytes(LLAMA, BF16) == 2 * 2 * 8 * 128 * 32
    weights = 2 * (32 * LAYER_WEIGHTS + TABLE)
    assert decode_bytes(LLAMA, BF16, 64, 2000.5) == weights + 64 * 2000.5 * 131072
    assert decode_limit_s(LLAMA, BF16, 1, 0, LIMITS) == pytest.approx(weights / 3e12)


def test_quantised_weights_and_kv_are_fewer_bytes() -> None:
    int8_kv = Variant(dtype="bfloat16", kv_dtype="int8")
    assert kv_token_bytes(LLAMA, int8_kv) == 2 * 8 * 32 * (128 + 4)
    int4 = Variant(dtype="bfloat16", quantization="int4")
    packed = 32 * LAYER_WEIGHTS * (1 / 2 + 4 / 128)
    assert decode_bytes(LLAMA, int4, 0, 0) == packed + 2 * TABLE
    assert (BF16.name, int8_kv.name, int4.name) == (
        "bfloat16 weights, bfloat16 KV",
        "bfloat16 weights, int8 KV",
        "int4 weights, bfloat16 KV",
    )


def test_a_prompt_is_products_and_causal_attention() -> None:
    # Scores and values: two products of 2 operations, of each of 32 heads of 128, with half of the keys.
    attention = 32 * 32 * 128 * 2 * 2 * 2048 * 2048 / 2
    assert prefill_flops(LLAMA, 2048) == 2 * 2048 * 32 * LAYER_WEIGHTS + 2 * TABLE + attention
    assert prefill_limit_s(LLAMA, 2048, LIMITS) == pytest.approx(prefill_flops(LLAMA, 2048) / 700e12)
