"""Both implementations of the rotary write against float64 by the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pdserve.kernels.cpu import attention as cpu_attention
from pdserve.kernels.cpu import build as cpu_build
from pdserve.kernels.operations import AttentionRule, DecoderKernels, QkNorm
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from tests.kernels.padding import assert_padding_is_nobodys
from tests.kernels.paged_batch import LAYER, Row, make_batch, reference_attention, reference_qk_norm, reference_rotation
from tests.kernels.rotation import (
    NUM_KV_HEADS,
    assert_rotates_and_writes,
    assert_rounds_every_float8,
    assert_scales_what_is_hard,
    random_qkv,
)

both_kernels = pytest.mark.parametrize("kernels", [CPU_KERNELS, TORCH_KERNELS], ids=["cpu", "torch"])


@both_kernels
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("head_dim", [16, 24, 128])
def test_rotates_in_place_and_touches_no_other_slot(
    kernels: DecoderKernels, has_norm: bool, dtype: torch.dtype, head_dim: int
) -> None:
    assert_rotates_and_writes(kernels.rope_and_write_kv, has_norm=has_norm, dtype=dtype, head_dim=head_dim)


def test_float8_is_written_by_torch() -> None:
    write = TORCH_KERNELS.rope_and_write_kv
    assert_rotates_and_writes(write, has_norm=True, dtype=torch.float8_e4m3fn, head_dim=24)
    assert_scales_what_is_hard(write, torch.float8_e4m3fn)
    assert_rounds_every_float8(write)
    assert_padding_is_nobodys(TORCH_KERNELS, torch.float8_e4m3fn)


@both_kernels
def test_attention_over_what_was_just_written(kernels: DecoderKernels) -> None:
    batch = make_batch((Row(0, 21),))
    qkv_TMD, angles_TC = random_qkv(batch)
    batch.kv_pool.values.fill_(math.nan)
    kernels.rope_and_write_kv(qkv_TMD, angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata)
    written = replace(batch, queries=qkv_TMD[:, : -2 * NUM_KV_HEADS])
    rule = AttentionRule(scale=0.2)
    o_TND = kernels.paged_attention(written.queries, batch.kv_pool, LAYER, batch.metadata, rule)
    torch.testing.assert_close(o_TND.double(), reference_attention(written, rule), atol=2e-5, rtol=2e-5)


@both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_padding_is_nobodys(kernels: DecoderKernels, dtype: torch.dtype) -> None:
    assert_padding_is_nobodys(kernels, dtype)


@both_kernels
def test_int8_of_vectors_that_are_hard_to_scale(kernels: DecoderKernels) -> None:
    assert_scales_what_is_hard(kernels.rope_and_write_kv, torch.int8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_takes_activations_of_the_pools_dtype(dtype: torch.dtype) -> None:
    batch = make_batch((Row(15, 3),), dtype=dtype)
    qkv_TMD, angles_TC = random_qkv(batch)
    qkv_TMD = qkv_TMD.to(dtype)
    norm = QkNorm(torch.randn(32, dtype=dtype), torch.randn(32, dtype=dtype), eps=0.1)
    expected = reference_rotation(reference_qk_norm(qkv_TMD[:, :-NUM_KV_HEADS], NUM_KV_HEADS, norm), angles_TC)
    cos, sin = angles_TC.cos(), angles_TC.sin()
    TORCH_KERNELS.rope_and_write_kv(qkv_TMD, cos, sin, batch.kv_pool, LAYER, batch.metadata, norm)
    torch.testing.assert_close(qkv_TMD[:, :-NUM_KV_HEADS].double(), expected, atol=2e-2, rtol=2e-2)


@pytest.fixture(params=[(), ("-U__F16C__",)], ids=["native", "portable"])
def cpu_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DecoderKernels]:
    """The C++ kernels as compiled here, and those that handle float16 as for a CPU without instructions for it."""
    if request.param:
        monkeypatch.setattr(cpu_build, "_FLAGS", (*cpu_build._FLAGS, *request.param))
        sources = [each for each in cpu_build._SOURCES if each.stem in ("attention", "rope", "threads")]
        monkeypatch.setattr(cpu_build, "_SOURCES", sources)
    caches = (cpu_build.load_library, cpu_attention._function)
    for cached in caches:
        cached.cache_clear()
    yield CPU_KERNELS
    for cached in caches:
        cached.cache_clear()


def test_every_float16_is_rounded_and_read_as_by_torch(cpu_kernels: DecoderKernels) -> None:
    """Ties, subnormal numbers and infinities too."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    between = torch.nextafter(halves, torch.tensor(math.inf))
    ties = (halves[:-1].double() + halves[1:].double()).float().div(2)
    values = torch.cat((halves, between, ties, torch.tensor([1e6, -1e6, 65519.0, 65520.0]))).nan_to_num(posinf=1e30)
    values = values[: len(values) // 32 * 32].view(-1, 1, 32)
    num_tokens = len(values)
    batch = make_batch((Row(0, 1),) * num_tokens, num_kv_heads=1, group=1, dtype=torch.float16, block_size=1)
    qkv_TMD = torch.cat((torch.zeros(num_tokens, 2, 32), values), dim=1)
    angles_TC = torch.zeros(num_tokens, 16)
    cpu_kernels.rope_and_write_kv(qkv_TMD, angles_TC.cos(), angles_TC.sin(), batch.kv_pool, LAYER, batch.metadata)
    tokens, blocks, offsets = zip(*batch.new_slots(), strict=True)
    assert torch.equal(batch.kv_pool.values[blocks, 0, LAYER, 1, offsets], values[[*tokens], 0].half())
    rule = AttentionRule(scale=1.0)
    o_TND = cpu_kernels.paged_attention(qkv_TMD[:, :1], batch.kv_pool, LAYER, batch.metadata, rule)
    assert torch.equal(o_TND, values.half().float())
