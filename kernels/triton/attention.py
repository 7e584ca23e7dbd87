"""Paged attention on a GPU: splits a batch's rows between the decode and the prefill kernel.

Called through `pdserve.kernels.selection`. Memory-bound rows with few new tokens go to the decode kernel, all others to
the prefill kernel; a batch of both kinds takes two launches over one output. Launches depend only on host-side numbers
and never wait for the device.

Shape suffixes: T new tokens, N query heads, D head dim.
"""

from __future__ import annotations

import torch

from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import SHORT_TOKENS, AttentionMetadata
from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton.decode_attention import decode_attention
from pdserve.kernels.triton.prefill_attention import prefill_attention

_SHORT_QUERIES = 32
"""Most (token, head) pairs per KV head of a short row: far below the point where compute bounds it."""


def paged_attention(
    q_TND: torch.Tensor, kv_pool: KvPool, layer: int, metadata: AttentionMetadata, rule: AttentionRule
) -> torch.Tensor:
    """See `pdserve.kernels.operations.PagedAttention`; ``metadata`` is on the device."""
    o_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    group = q_TND.shape[1] // kv_pool.shape.num_kv_heads
    max_short = min(max(_SHORT_QUERIES // group, 1), SHORT_TOKENS)
    if metadata.min_new_tokens <= max_short:
        # Tiles and workspace are of one token, or of all that short rows may have: two kernels for each number of rows.
        max_new_tokens = 1 if metadata.most_short_tokens == 1 else min(metadata.max_new_tokens, max_short)
        decode_attention(q_TND, o_TND, kv_pool, layer, metadata, rule, max_new_tokens=max_new_tokens)
    if metadata.max_new_tokens > max_short:
        prefill_attention(q_TND, o_TND, kv_pool, layer, metadata, rule, min_new_tokens=max_short + 1)
    return o_TND
