"""The weighted sum of experts in C++, called through ctypes. Arguments are asserted here; C++ checks nothing.

`pdserve.kernels.selection` chooses it; `pdserve.kernels.cpu.build` compiles pointwise.cpp.

Shape suffixes: T tokens, K experts of a token, P = T K pairs, E features.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from pdserve.kernels.cpu.build import kernel


def combine(y_PE: torch.Tensor, places_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """See `pdserve.kernels.operations.Combine`."""
    (num_rows, num_slots), width = places_TK.shape, y_PE.shape[1]
    assert weights_TK.shape == places_TK.shape
    for tensor, dtype in ((y_PE, torch.float32), (places_TK, torch.int64), (weights_TK, torch.float32)):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
    sum_TE = torch.empty(num_rows, width)
    pointers = (tensor.data_ptr() for tensor in (y_PE, places_TK, weights_TK, sum_TE))
    _combine()(*pointers, num_rows, num_slots, width)
    return sum_TE


@cache
def _combine() -> Any:
    return kernel("dense_combine", *[c_void_p] * 4, *[c_int64] * 3)
