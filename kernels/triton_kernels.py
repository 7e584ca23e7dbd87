"""The kernels of a GPU, as a decoder and sampling take them. Imported by `pdserve.kernels.selection` where there is
one: Triton takes a while to be imported, and workers on CPUs do without."""

from __future__ import annotations

from pdserve.kernels import (
    triton_attention,
    triton_gate,
    triton_norm,
    triton_quantized_matmul,
    triton_rope,
    triton_sampling,
)
from pdserve.kernels.operations import DecoderKernels, SamplingKernels

TRITON_KERNELS = DecoderKernels(
    name="triton",
    activation_dtype=None,
    pack_linear=triton_quantized_matmul.pack_linear,
    rms_normalise=triton_norm.rms_normalise,
    gate=triton_gate.gate,
    rope_and_write_kv=triton_rope.rope_and_write_kv,
    paged_attention=triton_attention.paged_attention,
    is_capturable=True,
)
TRITON_SAMPLING = SamplingKernels(triton_sampling.draw_tokens, triton_sampling.find_top_p)
