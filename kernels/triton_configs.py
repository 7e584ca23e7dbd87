"""How the kernels of Triton cut their work, per GPU and shape: a table, so that nothing is tuned while serving.

Read by the launchers. Every entry compiles for its GPU without spilling registers, which the tests of
`pdserve.bench.kernels_compile` hold it to; what is fastest is for a benchmark on that GPU to say.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton import next_power_of_2

from pdserve.kernels.kv_pool import KvPool


class AttentionTile(NamedTuple):
    """One program's share of an attention."""

    rows: int
    """(token, head) pairs that attend together: from 64 on they use Hopper's wgmma."""
    keys: int
    """Keys that they attend to at a time."""
    num_warps: int
    num_stages: int
    """Tiles of keys that are loaded ahead."""


def prefill_tile(q_TND: torch.Tensor, kv_pool: KvPool) -> AttentionTile:
    """For `pdserve.kernels.triton_prefill_attention`."""
    head_dim = kv_pool.shape.head_dim
    if q_TND.dtype == torch.float32:
        return AttentionTile(32, 32, 4, 2) if head_dim <= 64 else AttentionTile(16, 16, 4, 2)
    if head_dim <= 64:
        return AttentionTile(128, 64, 4, 3)
    if head_dim <= 128:
        return AttentionTile(128, 64, 8, 3)
    return AttentionTile(128, 32, 8, 2)


def decode_tile(q_TND: torch.Tensor, kv_pool: KvPool) -> AttentionTile:
    """For `pdserve.kernels.triton_decode_attention`, whose rows are few."""
    if q_TND.dtype == torch.float32:
        return AttentionTile(16, 16, 4, 2)
    head_dim = kv_pool.shape.head_dim
    if kv_pool.dtype == torch.int8 and head_dim > 64:
        return AttentionTile(16, 32, 4, 4) if head_dim <= 128 else AttentionTile(16, 16, 4, 4)
    return AttentionTile(16, 64, 4, 3) if head_dim <= 128 else AttentionTile(16, 32, 4, 3)


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


def matmul_tile(num_tokens: int, dtype: torch.dtype, *, is_int4: bool) -> MatmulTile:
    """For `pdserve.kernels.triton_quantized_matmul`, whose tiles of int4 have the inputs of a group.

    Args:
        dtype: of the activations.
    """
    if dtype == torch.float32:
        return MatmulTile(16, 32, 128, 4, 1) if is_int4 else MatmulTile(16, 32, 32, 4, 2)
    if num_tokens <= _FEW_TOKENS:
        return MatmulTile(max(16, next_power_of_2(num_tokens)), 64, 128, 4, 4)
    return MatmulTile(128, 128, 128, 8, 2) if is_int4 else MatmulTile(128, 128, 64, 8, 4)


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
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter.
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
