"""How the kernels of Triton cut their work, per GPU and shape: a table, so that nothing is tuned while serving.

Read by the launchers. Every entry compiles for its GPU without spilling registers, which the tests of
`pdserve.bench.kernels_compile` hold it to; what is fastest is for a benchmark on that GPU to say.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

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


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter.
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
