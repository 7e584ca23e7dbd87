"""KV quantisation: vectors as int8 or float8_e4m3fn values and a scale, bit for bit as in
`pdserve.kernels.torch.attention`.

Called by every Triton kernel that writes KV. Launches nothing. The largest magnitude maps to the dtype's largest value;
values round to nearest even. A vector with an infinity or NaN becomes NaN as a whole.

Shape suffixes: P vectors, C some of their elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve.kernels.kv_pool import LARGEST_VALUES

_LARGEST_INT8 = tl.constexpr(LARGEST_VALUES[torch.int8])
_LARGEST_FLOAT8 = tl.constexpr(LARGEST_VALUES[torch.float8_e4m3fn])


@triton.jit
def kv_scale(largest_P: tl.tensor, is_finite_P: tl.tensor, DTYPE: tl.constexpr):
    """float32 ``[P]``, of vectors with these largest magnitudes that become ``DTYPE``."""
    LARGEST: tl.constexpr = _LARGEST_FLOAT8 if DTYPE.is_fp8() else _LARGEST_INT8
    return tl.where(is_finite_P, tl.div_rn(largest_P, tl.full(largest_P.shape, LARGEST, tl.float32)), float("nan"))


@triton.jit
def is_finite(x_PC: tl.tensor):
    """``[P]``: whether all of a vector is."""
    return tl.min((tl.abs(x_PC) < float("inf")).to(tl.int32), 1) == 1


@triton.jit
def kv_values(x_PC: tl.tensor, scale_P: tl.tensor, DTYPE: tl.constexpr):
    """float32 ``[P, C]`` over its scales, rounded."""
    LARGEST: tl.constexpr = _LARGEST_FLOAT8 if DTYPE.is_fp8() else _LARGEST_INT8
    # Without a scale there is nothing to divide; a subnormal one is too coarse to be divided by safely.
    is_scaled_PC = (scale_P > 0.0)[:, None] & (x_PC == x_PC)
    divisor_PC = tl.where(is_scaled_PC, scale_P[:, None] + tl.zeros_like(x_PC), 1.0)
    ratio_PC = tl.div_rn(tl.where(is_scaled_PC, x_PC, 0.0), divisor_PC)
    ratio_PC = tl.minimum(tl.maximum(ratio_PC, -LARGEST), LARGEST)
    if not DTYPE.is_fp8():
        # Adding 1.5 * 2^23 leaves no bits behind the point, and the sum is rounded to the nearest even.
        ratio_PC = (ratio_PC + 12582912.0) - 12582912.0
    return ratio_PC.to(DTYPE)
