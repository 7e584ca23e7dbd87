"""How the kernels of Triton cut their work, per GPU and shape: a table, so that nothing is tuned while serving.

Read by the launchers. What was measured on a GPU is in `pdserve.kernels.triton.tuned_tiles`, and comes first; the rules
here hold for what was not. Every tile compiles for its GPU without spilling registers, which the tests of
`pdserve.bench.kernels_compile` hold both to.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton import next_power_of_2

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.triton.tuned_tiles import AttentionShape, Key, ProductShape, Tile, tuned_tiles


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
    """For `pdserve.kernels.triton.prefill_attention`."""
    if (tuned := _tuned("prefill_attention", q_TND, kv_pool)) is not None:
        return AttentionTile(**tuned)
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
    """For `pdserve.kernels.triton.decode_attention`, whose rows are few."""
    if (tuned := _tuned("decode_attention", q_TND, kv_pool)) is not None:
        return AttentionTile(**tuned)
    if q_TND.dtype == torch.float32:
        return AttentionTile(16, 16, 4, 2) if kv_pool.scales is None else _FLOAT32_OVER_QUANTISED
    head_dim = kv_pool.shape.head_dim
    if kv_pool.scales is not None:
        return AttentionTile(16, 32, 4, 4) if head_dim <= 128 else AttentionTile(16, 16, 4, 4)
    return AttentionTile(16, 64, 4, 3) if head_dim <= 128 else AttentionTile(16, 32, 4, 3)


def _tuned(kernel: str, q_TND: torch.Tensor, kv_pool: KvPool) -> Tile | None:
    """What the table has for an attention."""
    group = q_TND.shape[1] // kv_pool.shape.num_kv_heads
    shape = AttentionShape(dtype_name(q_TND.dtype), dtype_name(kv_pool.dtype), kv_pool.shape.head_dim, group)
    return tuned_tiles().get(Key(device_name(q_TND.device), kernel, shape))


class KvSplit(NamedTuple):
    """How the rows of a batch are cut, so that many programs read their KV."""

    num_chunks: int
    """Of all rows together, about, for each KV head."""
    chunk_tokens: int
    """The fewest that are worth a program: what is merged is to be little beside what is read."""
    is_fixed: bool = False
    """Chunks have just ``chunk_tokens``, however many they are then."""


class KvCut(NamedTuple):
    """What a split follows from."""

    chunks_per_processor: int
    """Of all rows and KV heads together, about."""
    chunk_tokens: int
    """As of `KvSplit`; a multiple of the keys of any tile."""

    def split(self, device: torch.device, num_kv_heads: int) -> KvSplit:
        """For batches on ``device``."""
        return KvSplit(-(-self.chunks_per_processor * _num_processors(device) // num_kv_heads), self.chunk_tokens)


_CUT = KvCut(chunks_per_processor=4, chunk_tokens=256)
_FIXED_SPLIT = KvSplit(num_chunks=1, chunk_tokens=_CUT.chunk_tokens, is_fixed=True)


def kv_split(q_TND: torch.Tensor, kv_pool: KvPool, *, is_fixed: bool = False) -> KvSplit:
    """For `pdserve.kernels.triton.decode_attention`: a few chunks for every multiprocessor of the device, or chunks
    that do not depend on the batch."""
    if is_fixed:
        return _FIXED_SPLIT
    tuned = _tuned("kv_split", q_TND, kv_pool)
    cut = _CUT if tuned is None else KvCut(**tuned)
    return cut.split(q_TND.device, kv_pool.shape.num_kv_heads)


class MatmulTile(NamedTuple):
    """One program's share of a product."""

    tokens: int
    outputs: int
    inputs: int
    """That are multiplied at a time."""
    num_warps: int
    num_stages: int


def matmul_tile(x_TE: torch.Tensor, num_outputs: int, *, is_int4: bool) -> MatmulTile:
    """For `pdserve.kernels.triton.quantized_matmul`, whose tiles of int4 have the inputs of a group."""
    num_tokens, num_inputs = x_TE.shape
    bucket = token_bucket(num_tokens)
    shape = ProductShape(dtype_name(x_TE.dtype), "int4" if is_int4 else "int8", bucket, num_inputs, num_outputs)
    tuned = tuned_tiles().get(Key(device_name(x_TE.device), "quantized_matmul", shape))
    if tuned is not None:
        return MatmulTile(**tuned)
    if x_TE.dtype == torch.float32:
        return MatmulTile(16, 32, 128, 4, 1) if is_int4 else MatmulTile(16, 32, 32, 4, 2)
    if num_tokens <= _FEW_TOKENS:
        return MatmulTile(bucket, 64, 128, 4, 4)
    return MatmulTile(128, 128, 128, 8, 2) if is_int4 else MatmulTile(128, 128, 64, 8, 4)


def token_bucket(num_tokens: int) -> int:
    """Numbers of tokens in a bucket, which it is the largest of, have the same kernels."""
    return max(16, next_power_of_2(num_tokens)) if num_tokens <= _FEW_TOKENS else MANY_TOKENS


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


@cache
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
