"""Gathers and scatters of many KV blocks, against indexing."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.kv_pool import LARGEST_VALUES, KvPool
from pdserve.kernels.triton.block_copy import gather_blocks, scatter_blocks
from tests.gpu.device import on_device, sized, some
from tests.kernels.paged_batch import nan_pool

POOL_DTYPES = some((torch.bfloat16, *LARGEST_VALUES, torch.float16, torch.float32), 2)
BLOCK_SIZE = 16


@pytest.mark.parametrize("dtype", POOL_DTYPES, ids=str)
def test_blocks_there_and_back(dtype: torch.dtype) -> None:
    """Some heads and layers of shuffled blocks."""
    num_blocks, ids_B = sized((96, torch.randperm(96)[:70].tolist()), (4, [3, 1]))
    pool, other = (nan_pool((num_blocks, 8, 4, 2, BLOCK_SIZE, 128), dtype) for _ in range(2))
    pool.blocks.copy_(torch.randint(0, 256, pool.blocks.shape))
    staging = nan_pool((len(ids_B), 4, 2, 2, BLOCK_SIZE, 128), dtype)
    expected = KvPool(other.blocks.flatten().clone(), other.shape, dtype)
    part = (ids_B, slice(2, 6), slice(1, 3))
    _bits(expected.values)[part] = _bits(pool.values)[part]
    if expected.scales is not None and pool.scales is not None:
        _bits(expected.scales)[part] = _bits(pool.scales)[part]
    block_ids_B = torch.tensor(ids_B, dtype=torch.int32)
    on_device(gather_blocks)(pool, block_ids_B, staging, first_head=2, first_layer=1)
    on_device(scatter_blocks)(staging, other, block_ids_B, first_head=2, first_layer=1)
    assert torch.equal(other.blocks, expected.blocks)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.itemsize])
