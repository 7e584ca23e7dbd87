"""Gathers and scatters of KV blocks in Triton's interpreter, against indexing."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.kernels.kv_pool import LARGEST_VALUES, KvPool, vector_bytes
from pdserve.kernels.triton import block_copy as triton_block_copy
from pdserve.kernels.triton.block_copy import gather_blocks, scatter_blocks
from tests.kernels.paged_batch import nan_pool, rounded_to

BLOCKS, HEADS, LAYERS, BLOCK_SIZE, HEAD_DIM = 7, 3, 4, 5, 24
IDS = torch.tensor([5, 0, 3], dtype=torch.int32)
PARTS = [(0, 3, 0, 4), (1, 1, 0, 4), (0, 2, 3, 1), (2, 1, 1, 2)]
"""First head, heads, first layer, layers."""


def poisoned_pool(num_blocks: int, num_heads: int, num_layers: int, dtype: torch.dtype) -> KvPool:
    return nan_pool((num_blocks, num_heads, num_layers, 2, BLOCK_SIZE, HEAD_DIM), dtype)


def random_pool(num_blocks: int, num_heads: int, num_layers: int, dtype: torch.dtype) -> KvPool:
    pool = poisoned_pool(num_blocks, num_heads, num_layers, dtype)
    if dtype.is_floating_point:
        pool.values.copy_(torch.randn(pool.values.shape))
    else:
        pool.values.copy_(torch.randint(-127, 128, pool.values.shape))
    if pool.scales is not None:
        pool.scales.copy_(torch.rand(pool.scales.shape))
    return pool


def part_of(pool: KvPool, part: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values and scales of `IDS`."""
    head, heads, layer, layers = part
    ids = IDS.long()
    scales = None if pool.scales is None else pool.scales[ids, head : head + heads, layer : layer + layers]
    return pool.values[ids, head : head + heads, layer : layer + layers], scales


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *LARGEST_VALUES], ids=str)
def test_a_part_of_some_blocks_there_and_back(
    part: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles that no part fills."""
    monkeypatch.setattr(triton_block_copy, "_TILE", 32 * 8)
    head, heads, layer, layers = part
    pool, staging = random_pool(BLOCKS, HEADS, LAYERS, dtype), poisoned_pool(4, heads, layers, dtype)
    before = staging.blocks.clone()
    gather_blocks(pool, IDS, staging, first_head=head, first_layer=layer)
    values, scales = part_of(pool, part)
    assert torch.equal(staging.values[:3], values)
    if scales is not None:
        assert staging.scales is not None
        assert torch.equal(staging.scales[:3], scales)
    assert torch.equal(staging.blocks[3], before[3])

    other = poisoned_pool(BLOCKS, HEADS, LAYERS, dtype)
    expected = KvPool(other.blocks.flatten().clone(), other.shape, dtype)
    ids = IDS.long()
    expected.values[ids, head : head + heads, layer : layer + layers] = values
    if expected.scales is not None and scales is not None:
        expected.scales[ids, head : head + heads, layer : layer + layers] = scales
    scatter_blocks(staging, other, IDS, first_head=head, first_layer=layer)
    assert torch.equal(other.blocks, expected.blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("staging_dtype", LARGEST_VALUES, ids=str)
def test_quantised_and_dequantised_on_the_way(dtype: torch.dtype, staging_dtype: torch.dtype) -> None:
    part = (1, 2, 1, 2)
    pool, staging = random_pool(BLOCKS, HEADS, LAYERS, dtype), poisoned_pool(3, 2, 2, staging_dtype)
    gather_blocks(pool, IDS, staging, first_head=1, first_layer=1)
    values = part_of(pool, part)[0].float()
    assert staging.scales is not None
    scales = values.abs().amax(dim=-1) / LARGEST_VALUES[staging_dtype]
    assert torch.equal(staging.scales, scales)
    assert torch.equal(
        staging.values.view(torch.uint8), rounded_to(staging_dtype, values / scales[..., None]).view(torch.uint8)
    )
    other = poisoned_pool(BLOCKS, HEADS, LAYERS, dtype)
    scatter_blocks(staging, other, IDS, first_head=1, first_layer=1)
    assert torch.equal(part_of(other, part)[0], (staging.values.float() * staging.scales[..., None]).to(dtype))
    assert other.values.isfinite().sum() == values.numel()


@pytest.mark.parametrize("dtype", LARGEST_VALUES, ids=str)
def test_vectors_that_are_hard_to_scale(dtype: torch.dtype) -> None:
    pool, staging = poisoned_pool(1, 1, 1, torch.float32), poisoned_pool(1, 1, 1, dtype)
    pool.values.zero_()
    pool.values[0, 0, 0, 0, :, 3] = torch.tensor([0.0, math.inf, math.nan, 3e38, 1e-44])
    gather_blocks(pool, torch.zeros(1, dtype=torch.int32), staging)
    assert staging.scales is not None
    scales, values = staging.scales[0, 0, 0, 0], staging.values[0, 0, 0, 0, :, 3]
    assert scales.isnan().tolist() == [False, True, True, False, False]
    assert scales[0] == 0
    assert values.tolist()[::3] == [0, LARGEST_VALUES[dtype]]
    assert not staging.values[0, 0, 0, 1].float().any()


@pytest.mark.parametrize("dtype", [*LARGEST_VALUES, torch.bfloat16], ids=str)
def test_blocks_beyond_32_bits(dtype: torch.dtype) -> None:
    """One layer of the last blocks. Only memory that is touched is taken."""
    num_layers = 40_000
    block_bytes = num_layers * 2 * BLOCK_SIZE * vector_bytes(HEAD_DIM, dtype)
    num_blocks = 2**31 * dtype.itemsize // block_bytes + 3
    shape = (num_blocks, 1, num_layers, 2, BLOCK_SIZE, HEAD_DIM)
    pool = KvPool(torch.empty(num_blocks * block_bytes, dtype=torch.uint8), shape, dtype)
    source, staging = random_pool(2, 1, 1, dtype), poisoned_pool(2, 1, 1, dtype)
    ids = torch.tensor([num_blocks - 1, num_blocks - 2], dtype=torch.int32)
    scatter_blocks(source, pool, ids, first_layer=num_layers - 1)
    assert torch.equal(pool.values[ids.long(), :, -1:], source.values)
    gather_blocks(pool, ids, staging, first_layer=num_layers - 1)
    assert torch.equal(staging.blocks, source.blocks)


def test_what_does_not_fit_is_refused() -> None:
    pool = random_pool(BLOCKS, HEADS, LAYERS, torch.bfloat16)
    with pytest.raises(AssertionError):
        gather_blocks(
            poisoned_pool(BLOCKS, HEADS, LAYERS, torch.int8), IDS, poisoned_pool(3, HEADS, LAYERS, torch.float8_e4m3fn)
        )
    for staging, head, layer in (
        (poisoned_pool(2, HEADS, LAYERS, torch.bfloat16), 0, 0),
        (poisoned_pool(3, HEADS, LAYERS, torch.bfloat16), 1, 0),
        (poisoned_pool(3, HEADS, LAYERS, torch.bfloat16), 0, 1),
        (poisoned_pool(3, HEADS, LAYERS, torch.float16), 0, 0),
        (nan_pool((3, HEADS, LAYERS, 2, BLOCK_SIZE, 16), torch.bfloat16), 0, 0),
    ):
        with pytest.raises(AssertionError):
            gather_blocks(pool, IDS, staging, first_head=head, first_layer=layer)
