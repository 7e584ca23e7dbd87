"""Attention kernels in plain torch: the fallback where nothing compiles.

Chosen by `pdserve.kernels.selection`. Gathers the pages of each row and attends in float32, one row at a time, on any
device and for activations of any dtype. Favours correctness over speed.

Shape suffixes: T new tokens, N query heads, H KV heads, G query heads per KV head, M all heads (N + 2 H), D head dim,
C = D / 2, Q new tokens of one row that attend at once, L keys of one row, P pages of one row, S block size.
"""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm

from pdserve.kernels.kv_pool import LARGEST_VALUES, KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, QkNorm

_KEYS, _VALUES = 0, 1
_MAX_QUERIES = 256
"""New tokens that attend at once: bounds the memory of their scores."""


def paged_attention(
    q_TND: torch.Tensor, kv_pool: KvPool, layer: int, metadata: AttentionMetadata, rule: AttentionRule
) -> torch.Tensor:
    """See `pdserve.kernels.operations.PagedAttention`."""
    block_size = kv_pool.shape.block_size
    starts = metadata.query_starts.tolist()
    block_starts = metadata.block_starts.tolist()
    o_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    for row, kv_length in enumerate(metadata.kv_lengths.tolist()):
        span = slice(starts[row], starts[row + 1])
        first_position = kv_length - (span.stop - span.start)
        first_page = max(0, first_position - rule.window + 1) // block_size if rule.window else 0
        pages = metadata.block_ids[block_starts[row] + first_page : block_starts[row] - (-kv_length // block_size)]
        num_keys = kv_length - first_page * block_size
        k_HLD, v_HLD = (_gather(kv_pool, layer, side, pages, num_keys) for side in (_KEYS, _VALUES))
        for first in range(span.start, span.stop, _MAX_QUERIES):
            end = min(first + _MAX_QUERIES, span.stop)
            seen = slice(num_keys - (span.stop - end))
            o_TND[first:end] = _attend(q_TND[first:end].float(), k_HLD[:, seen], v_HLD[:, seen], rule)
    return o_TND


def _gather(kv_pool: KvPool, layer: int, side: int, pages: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Gather keys or values of one row's ``pages``: float32 ``[H, L, D]``."""
    pages_PHSD: torch.Tensor = kv_pool.values[:, :, layer, side][pages].float()
    if kv_pool.scales is not None:
        pages_PHSD *= kv_pool.scales[:, :, layer, side][pages][..., None]
    return pages_PHSD.transpose(0, 1).flatten(1, 2)[:, :num_keys]


def _attend(q_QND: torch.Tensor, k_HLD: torch.Tensor, v_HLD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Attend from the last Q of L positions; the first of the L may lie outside the window."""
    num_new, num_heads, head_dim = q_QND.shape
    num_kv_heads, num_keys, _ = k_HLD.shape
    q_HGQD = q_QND.view(num_new, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores_HGQL = rule.scale * (q_HGQD @ k_HLD.mT[:, None])
    if rule.softcap:
        scores_HGQL = rule.softcap * torch.tanh(scores_HGQL / rule.softcap)
    seen_QL = torch.ones(num_new, num_keys, dtype=torch.bool, device=q_QND.device).tril(num_keys - num_new)
    if rule.window:
        seen_QL = seen_QL.triu(num_keys - num_new - rule.window + 1)
    scores_HGQL.masked_fill_(~seen_QL, -torch.inf)
    if rule.sinks is not None:
        sinks_HGQ1 = rule.sinks.view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_new, -1)
        scores_HGQL = torch.cat((scores_HGQL, sinks_HGQ1), dim=-1)
    weights_HGQL = scores_HGQL.softmax(dim=-1)[..., :num_keys]
    o_HGQD = weights_HGQL @ v_HLD[:, None]
    return o_HGQD.permute(2, 0, 1, 3).reshape(num_new, num_heads, head_dim)


def rope_and_write_kv(
    qkv_TMD: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    kv_pool: KvPool,
    layer: int,
    metadata: AttentionMetadata,
    qk_norm: QkNorm | None = None,
) -> None:
    """See `pdserve.kernels.operations.RopeAndWriteKv`."""
    num_kv_heads, block_size = kv_pool.shape.num_kv_heads, kv_pool.shape.block_size
    rotated_TND, v_THD = qkv_TMD[:, :-num_kv_heads], qkv_TMD[:, -num_kv_heads:]
    normed_TND = rotated_TND.float() if qk_norm is None else _normalise(rotated_TND.float(), num_kv_heads, qk_norm)
    low, high = normed_TND.chunk(2, dim=-1)
    cos, sin = cos_TC[:, None], sin_TC[:, None]
    rotated_TND.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
    rows = torch.repeat_interleave(metadata.query_starts.diff())
    num_tokens = len(rows)  # without padding
    positions = metadata.positions[:num_tokens]
    blocks = metadata.block_ids[metadata.block_starts[rows] + positions // block_size].long()
    offsets = positions % block_size
    for side, x_THD in ((_KEYS, rotated_TND[:, -num_kv_heads:]), (_VALUES, v_THD)):
        if kv_pool.scales is None:
            kv_pool.values[:, :, layer, side][blocks, :, offsets] = x_THD[:num_tokens].to(kv_pool.dtype)
        else:
            values_THD, scales_TH = _quantise(x_THD[:num_tokens].float(), kv_pool.dtype)
            kv_pool.values[:, :, layer, side][blocks, :, offsets] = values_THD
            kv_pool.scales[:, :, layer, side][blocks, :, offsets] = scales_TH


def _quantise(x_THD: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to values ``[T, H, D]``, rounded to nearest even, and float32 scales ``[T, H]``.

    A vector with an infinity or NaN becomes NaN as a whole.
    """
    limit = LARGEST_VALUES[dtype]
    largest_TH = x_THD.abs().amax(dim=-1)
    scales_TH = torch.where(largest_TH.isfinite(), largest_TH / limit, torch.nan)
    # A scale of 0 or NaN leaves nothing to divide; a subnormal scale is too coarse to divide by safely.
    values_THD = torch.where(scales_TH[..., None] > 0, x_THD / scales_TH[..., None], 0).clamp_(-limit, limit)
    return (values_THD if dtype.is_floating_point else values_THD.round_()).to(dtype), scales_TH


def _normalise(x_TND: torch.Tensor, num_kv_heads: int, qk_norm: QkNorm) -> torch.Tensor:
    """Apply the RMS norm to queries and to the keys that follow them."""
    weights = (qk_norm.q_weight, qk_norm.k_weight)
    parts = x_TND.split_with_sizes([x_TND.shape[1] - num_kv_heads, num_kv_heads], dim=1)
    return torch.cat([rms_norm(x, w.shape, w.float(), qk_norm.eps) for x, w in zip(parts, weights, strict=True)], dim=1)
