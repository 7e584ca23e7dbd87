"""MLP gate: the activation of one half of the features times the other half.

Called through `pdserve.kernels.selection`. Computes in float32.

Target: ``bytes / (0.9 bandwidth)`` with ``bytes = 3 T I b``.

Shape suffixes: T tokens, F = 2 I features, I features of a half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve.kernels.operations import SWIGLU_ALPHA, SWIGLU_LIMIT
from pdserve.kernels.triton.flash import tanh_of_power

_TILE = 1024
# On the right of tensors: a constant on the left makes the product a constant in the interpreter of Triton 3.7.
_LOG2_E = tl.constexpr(1.4426950408889634)
_LIMIT, _ALPHA = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_ALPHA)
_GELU_FACTOR = tl.constexpr(0.7978845608028654)
"""sqrt(2 / pi)."""


def gate(gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """See `pdserve.kernels.operations.Gate`."""
    assert activation in ("silu", "gelu_tanh", "swiglu_oai")
    assert gate_up_TF.is_contiguous()
    num_tokens, num_features = gate_up_TF.shape
    half = num_features // 2
    y_TI = torch.empty((num_tokens, half), dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    _gate_kernel[num_tokens, triton.cdiv(half, _TILE)](
        gate_up_TF, y_TI, HALF=half, TILE=_TILE, ACTIVATION=activation, num_warps=4
    )
    return y_TI


@triton.jit
def _gate_kernel(
    gate_up_ptr: tl.tensor, y_ptr: tl.tensor, HALF: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Grid ``(T, tiles of a half)``. Pointers: gate_up ``[T, 2 I]``, y ``[T, I]``."""
    token = tl.program_id(0).to(tl.int64)
    feature_I = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_feature_I = feature_I < HALF
    row_ptr = gate_up_ptr + token * (2 * HALF)
    gate_I = tl.load(row_ptr + feature_I, mask=is_feature_I, other=0).to(tl.float32)
    up_I = tl.load(row_ptr + HALF + feature_I, mask=is_feature_I, other=0).to(tl.float32)
    if ACTIVATION == "swiglu_oai":
        gate_I = tl.where(gate_I > _LIMIT, _LIMIT, gate_I)  # Keeps NaN.
        up_I = tl.where(up_I > _LIMIT, _LIMIT, tl.where(up_I < -_LIMIT, -_LIMIT, up_I)) + 1.0
        active_I = gate_I / (1.0 + tl.exp2(gate_I * (_ALPHA * -_LOG2_E)))
    elif ACTIVATION == "silu":
        active_I = gate_I / (1.0 + tl.exp2(gate_I * -_LOG2_E))
    else:
        inner_I = (gate_I + 0.044715 * gate_I * gate_I * gate_I) * _GELU_FACTOR
        active_I = 0.5 * gate_I * (1.0 + tanh_of_power(inner_I * (2 * _LOG2_E)))
    tl.store(y_ptr + token * HALF + feature_I, (active_I * up_I).to(y_ptr.dtype.element_ty), mask=is_feature_I)
