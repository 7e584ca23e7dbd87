"""Ties a process to its parent: no worker, router or transfer process outlives a parent that was killed."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel for a signal when the thread that started this process is gone. Linux only.

    Args:
        parent: its process, where it is known, to notice that it died before the kernel was asked.

    Raises:
        OSError: the kernel refuses.
    """
    parent = parent or os.getppid()
    if _libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
