"""Norm, gate, rotary write and block copies in the shapes of serving, against float64 and indexing."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, silu

from pdserve.kernels import torch_attention
from pdserve.kernels.kv_pool import LARGEST_VALUES, KvPool
from pdserve.kernels.triton_block_copy import gather_blocks, scatter_blocks
from pdserve.kernels.triton_gate import gate
from pdserve.kernels.triton_norm import rms_normalise
from pdserve.kernels.triton_rope import rope_and_write_kv
from tests.gpu.device import on_device, sized, some
from tests.kernels.paged_batch import LAYER, Row, make_batch, nan_pool
from tests.kernels.rotation import (
    assert_rotates_and_writes,
    assert_rounds_every_float8,
    assert_scales_what_is_hard,
    random_qkv,
)

DTYPES = some((torch.bfloat16, torch.float16, torch.float32), 1)
POOL_DTYPES = some((torch.bfloat16, *LARGEST_VALUES, torch.float16, torch.float32), 2)
BLOCK_SIZE = 16
NUM_TOKENS = some((7, 1, 2048), 1)


def assert_rounded_once(y_TE: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert y_TE.dtype == dtype
    torch.testing.assert_close(y_TE.double(), expected, atol=1e-5, rtol=0.51 * torch.finfo(dtype).eps + 2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_features", some((4096, 5120, 8192, 16384), 1))
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_norm(dtype: torch.dtype, num_features: int, num_tokens: int) -> None:
    x_TE, weight_E = torch.randn(num_tokens, num_features).to(dtype), torch.randn(num_features).to(dtype)
    root_T1 = (x_TE.double().square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    y_TE = on_device(rms_normalise)(x_TE, weight_E, 1e-6)
    assert_rounded_once(y_TE, x_TE.double() / root_T1 * weight_E.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_gate(dtype: torch.dtype, activation: str, num_tokens: int) -> None:
    gate_up_TF = torch.randn(num_tokens, 2 * sized(14336, 1500)).to(dtype)
    gate_TI, up_TI = gate_up_TF.double().chunk(2, dim=-1)
    active_TI = silu(gate_TI) if activation == "silu" else gelu(gate_TI, approximate="tanh")
    assert_rounded_once(on_device(gate)(gate_up_TF, activation), active_TI * up_TI, dtype)


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
