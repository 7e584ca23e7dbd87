"""How many threads the compiled kernels run on, and on which cores.

The kernels have a team of threads of their own (cpu_threads.h): one a process, one thread until told otherwise. What
little torch computes beside them runs on the calling thread alone, lest OpenMP's threads spin on the same cores. Where
nothing can be compiled, torch has the threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import c_int, c_int32

import torch

from pdserve.kernels.cpu.build import load_library


def use_cores(cores: Sequence[int]) -> None:
    """From now on, compute on ``cores`` with a thread on each, of which the calling one is the first."""
    os.sched_setaffinity(0, cores)
    use_threads(len(cores), cores)


def use_threads(num_threads: int, cores: Sequence[int] = ()) -> None:
    """From now on, compute on so many threads; those beside the calling one on ``cores`` only, if any are given.

    Must not be called while a kernel runs.
    """
    assert num_threads >= 1
    library = load_library()
    if library is None:
        torch.set_num_threads(num_threads)
        return
    torch.set_num_threads(1)
    library.use_threads(c_int(num_threads), (c_int32 * len(cores))(*cores), c_int(len(cores)))
