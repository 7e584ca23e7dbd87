"""C++ draws and top-p, called through ctypes: much faster than torch operations, and without temporaries.

`pdserve.kernels.selection` chooses them; `pdserve.kernels.cpu.build` compiles sampling.cpp. Shapes are asserted here;
the C++ side checks nothing. Runs on the threads of `pdserve.kernels.cpu.threads`.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from pdserve.kernels.cpu.build import kernel
from pdserve.kernels.operations import DrawTensors, Thresholds, TopPTensors

# As declared in sampling.cpp.
_LOGITS_AND_COUNT = (c_void_p, c_int64, c_int64, c_int64)
_NUM_POINTERS = {"draw_tokens": 9, "find_top_p": 7}
_DRAW_DTYPES = (torch.int32, torch.int64, *[torch.int32] * 2, *[torch.float32] * 3, torch.int32)
_TOP_P_DTYPES = (torch.int32, torch.float64, *[torch.float32] * 3)


def draw_tokens(logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """See `pdserve.kernels.operations.DrawTokens`; -1 where the best logit is not the row's highest one."""
    token_D = torch.empty(len(draws.row), dtype=torch.int64)
    _call("draw_tokens", logits_BV, (*draws, token_D), (*_DRAW_DTYPES, torch.int64))
    return token_D


def find_top_p(logits_BV: torch.Tensor, rows: TopPTensors) -> Thresholds:
    """See `pdserve.kernels.operations.FindTopP`."""
    found = Thresholds(torch.empty_like(rows.lowest), torch.empty_like(rows.row))
    _call("find_top_p", logits_BV, (*rows, *found), (*_TOP_P_DTYPES, torch.float32, torch.int32))
    return found


def _call(
    name: str, logits_BV: torch.Tensor, fields: tuple[torch.Tensor, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Run a kernel over the logits rows that the first field selects."""
    (num_rows, vocab_size), rows = logits_BV.shape, fields[0].numpy()
    assert logits_BV.stride(1) == 1
    assert logits_BV.dtype == torch.float32
    assert vocab_size < 2**31
    assert rows.min() >= 0
    assert rows.max() < num_rows
    for field, dtype in zip(fields, dtypes, strict=True):
        assert field.dtype == dtype
        assert field.shape == rows.shape
        assert field.is_contiguous()
    pointers = [field.data_ptr() for field in fields]
    _function(name)(logits_BV.data_ptr(), logits_BV.stride(0), vocab_size, len(rows), *pointers)


@cache
def _function(name: str) -> Any:
    return kernel(name, *_LOGITS_AND_COUNT, *[c_void_p] * _NUM_POINTERS[name])
