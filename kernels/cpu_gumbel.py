"""`pdserve.kernels.torch_gumbel` in C++, through ctypes: a tenth of the time and no temporaries.

Chosen by `pdserve.kernels.selection`; compiled by `pdserve.kernels.cpu_build` from cpu_gumbel.cpp. Shapes are asserted
here, because nothing is checked on the other side. Runs on as many threads as torch does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from pdserve.kernels.cpu_build import load_library
from pdserve.kernels.operations import Draw

_DRAW = np.dtype(
    [
        ("row", np.int64),
        ("seed", np.uint64),
        ("position", np.uint32),
        ("choice", np.uint32),
        ("best", np.float32),
        ("temperature", np.float32),
        ("lowest", np.float32),
        ("last_equal", np.int32),
    ]
)
"""Mirrors ``struct Draw`` of cpu_gumbel.cpp, and the fields of `Draw` in order."""


def supports(logits_BV: torch.Tensor) -> bool:
    """Whether the C++ kernel runs on ``logits_BV`` here. Compiles it if that was not done yet."""
    is_usable = logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32 and logits_BV.stride(1) == 1
    return is_usable and load_library() is not None


def draw_tokens(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """See `pdserve.kernels.operations.DrawTokens`."""
    library = load_library()
    assert library is not None, "the C++ kernels are not available: select_draw_tokens was not asked"
    packed_D = np.array(draws, _DRAW)
    tokens_D = np.empty(len(draws), np.int64)
    num_rows, vocab_size = logits_BV.shape
    assert logits_BV.stride(1) == 1
    assert logits_BV.dtype == torch.float32
    assert vocab_size < 2**31
    assert packed_D["row"].min() >= 0
    assert packed_D["row"].max() < num_rows
    library.draw_tokens(
        ctypes.c_void_p(logits_BV.data_ptr()),
        ctypes.c_int64(logits_BV.stride(0)),
        ctypes.c_int64(vocab_size),
        ctypes.c_void_p(packed_D.ctypes.data),
        ctypes.c_int64(len(draws)),
        ctypes.c_void_p(tokens_D.ctypes.data),
        ctypes.c_int(torch.get_num_threads()),
    )
    assert tokens_D.min() >= 0, "a row whose highest logit is not the one that was given"
    tokens: list[int] = tokens_D.tolist()
    return tokens
