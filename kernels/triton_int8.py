"""Vectors of KV as int8 and a scale, as every kernel that writes them does it: bit for bit what the C++ kernels write.

Called by kernels of Triton. Launches nothing. The largest magnitude becomes 127, and the rest is rounded to the nearest
even. A vector with an infinity or NaN is NaN as a whole.

Shape suffixes: P vectors, C some of their elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def int8_scale(largest_P: tl.tensor, is_finite_P: tl.tensor):
    """float32 ``[P]``, of vectors with these largest magnitudes."""
    return tl.where(is_finite_P, tl.div_rn(largest_P, tl.full(largest_P.shape, 127.0, tl.float32)), float("nan"))


@triton.jit
def is_finite(x_PC: tl.tensor):
    """``[P]``: whether all of a vector is."""
    return tl.min((tl.abs(x_PC) < float("inf")).to(tl.int32), 1) == 1


@triton.jit
def int8_values(x_PC: tl.tensor, scale_P: tl.tensor):
    """float32 ``[P, C]`` over its scales, rounded."""
    # Without a scale there is nothing to divide; a subnormal one is too coarse to be divided by safely.
    is_scaled_PC = (scale_P > 0.0)[:, None] & (x_PC == x_PC)
    divisor_PC = tl.where(is_scaled_PC, scale_P[:, None] + tl.zeros_like(x_PC), 1.0)
    ratio_PC = tl.div_rn(tl.where(is_scaled_PC, x_PC, 0.0), divisor_PC)
    ratio_PC = tl.minimum(tl.maximum(ratio_PC, -127.0), 127.0)
    # Adding 1.5 * 2^23 leaves no bits behind the point, and the sum is rounded to the nearest even.
    return ((ratio_PC + 12582912.0) - 12582912.0).to(tl.int8)
