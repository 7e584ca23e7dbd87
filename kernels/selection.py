"""Chooses the kernels for a pool, in one place.

The model calls what it was given and knows nothing else of it. Nothing here computes.
"""

from __future__ import annotations

import torch

from pdserve.kernels import cpu_attention, cpu_dense, cpu_gumbel, torch_attention, torch_dense, torch_gumbel
from pdserve.kernels.cpu_build import load_library
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.operations import DecoderKernels, DrawTokens

TORCH_KERNELS = DecoderKernels(
    name="torch",
    activation_dtype=None,
    pack_linear=torch_dense.pack_linear,
    rms_normalise=torch_dense.rms_normalise,
    gate=torch_dense.gate,
    rope_and_write_kv=torch_attention.rope_and_write_kv,
    paged_attention=torch_attention.paged_attention,
)
CPU_KERNELS = DecoderKernels(
    name="cpu",
    activation_dtype=torch.float32,
    pack_linear=cpu_dense.pack_linear,
    rms_normalise=cpu_dense.rms_normalise,
    gate=cpu_dense.gate,
    rope_and_write_kv=cpu_attention.rope_and_write_kv,
    paged_attention=cpu_attention.paged_attention,
)

_CPU_KERNELS_BUT_ATTENTION = CPU_KERNELS._replace(
    name="cpu-torch-attention",
    rope_and_write_kv=torch_attention.rope_and_write_kv,
    paged_attention=torch_attention.paged_attention,
)


def select_draw_tokens(logits_BV: torch.Tensor) -> DrawTokens:
    """The fastest way to draw from ``logits_BV``, in the same manner."""
    return cpu_gumbel.draw_tokens if cpu_gumbel.supports(logits_BV) else torch_gumbel.draw_tokens


def select_kernels(kv_pool: KvPool) -> DecoderKernels:
    """The fastest implementation that runs on ``kv_pool`` here: compiled C++, or plain torch where it cannot be."""
    if kv_pool.values.device.type != "cpu" or load_library() is None:
        return TORCH_KERNELS
    return CPU_KERNELS if cpu_attention.supports(kv_pool) else _CPU_KERNELS_BUT_ATTENTION


def matrix_dtype(dtype: torch.dtype) -> torch.dtype:
    """What weights of ``dtype`` are held in on this CPU."""
    return torch_dense.matrix_dtype(dtype) if load_library() is None else dtype
