"""Kernel selection: the one place that picks an implementation for a pool or device.

Executors call it once; the model calls the kernels it receives and never asks which they are. Computes nothing.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from pdserve.kernels.cpu import attention as cpu_attention
from pdserve.kernels.cpu import dense as cpu_dense
from pdserve.kernels.cpu import sampling as cpu_sampling
from pdserve.kernels.cpu.build import load_library
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.operations import DecoderKernels, SamplingKernels
from pdserve.kernels.torch import attention as torch_attention
from pdserve.kernels.torch import dense as torch_dense
from pdserve.kernels.torch import experts as torch_experts
from pdserve.kernels.torch import sampling as torch_sampling

TORCH_KERNELS = DecoderKernels(
    name="torch",
    activation_dtype=None,
    pack_linear=torch_dense.pack_linear,
    pack_experts=torch_experts.pack_experts,
    sort_pairs=torch_experts.sort_pairs,
    combine=torch_experts.combine,
    rms_normalise=torch_dense.rms_normalise,
    gate=torch_dense.gate,
    rope_and_write_kv=torch_attention.rope_and_write_kv,
    paged_attention=torch_attention.paged_attention,
)
CPU_KERNELS = DecoderKernels(
    name="cpu",
    activation_dtype=torch.float32,
    pack_linear=cpu_dense.pack_linear,
    pack_experts=cpu_dense.pack_experts,
    sort_pairs=torch_experts.sort_pairs,
    combine=cpu_dense.combine,
    rms_normalise=cpu_dense.rms_normalise,
    gate=cpu_dense.gate,
    rope_and_write_kv=cpu_attention.rope_and_write_kv,
    paged_attention=cpu_attention.paged_attention,
    are_weights_shared=True,
    # A few row blocks of dense.cpp: every core gets a share, and its working set fits the caches.
    mlp_rows=256,
)

_CPU_KERNELS_BUT_ATTENTION = CPU_KERNELS._replace(
    name="cpu-torch-attention",
    rope_and_write_kv=torch_attention.rope_and_write_kv,
    paged_attention=torch_attention.paged_attention,
)
TORCH_SAMPLING = SamplingKernels(torch_sampling.draw_tokens, torch_sampling.find_top_p)
CPU_SAMPLING = SamplingKernels(cpu_sampling.draw_tokens, cpu_sampling.find_top_p)


def select_sampling_kernels(device: torch.device) -> SamplingKernels:
    """Return the fastest implementation for logits on ``device``, by the rule of `select_kernels`."""
    if device.type == "cpu":
        return TORCH_SAMPLING if load_library() is None else CPU_SAMPLING
    if find_spec("triton") is None:
        return TORCH_SAMPLING
    from pdserve.kernels.triton.kernels import TRITON_SAMPLING

    return TRITON_SAMPLING


def select_kernels(kv_pool: KvPool) -> DecoderKernels:
    """Return the fastest implementation that runs on ``kv_pool``: C++ on a CPU, Triton on a GPU, plain torch where
    neither compiles."""
    device = kv_pool.values.device
    if device.type != "cpu":
        return _gpu_kernels()._replace(device=device)
    if load_library() is None:
        return TORCH_KERNELS
    return CPU_KERNELS if cpu_attention.supports(kv_pool) else _CPU_KERNELS_BUT_ATTENTION


def _gpu_kernels() -> DecoderKernels:
    if find_spec("triton") is None:
        return TORCH_KERNELS
    from pdserve.kernels.triton.kernels import TRITON_KERNELS

    return TRITON_KERNELS
