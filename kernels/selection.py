"""Chooses the attention kernels for a pool, in one place.

Every implementation is a pair of functions with the signatures below; the model calls the pair it was given and knows
nothing else of it. Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from pdserve.kernels import cpu_attention, torch_attention
from pdserve.kernels.metadata import AttentionMetadata

PagedAttention = Callable[[torch.Tensor, torch.Tensor, int, AttentionMetadata], torch.Tensor]
"""``paged_attention(q_TND, kv_pool, layer, metadata) -> o_TND``: causal attention of every new token over its row's KV.

``q_TND`` is ``[num_tokens, num_heads, head_dim]``, rotated, of the pool's dtype, contiguous but for the stride of its
tokens; ``kv_pool`` is laid out as `pdserve.contracts.kv_layout.KvLayout.shape` and already holds the new tokens' KV.
The result is contiguous.
"""

RopeAndWriteKv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, AttentionMetadata], None]
"""``rope_and_write_kv(qkv_TMD, cos_TC, sin_TC, kv_pool, layer, metadata)``: rotate and scatter, in place.

``qkv_TMD`` is ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``, contiguous: queries, keys, values. Its queries
and keys are rotated where they are (halves paired, as in Llama checkpoints of Hugging Face); keys and values are then
copied to the new tokens' slots. ``cos_TC`` and ``sin_TC`` are float32 ``[num_tokens, head_dim / 2]``.
"""


class AttentionKernels(NamedTuple):
    """One implementation of both operations."""

    name: str
    paged_attention: PagedAttention
    rope_and_write_kv: RopeAndWriteKv


TORCH_KERNELS = AttentionKernels("torch", torch_attention.paged_attention, torch_attention.rope_and_write_kv)
CPU_KERNELS = AttentionKernels("cpu", cpu_attention.paged_attention, cpu_attention.rope_and_write_kv)


def select_kernels(kv_pool: torch.Tensor) -> AttentionKernels:
    """The fastest implementation that runs on ``kv_pool`` here: compiled C++, or plain torch where it cannot be."""
    return CPU_KERNELS if cpu_attention.supports(kv_pool) else TORCH_KERNELS
