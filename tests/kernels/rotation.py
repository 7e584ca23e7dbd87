"""What every implementation of the rotary write must do, against float64 by the definition."""

from __future__ import annotations

import math

import torch

from pdserve.kernels.kv_pool import LARGEST_VALUES, KvPool
from pdserve.kernels.operations import QkNorm, RopeAndWriteKv
from tests.kernels.paged_batch import (
    LAYER,
    PagedBatch,
    Row,
    make_batch,
    reference_qk_norm,
    reference_rotation,
    stored_kv,
)

NUM_KV_HEADS = 2


def random_qkv(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads of every new token, and angles."""
    num_tokens, num_heads, head_dim = batch.queries.shape
    qkv_TMD = torch.randn(num_tokens, num_heads + 2 * NUM_KV_HEADS, head_dim)
    return qkv_TMD, torch.randn(num_tokens, head_dim // 2)


def random_norm(head_dim: int) -> QkNorm:
    return QkNorm(torch.randn(head_dim), torch.randn(head_dim), eps=0.1)


def assert_stored(kv_pool: KvPool, kv_H2D: torch.Tensor, block: int, offset: int) -> None:
    """A slot holds ``kv_H2D`` as closely as the pool's dtype can."""
    values = kv_pool.values[block, :, LAYER, :, offset]
    if kv_pool.scales is None:
        assert torch.equal(values, kv_H2D.to(kv_pool.dtype))
    else:
        scales = kv_pool.scales[block, :, LAYER, :, offset].double()
        torch.testing.assert_close(scales, kv_H2D.abs().amax(dim=-1).double() / LARGEST_VALUES[kv_pool.dtype])
        ratios = kv_H2D / scales[..., None]
        # Steps of float8 are an eighth of the power of two below, and at least 2^-9.
        steps = torch.ones(()) if kv_pool.dtype == torch.int8 else 2 ** ratios.abs().log2().floor().clamp(-6) / 8
        assert ((values.double() - ratios).abs() <= 0.5001 * steps).all()


def assert_rotates_and_writes(
    rope_and_write_kv: RopeAndWriteKv, *, has_norm: bool, dtype: torch.dtype, head_dim: int
) -> None:
    """Queries and keys are turned where they are, and no slot but the new tokens' changes."""
    batch = make_batch((Row(15, 3), Row(0, 5), Row(16, 1)), dtype=dtype, group=3, head_dim=head_dim)
    qkv_TMD, angles_TC = random_qkv(batch)
    given = qkv_TMD.clone()
    norm = random_norm(head_dim) if has_norm else None
    before = KvPool(batch.kv_pool.blocks.flatten().clone(), batch.kv_pool.shape, dtype)
    rope_and_write_kv(qkv_TMD, angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata, norm)

    expected = given[:, :-NUM_KV_HEADS]
    if norm is not None:
        expected = reference_qk_norm(expected, NUM_KV_HEADS, norm)
    expected = reference_rotation(expected, angles_TC)
    torch.testing.assert_close(qkv_TMD[:, :-NUM_KV_HEADS].double(), expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(qkv_TMD[:, -NUM_KV_HEADS:], given[:, -NUM_KV_HEADS:])

    num_heads = batch.queries.shape[1]
    for token, block, offset in batch.new_slots():
        kv_H2D = qkv_TMD[token, num_heads:].view(2, NUM_KV_HEADS, head_dim).transpose(0, 1)
        assert_stored(batch.kv_pool, kv_H2D, block, offset)
        for pool in (batch.kv_pool, before):
            pool.values[block, :, LAYER, :, offset] = 0
            if pool.scales is not None:
                pool.scales[block, :, LAYER, :, offset] = 0
    assert torch.equal(batch.kv_pool.blocks, before.blocks)


def assert_scales_what_is_hard(rope_and_write_kv: RopeAndWriteKv, dtype: torch.dtype) -> None:
    """Zeros stay zeros, the smallest numbers stay in range, and what is not finite is NaN as a whole."""
    inf, nan = math.inf, math.nan
    smallest = 2.0**-149
    limit = LARGEST_VALUES[dtype]
    leading = [
        (0.0, 0.0),
        (7 * smallest, -1.49 * limit * smallest),
        (3e38, -3e38),
        (inf, 1.0),
        (1.0, -inf),
        (nan, 1.0),
        (1.0, nan),
        (5.0, -2.5),
    ]
    values_T1D = torch.zeros(len(leading), 1, 16)
    values_T1D[:, 0, 3:5] = torch.tensor(leading)
    batch = make_batch((Row(0, len(leading)),), num_kv_heads=1, group=1, head_dim=16, dtype=dtype)
    qkv_TMD = torch.cat((torch.zeros(len(leading), 2, 16), values_T1D), dim=1)
    angles_TC = torch.zeros(len(leading), 8)
    rope_and_write_kv(qkv_TMD, angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata)
    written = list(batch.new_slots())
    blocks, offsets = torch.tensor([slot.block for slot in written]), torch.tensor([slot.offset for slot in written])
    v_TD = stored_kv(batch.kv_pool, blocks, 1, offsets)[:, 0]
    assert v_TD[3:7].isnan().all()
    finite = [0, 1, 2, 7]
    torch.testing.assert_close(v_TD[finite], values_T1D[finite, 0].double(), atol=0.5 * limit * smallest, rtol=0.01)
    assert not stored_kv(batch.kv_pool, blocks, 0, offsets).any()


def assert_rounds_every_float8(rope_and_write_kv: RopeAndWriteKv) -> None:
    """To the nearest, and what lies between two to the even one of them."""
    codes = torch.arange(127, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    ties = (numbers[:-1] + numbers[1:]) / 2
    evens = codes[:-1] + codes[:-1] % 2
    infinity = torch.tensor(math.inf)
    given = torch.cat((numbers, ties, ties.nextafter(-infinity), ties.nextafter(infinity)))
    expected = torch.cat((codes, evens, codes[:-1], codes[1:]))
    # The largest number of each vector is that of float8, and so scales are 1.
    values_TD = torch.full((len(given) // 15 + 1, 16), 448.0)
    wanted_TD = torch.full(values_TD.shape, 126, dtype=torch.uint8)
    for index, (number, code) in enumerate(zip(given, expected, strict=True)):
        values_TD[index // 15, index % 15] = number
        wanted_TD[index // 15, index % 15] = code
    for sign in (1, -1):
        batch = make_batch((Row(0, len(values_TD)),), num_kv_heads=1, group=1, head_dim=16, dtype=torch.float8_e4m3fn)
        qkv_TMD = torch.cat((torch.zeros(len(values_TD), 2, 16), sign * values_TD[:, None]), dim=1)
        angles_TC = torch.zeros(len(values_TD), 8)
        rope_and_write_kv(qkv_TMD, angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata)
        for token, block, offset in batch.new_slots():
            written = batch.kv_pool.values.view(torch.uint8)[block, 0, LAYER, 1, offset]
            assert torch.equal(written & 127, wanted_TD[token])
            assert torch.equal(written > 127, qkv_TMD[token, 2].signbit())
