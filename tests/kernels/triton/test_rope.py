"""The rotary write in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.kv_pool import LARGEST_VALUES
from pdserve.kernels.torch import attention as torch_attention
from pdserve.kernels.triton.rope import rope_and_write_kv
from tests.kernels.paged_batch import LAYER, Row, far_batch, make_batch, reference_qk_norm, reference_rotation
from tests.kernels.rotation import (
    NUM_KV_HEADS,
    assert_rotates_and_writes,
    assert_rounds_every_float8,
    assert_scales_what_is_hard,
    random_norm,
    random_qkv,
)


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *LARGEST_VALUES])
@pytest.mark.parametrize("head_dim", [24, 128])
def test_rotates_in_place_and_touches_no_other_slot(has_norm: bool, dtype: torch.dtype, head_dim: int) -> None:
    assert_rotates_and_writes(rope_and_write_kv, has_norm=has_norm, dtype=dtype, head_dim=head_dim)


@pytest.mark.parametrize("dtype", LARGEST_VALUES, ids=str)
def test_vectors_that_are_hard_to_scale(dtype: torch.dtype) -> None:
    assert_scales_what_is_hard(rope_and_write_kv, dtype)


def test_every_float8_is_rounded_to_the_nearest_even() -> None:
    assert_rounds_every_float8(rope_and_write_kv)


@pytest.mark.parametrize("dtype", LARGEST_VALUES, ids=str)
def test_quantised_bit_for_bit_as_by_torch(dtype: torch.dtype) -> None:
    """Where nothing is turned: rotations may differ in their last bits."""
    batches = [make_batch((Row(15, 20),), dtype=dtype) for _ in range(2)]
    qkv_TMD, angles_TC = random_qkv(batches[0])
    qkv_TMD *= torch.logspace(-44, 37, len(qkv_TMD))[:, None, None]
    cos, sin = torch.ones_like(angles_TC), torch.zeros_like(angles_TC)
    for write, batch in zip((rope_and_write_kv, torch_attention.rope_and_write_kv), batches, strict=True):
        write(qkv_TMD.clone(), cos, sin, batch.kv_pool, LAYER, batch.metadata)
    assert torch.equal(batches[0].kv_pool.blocks, batches[1].kv_pool.blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    batch = make_batch((Row(15, 3),), dtype=dtype)
    qkv_TMD, angles_TC = random_qkv(batch)
    qkv_TMD = qkv_TMD.to(dtype)
    norm = random_norm(32)
    expected = reference_rotation(reference_qk_norm(qkv_TMD[:, :-NUM_KV_HEADS], NUM_KV_HEADS, norm), angles_TC)
    rope_and_write_kv(qkv_TMD, angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata, norm)
    error = (qkv_TMD[:, :-NUM_KV_HEADS].double() - expected).abs()
    assert (error <= 0.501 * torch.finfo(dtype).eps * expected.abs() + 1e-6).all()
    for token, block, offset in batch.new_slots():
        written = batch.kv_pool.values[block, :, LAYER, :, offset].transpose(0, 1)
        assert torch.equal(written.flatten(0, 1), qkv_TMD[token, -2 * NUM_KV_HEADS :])


@pytest.mark.parametrize("dtype", [*LARGEST_VALUES, torch.bfloat16], ids=str)
def test_blocks_beyond_32_bits(dtype: torch.dtype) -> None:
    near = make_batch((Row(15, 3),), dtype=dtype, head_dim=16)
    far = far_batch(near)
    qkv_TMD, angles_TC = random_qkv(near)
    for batch in (near, far):
        rope_and_write_kv(qkv_TMD.clone(), angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata)
    for slot, far_slot in zip(near.new_slots(), far.new_slots(), strict=True):
        written = near.kv_pool.values[slot.block, :, LAYER, :, slot.offset]
        assert torch.equal(far.kv_pool.values[far_slot.block, :, LAYER, :, far_slot.offset], written)
        assert written.float().any()


def test_more_rows_than_are_looked_through_at_once() -> None:
    batch = make_batch((Row(0, 1),) * 129, num_kv_heads=1, group=1, head_dim=16)
    qkv_TMD = torch.randn(129, 3, 16)
    angles_TC = torch.zeros(129, 8)
    rope_and_write_kv(qkv_TMD, angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata)
    for token, block, offset in batch.new_slots():
        assert torch.equal(batch.kv_pool.values[block, 0, LAYER, :, offset], qkv_TMD[token, 1:])
