"""Bundles the Triton kernels for the decoder and the sampler.

`pdserve.kernels.selection` imports it only on a GPU: Triton is slow to import, and CPU workers run without it.
"""

from __future__ import annotations

from pdserve.kernels.operations import DecoderKernels, SamplingKernels
from pdserve.kernels.triton import attention as triton_attention
from pdserve.kernels.triton import experts as triton_experts
from pdserve.kernels.triton import gate as triton_gate
from pdserve.kernels.triton import norm as triton_norm
from pdserve.kernels.triton import quantized_matmul as triton_quantized_matmul
from pdserve.kernels.triton import rope as triton_rope
from pdserve.kernels.triton import sampling as triton_sampling

TRITON_KERNELS = DecoderKernels(
    name="triton",
    activation_dtype=None,
    pack_linear=triton_quantized_matmul.pack_linear,
    pack_experts=triton_experts.pack_experts,
    sort_pairs=triton_experts.sort_pairs,
    combine=triton_experts.combine,
    rms_normalise=triton_norm.rms_normalise,
    gate=triton_gate.gate,
    rope_and_write_kv=triton_rope.rope_and_write_kv,
    paged_attention=triton_attention.paged_attention,
    is_capturable=True,
)
TRITON_SAMPLING = SamplingKernels(triton_sampling.draw_tokens, triton_sampling.find_top_p)
