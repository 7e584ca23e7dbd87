"""RMS norm, one program per token.

Called through `pdserve.kernels.selection`. Computes in float32. Has no variant that adds a residual: the decoder's
products add to the residual themselves.

Target: ``bytes / (0.9 bandwidth)`` with ``bytes = 2 T E b``; under about 8 MB the launch costs more.

Shape suffixes: T tokens, E features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_normalise(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """See `pdserve.kernels.operations.RmsNormalise`; ``x_TE`` may have a token stride."""
    num_tokens, num_features = x_TE.shape
    assert x_TE.stride(1) == 1
    assert weight_E.shape == (num_features,)
    assert weight_E.is_contiguous()
    y_TE = torch.empty((num_tokens, num_features), dtype=x_TE.dtype, device=x_TE.device)
    padded = triton.next_power_of_2(num_features)
    _norm_kernel[num_tokens,](
        x_TE,
        weight_E,
        y_TE,
        x_TE.stride(0),
        eps,
        NUM_FEATURES=num_features,
        PADDED=padded,
        num_warps=min(max(padded // 512, 1), 16),
    )
    return y_TE


@triton.jit
def _norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    NUM_FEATURES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid ``(T,)``. Pointers: x ``[T, E]`` of token stride ``x_stride``, weight ``[E]``, y ``[T, E]``."""
    token = tl.program_id(0).to(tl.int64)
    feature_E = tl.arange(0, PADDED)
    is_feature_E = feature_E < NUM_FEATURES
    x_E = tl.load(x_ptr + token * x_stride + feature_E, mask=is_feature_E, other=0).to(tl.float32)
    weight_E = tl.load(weight_ptr + feature_E, mask=is_feature_E, other=0).to(tl.float32)
    y_E = x_E / tl.sqrt(tl.sum(x_E * x_E) / NUM_FEATURES + eps) * weight_E
    tl.store(y_ptr + token * NUM_FEATURES + feature_E, y_E.to(y_ptr.dtype.element_ty), mask=is_feature_E)
