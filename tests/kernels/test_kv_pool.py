"""The views of a pool lie where the layout says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.kernels.kv_pool import KvPool

LAYOUT = KvLayout(
    num_blocks=5, num_kv_heads=4, num_layers=3, block_size=8, head_dim=16, dtype="bfloat16", model_hash="hash"
)


def pool_of(layout: KvLayout) -> KvPool:
    memory = torch.zeros(layout.pool_bytes, dtype=torch.uint8)
    return KvPool(memory, layout.shape, getattr(torch, layout.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_a_head_of_a_block_is_the_run_of_bytes_that_is_transferred(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    pool = pool_of(layout)
    assert pool.shape == layout.shape
    assert pool.blocks.shape == (layout.num_blocks, layout.block_bytes)
    pool.values[2, 1:3] = 1
    if pool.scales is not None:
        pool.scales[2, 1:3] = 1.0
    touched = pool.blocks.flatten().nonzero()
    start = 2 * layout.block_bytes + layout.head_bytes
    assert start <= touched.min()
    assert touched.max() < start + 2 * layout.head_bytes
    pool.blocks[2, layout.head_bytes : 3 * layout.head_bytes] = 0
    assert not pool.values.float().any()
    assert pool.scales is None or not pool.scales.any()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_scales_lie_behind_the_values_of_their_head(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    pool = pool_of(layout)
    num_values = layout.num_layers * 2 * layout.block_size * layout.head_dim
    assert pool.scales is not None
    pool.scales[:] = torch.arange(pool.scales.numel()).view(pool.scales.shape)
    strip = pool.blocks[3, layout.head_bytes + num_values : 2 * layout.head_bytes].view(torch.float32)
    assert torch.equal(strip, pool.scales[3, 1].flatten())


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_block_copied_as_bytes_is_copied_whole(dtype: str) -> None:
    pool = pool_of(replace(LAYOUT, dtype=dtype))
    assert pool.scales is not None
    pool.values[1] = 7
    pool.scales[1] = 0.5
    pool.blocks[4] = pool.blocks[1]
    assert (pool.values[4].float() == 7).all()
    assert (pool.scales[4] == 0.5).all()
    assert not pool.blocks[[0, 2, 3]].any()


def test_memory_of_another_size_or_dtype_is_refused() -> None:
    memory = torch.zeros(LAYOUT.pool_bytes, dtype=torch.uint8)
    with pytest.raises(AssertionError):
        KvPool(memory, LAYOUT.shape, torch.float32)
    with pytest.raises(AssertionError):
        KvPool(memory, LAYOUT.shape, torch.float64)
