"""Draws and nuclei in C++, through ctypes: a small part of the time of torch operations, and no temporaries.

Chosen by `pdserve.kernels.selection`; compiled by `pdserve.kernels.cpu_build` from cpu_sampling.cpp. Shapes are
asserted here, because nothing is checked on the other side. Threads: see `pdserve.kernels.cpu_threads`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pdserve.kernels.cpu_build import load_library
from pdserve.kernels.operations import Draw, Kept, Nucleus

_KEPT = np.dtype([("lowest", np.float32), ("last_equal", np.int32)])
_DRAW = np.dtype(
    [
        ("row", np.int64),
        ("seed", np.uint64),
        ("position", np.uint32),
        ("choice", np.uint32),
        ("best", np.float32),
        ("temperature", np.float32),
        ("kept", _KEPT),
    ]
)
_NUCLEUS = np.dtype(
    [
        ("row", np.int64),
        ("top_p", np.float64),
        ("best", np.float32),
        ("temperature", np.float32),
        ("lowest", np.float32),
    ],
    align=True,
)
"""These mirror the structs of cpu_sampling.cpp, and have the fields of `Kept`, `Draw` and `Nucleus` in order."""


def supports(logits_BV: torch.Tensor) -> bool:
    """Whether the C++ kernels run on ``logits_BV`` here. Compiles them if that was not done yet."""
    is_usable = logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32 and logits_BV.stride(1) == 1
    return is_usable and load_library() is not None


def draw_tokens(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """See `pdserve.kernels.operations.DrawTokens`."""
    tokens_D = np.empty(len(draws), np.int64)
    _call("draw_tokens", logits_BV, np.array(draws, _DRAW), tokens_D)
    assert tokens_D.min() >= 0, "a row whose highest logit is not the one that was given"
    tokens: list[int] = tokens_D.tolist()
    return tokens


def find_nuclei(logits_BV: torch.Tensor, nuclei: Sequence[Nucleus]) -> list[Kept]:
    """See `pdserve.kernels.operations.FindNuclei`."""
    kept_R = np.empty(len(nuclei), _KEPT)
    _call("find_nuclei", logits_BV, np.array(nuclei, _NUCLEUS), kept_R)
    return [Kept(lowest, last_equal) for lowest, last_equal in kept_R.tolist()]


def _call(name: str, logits_BV: torch.Tensor, tasks: npt.NDArray[np.void], results: npt.NDArray[np.generic]) -> None:
    """Run a kernel over tasks that each have a row of the logits."""
    library = load_library()
    assert library is not None, "the C++ kernels are not available: select_sampling_kernels was not asked"
    num_rows, vocab_size = logits_BV.shape
    assert logits_BV.stride(1) == 1
    assert logits_BV.dtype == torch.float32
    assert vocab_size < 2**31
    assert tasks["row"].min() >= 0
    assert tasks["row"].max() < num_rows
    library[name](
        ctypes.c_void_p(logits_BV.data_ptr()),
        ctypes.c_int64(logits_BV.stride(0)),
        ctypes.c_int64(vocab_size),
        ctypes.c_void_p(tasks.ctypes.data),
        ctypes.c_int64(len(tasks)),
        ctypes.c_void_p(results.ctypes.data),
    )
