"""How the kernels of Triton cut their work, per GPU and shape: a table, so that nothing is tuned while serving.

Read by the launchers. Every entry compiles for its GPU without spilling registers, which the tests of
`pdserve.bench.kernels_compile` hold it to; what is fastest is for a benchmark on that GPU to say.
"""

from __future__ import annotations

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
