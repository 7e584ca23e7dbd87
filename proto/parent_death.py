"""Ties a process to its parent: no worker, router or transfer process outlives a killed parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Request a signal from the kernel when the thread that started this process is gone. Linux only.

    Args:
        parent: process id of the parent, if known, to detect that it died before this call.

    Raises:
        OSError: the kernel refuses.
    """
    parent = parent or os.getppid()
    if _libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
