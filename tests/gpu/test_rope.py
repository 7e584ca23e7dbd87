"""The rotary write on a GPU, against float64 and, bit for bit, against torch."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.kv_pool import LARGEST_VALUES
from pdserve.kernels.torch import attention as torch_attention
from pdserve.kernels.triton.rope import rope_and_write_kv
from tests.gpu.device import on_device, sized, some
from tests.kernels.paged_batch import LAYER, Row, make_batch
from tests.kernels.rotation import (
    assert_rotates_and_writes,
    assert_rounds_every_float8,
    assert_scales_what_is_hard,
    random_qkv,
)

POOL_DTYPES = some((torch.bfloat16, *LARGEST_VALUES, torch.float16, torch.float32), 2)


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("head_dim", some((128, 64, 80, 256), 1))
@pytest.mark.parametrize("dtype", POOL_DTYPES, ids=str)
def test_rotary_write_touches_no_other_slot(dtype: torch.dtype, head_dim: int, has_norm: bool) -> None:
    assert_rotates_and_writes(on_device(rope_and_write_kv), has_norm=has_norm, dtype=dtype, head_dim=head_dim)


@pytest.mark.parametrize("dtype", POOL_DTYPES, ids=str)
def test_kv_is_written_bit_for_bit_as_by_torch(dtype: torch.dtype) -> None:
    """Where nothing is turned: rotations may differ in their last bits."""
    rows = sized((Row(0, 700), *(Row(length, 1) for length in range(200))), (Row(15, 7), Row(0, 1)))
    batches = [make_batch(rows, dtype=dtype, head_dim=128) for _ in range(2)]
    qkv_TMD, angles_TC = random_qkv(batches[0])
    if dtype in LARGEST_VALUES:
        qkv_TMD *= torch.logspace(-30, 30, len(qkv_TMD))[:, None, None]
    cos_TC, sin_TC = torch.ones_like(angles_TC), torch.zeros_like(angles_TC)
    for write, batch in zip((on_device(rope_and_write_kv), torch_attention.rope_and_write_kv), batches, strict=True):
        write(qkv_TMD.clone(), cos_TC, sin_TC, batch.kv_pool, LAYER, batch.metadata)
    assert torch.equal(batches[0].kv_pool.blocks, batches[1].kv_pool.blocks)


@pytest.mark.parametrize("dtype", some(list(LARGEST_VALUES), 1), ids=str)
def test_vectors_that_are_hard_to_scale(dtype: torch.dtype) -> None:
    assert_scales_what_is_hard(on_device(rope_and_write_kv), dtype)


def test_every_float8_is_rounded_to_the_nearest_even() -> None:
    assert_rounds_every_float8(on_device(rope_and_write_kv))
