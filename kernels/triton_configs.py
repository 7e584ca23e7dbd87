"""How the kernels of Triton cut their work, per GPU and shape: a table, so that nothing is tuned while serving.

Read by the launchers. What was measured on a GPU is in `pdserve.kernels.tuned_tiles`, and comes first; the rules here
hold for what was not. Every tile compiles for its GPU without spilling registers, which the tests of
`pdserve.bench.kernels_compile` hold both to.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton import next_power_of_2

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.tuned_tiles import AttentionShape, Key, ProductShape, tuned_tiles


class AttentionTile(NamedTuple):
    """One program's share of an attention."""

    rows: int
    """(token, head) pairs that attend together: from 64 on they use Hopper's wgmma."""
    keys: int
    """Keys that they attend to at a time."""
    num_warps: int
    num_stages: int
    """Tiles of keys that are loaded ahead."""


_FLOAT32_OVER_QUANTISED = AttentionTile(16, 16, 4, 1)


def prefill_tile(q_TND: torch.Tensor, kv_pool: KvPool) -> AttentionTile:
    """For `pdserve.kernels.triton_prefill_attention`."""
    if (tile := _tuned_attention("prefill_attention", q_TND, kv_pool)) is not None:
        return tile
    head_dim = kv_pool.shape.head_dim
    if q_TND.dtype == torch.float32:
        if kv_pool.scales is not None:
            return _FLOAT32_OVER_QUANTISED
        return AttentionTile(32, 32, 4, 2) if head_dim <= 64 else AttentionTile(16, 16, 4, 2)
    if head_dim <= 64:
        return AttentionTile(128, 64, 4, 3)
    if head_dim <= 128:
        return AttentionTile(128, 64, 8, 3)
    return AttentionTile(128 if kv_pool.scales is None else 64, 32, 8, 2)


def decode_tile(q_TND: torch.Tensor, kv_pool: KvPool) -> AttentionTile:
    """For `pdserve.kernels.triton_decode_attention`, whose rows are few."""
    if (tile := _tuned_attention("decode_attention", q_TND, kv_pool)) is not None:
        return tile
    if q_TND.dtype == torch.float32:
        return AttentionTile(16, 16, 4, 2) if kv_pool.scales is None else _FLOAT32_OVER_QUANTISED
    head_dim = kv_pool.shape.head_dim
    if kv_pool.scales is not None:
        return AttentionTile(16, 32, 4, 4) if head_dim <= 128 else AttentionTile(16, 16, 4, 4)
    return AttentionTile(16, 64, 4, 3) if head_dim <= 128 else AttentionTile(16, 32, 4, 3)


def _tuned_attention(kernel: str, q_TND: torch.Tensor, kv_pool: KvPool) -> AttentionTile | None:
    return _tuned_attention_tile(
        kernel,
        q_TND.device,
        q_TND.dtype,
        kv_pool.dtype,
        kv_pool.shape.head_dim,
        q_TND.shape[1] // kv_pool.shape.num_kv_heads,
    )


@cache
def _tuned_attention_tile(
    kernel: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int
) -> AttentionTile | None:
    shape = AttentionShape(dtype_name(dtype), dtype_name(kv_dtype), head_dim, group)
    tile = tuned_tiles().get(Key(device_name(device), kernel, shape))
    return None if tile is None else AttentionTile(**tile)


class KvSplit(NamedTuple):
    """How the rows of a batch are cut, so that many programs read their KV."""

    num_chunks: int
    """Of all rows together, about, for each KV head."""
    chunk_tokens: int
    """The fewest that are worth a program: what is merged is to be little beside what is read."""
    is_fixed: bool = False
    """Chunks have just ``chunk_tokens``, however many they are then."""


_CHUNK_TOKENS = 256
_CHUNKS_PER_PROCESSOR = 4
_FIXED_SPLIT = KvSplit(num_chunks=1, chunk_tokens=_CHUNK_TOKENS, is_fixed=True)


def kv_split(device: torch.device, num_kv_heads: int, *, is_fixed: bool = False) -> KvSplit:
    """A few chunks for every multiprocessor of ``device``, or chunks that do not depend on the batch."""
    if is_fixed:
        return _FIXED_SPLIT
    return KvSplit(-(-_CHUNKS_PER_PROCESSOR * _num_processors(device) // num_kv_heads), _CHUNK_TOKENS)


class MatmulTile(NamedTuple):
    """One program's share of a product."""

    tokens: int
    outputs: int
    inputs: int
    """That are multiplied at a time."""
    num_warps: int
    num_stages: int


def matmul_tile(x_TE: torch.Tensor, num_outputs: int, *, is_int4: bool) -> MatmulTile:
    """For `pdserve.kernels.triton_quantized_matmul`, whose tiles of int4 have the inputs of a group."""
    num_tokens, num_inputs = x_TE.shape
    bucket = token_bucket(num_tokens)
    tile = _tuned_matmul_tile(x_TE.device, x_TE.dtype, bucket, num_inputs, num_outputs, is_int4=is_int4)
    if tile is not None:
        return tile
    if x_TE.dtype == torch.float32:
        return MatmulTile(16, 32, 128, 4, 1) if is_int4 else MatmulTile(16, 32, 32, 4, 2)
    if num_tokens <= _FEW_TOKENS:
        return MatmulTile(bucket, 64, 128, 4, 4)
    return MatmulTile(128, 128, 128, 8, 2) if is_int4 else MatmulTile(128, 128, 64, 8, 4)


def token_bucket(num_tokens: int) -> int:
    """Numbers of tokens in a bucket, which it is the largest of, have the same kernels."""
    return max(16, next_power_of_2(num_tokens)) if num_tokens <= _FEW_TOKENS else MANY_TOKENS


@cache
def _tuned_matmul_tile(
    device: torch.device, dtype: torch.dtype, bucket: int, num_inputs: int, num_outputs: int, *, is_int4: bool
) -> MatmulTile | None:
    shape = ProductShape(dtype_name(dtype), "int4" if is_int4 else "int8", bucket, num_inputs, num_outputs)
    tile = tuned_tiles().get(Key(device_name(device), "quantized_matmul", shape))
    return None if tile is None else MatmulTile(**tile)


MANY_TOKENS = 4096
"""Stands for all that are not few."""
_FEW_TOKENS = 64
_PROGRAMS_PER_PROCESSOR = 2
_SPLIT_INPUTS = 512
"""The fewest that are worth a program."""


def split_inputs(
    device: torch.device,
    num_tokens: int,
    num_tiles: int,
    num_inputs: int,
    tile_inputs: int,
    num_splits: int | None = None,
) -> int:
    """How many inputs a program multiplies, a multiple of ``tile_inputs``: by default all of them where there are many
    tokens, or ``num_tiles`` of outputs for every multiprocessor. The number of a few tokens makes no difference."""
    if num_splits is None:
        wanted = -(-_PROGRAMS_PER_PROCESSOR * _num_processors(device) // num_tiles)
        num_splits = min(wanted, num_inputs // _SPLIT_INPUTS) if num_tokens <= _FEW_TOKENS else 1
    return -(-num_inputs // (max(num_splits, 1) * tile_inputs)) * tile_inputs


def dtype_name(dtype: torch.dtype) -> str:
    """As the table of tiles has it."""
    return str(dtype).removeprefix("torch.")


@cache
def device_name(device: torch.device) -> str:
    """As the table of tiles has it: "NVIDIA H100 80GB HBM3", say."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter.
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
