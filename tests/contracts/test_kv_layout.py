"""The geometry of a KV pool: sizes, strides that transfers rely on, and compatibility."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pdserve.contracts.kv_layout import DTYPE_BYTES, KvLayout, resolve_kv_dtype

LAYOUT = KvLayout(
    num_blocks=6, num_kv_heads=4, num_layers=3, block_size=8, head_dim=16, dtype="bfloat16", model_hash="hash"
)


def test_sizes_of_a_known_model() -> None:
    # Llama-3-8B in bf16: 128 KiB of KV per token, 2 MiB per block of 16 tokens.
    layout = KvLayout(
        num_blocks=100, num_kv_heads=8, num_layers=32, block_size=16, head_dim=128, dtype="bfloat16", model_hash=""
    )
    assert layout.block_bytes == 2 * 2**20
    assert layout.head_bytes == 2**18
    assert layout.pool_bytes == 100 * 2 * 2**20


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_bytes_follow_the_shape(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    scales = math.prod(layout.shape[:-1]) if dtype in ("int8", "float8_e4m3fn") else 0
    assert layout.pool_bytes == math.prod(layout.shape) * DTYPE_BYTES[dtype] + 4 * scales
    assert layout.pool_bytes == layout.num_blocks * layout.block_bytes
    assert layout.block_bytes == layout.num_kv_heads * layout.head_bytes


def test_blocks_and_heads_are_runs_of_bytes() -> None:
    layout = replace(LAYOUT, dtype="float32")
    pool = np.arange(math.prod(layout.shape), dtype=np.float32).reshape(layout.shape)
    raw = pool.tobytes()
    assert raw[2 * layout.block_bytes : 3 * layout.block_bytes] == pool[2].tobytes()
    start = 2 * layout.block_bytes + layout.head_bytes
    assert raw[start : start + 2 * layout.head_bytes] == pool[2, 1:3].tobytes()


def test_auto_is_the_models_dtype() -> None:
    assert resolve_kv_dtype("auto", "bfloat16") == "bfloat16"
    for dtype in ("int8", "float8_e4m3fn"):
        assert resolve_kv_dtype(dtype, "bfloat16") == dtype
    with pytest.raises(ValueError, match="use one of auto, int8, float8_e4m3fn"):
        resolve_kv_dtype("int4", "bfloat16")


def test_blocks_for_tokens_round_up() -> None:
    assert [LAYOUT.num_blocks_for(n) for n in (0, 1, 7, 8, 9, 16, 17)] == [0, 1, 1, 1, 2, 2, 3]
