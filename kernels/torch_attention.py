"""Attention kernels in plain torch: the path where nothing can be compiled, and for dtypes that C++ does not take.

Chosen by `pdserve.kernels.selection`. Gathers each row's pages and calls `scaled_dot_product_attention`, the heads of a
group as query rows. Runs on any device, one row at a time: right before it is fast.

Shape suffixes: T new tokens, N query heads, H KV heads, G query heads per KV head, M all heads (N + 2 H), D head dim,
C = D / 2, Q new tokens of one row, L KV length of one row, P pages of one row, S block size.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule, QkNorm


def paged_attention(
    q_TND: torch.Tensor, kv_pool: torch.Tensor, layer: int, metadata: AttentionMetadata, rule: AttentionRule
) -> torch.Tensor:
    """See `pdserve.kernels.operations.PagedAttention`."""
    assert not rule.window
    assert not rule.softcap
    starts = metadata.query_starts.tolist()
    block_starts = metadata.block_starts.tolist()
    o_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
    for row, kv_length in enumerate(metadata.kv_lengths.tolist()):
        blocks = metadata.block_ids[block_starts[row] : block_starts[row + 1]]
        k_HLD, v_HLD = _gather(kv_pool, layer, blocks, kv_length)
        span = slice(starts[row], starts[row + 1])
        o_TND[span] = _attend_row(q_TND[span], k_HLD, v_HLD, rule)
    return o_TND


def _gather(
    kv_pool: torch.Tensor, layer: int, blocks: torch.Tensor, kv_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one row, ``[H, L, D]`` each."""
    block_size = kv_pool.shape[4]
    pages_PHSD = [kv_pool[:, :, layer, axis][blocks[: -(-kv_length // block_size)]] for axis in (0, 1)]
    k_HLD, v_HLD = (pages.transpose(0, 1).flatten(1, 2)[:, :kv_length] for pages in pages_PHSD)
    return k_HLD, v_HLD


def _attend_row(q_QND: torch.Tensor, k_HLD: torch.Tensor, v_HLD: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    num_new, num_heads, head_dim = q_QND.shape
    num_kv_heads, kv_length, _ = k_HLD.shape
    group = num_heads // num_kv_heads
    q_HGQD = q_QND.view(num_new, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    mask = None
    if num_new > 1:
        mask_QL = torch.ones(num_new, kv_length, dtype=torch.bool, device=q_QND.device).tril(kv_length - num_new)
        mask = mask_QL.repeat(group, 1)
    q_1HQD = q_HGQD.reshape(1, num_kv_heads, group * num_new, head_dim)
    o_1HQD = scaled_dot_product_attention(q_1HQD, k_HLD[None], v_HLD[None], attn_mask=mask, scale=rule.scale)
    o_HGQD = o_1HQD.view(num_kv_heads, group, num_new, head_dim)
    return o_HGQD.permute(2, 0, 1, 3).reshape(num_new, num_heads, head_dim)


def rope_and_write_kv(
    qkv_TMD: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    qk_norm: QkNorm | None = None,
) -> None:
    """See `pdserve.kernels.operations.RopeAndWriteKv`."""
    assert qk_norm is None
    num_kv_heads, block_size = kv_pool.shape[1], kv_pool.shape[4]
    rotated_TND, v_THD = qkv_TMD[:, :-num_kv_heads], qkv_TMD[:, -num_kv_heads:]
    low, high = rotated_TND.float().chunk(2, dim=-1)
    cos, sin = cos_TC[:, None], sin_TC[:, None]
    rotated_TND.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
    positions = metadata.positions
    rows = torch.repeat_interleave(metadata.query_starts.diff())
    blocks = metadata.block_ids[metadata.block_starts[rows] + positions // block_size].long()
    offsets = positions % block_size
    kv_pool[:, :, layer, 0][blocks, :, offsets] = rotated_TND[:, -num_kv_heads:]
    kv_pool[:, :, layer, 1][blocks, :, offsets] = v_THD
