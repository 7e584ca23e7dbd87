"""Thread count and cores of the compiled kernels.

Each process has one thread team (threads.h), of one thread by default. torch then computes on the calling thread
alone, so that OpenMP threads do not spin on the same cores. Where nothing compiles, torch gets the threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import c_int, c_int32

import torch

from pdserve.kernels.cpu.build import load_library


def use_cores(cores: Sequence[int]) -> None:
    """Compute on ``cores`` from now on, with one thread per core including the calling thread."""
    os.sched_setaffinity(0, cores)
    use_threads(len(cores), cores)


def use_threads(num_threads: int, cores: Sequence[int] = ()) -> None:
    """Compute on ``num_threads`` from now on; ``cores``, if given, bind every thread except the calling one.

    Must not be called while a kernel runs.
    """
    assert num_threads >= 1
    library = load_library()
    if library is None:
        torch.set_num_threads(num_threads)
        return
    torch.set_num_threads(1)
    library.use_threads(c_int(num_threads), (c_int32 * len(cores))(*cores), c_int(len(cores)))
