"""Keeps a machine's cores from going to sleep while something is measured on them.

A core that has nothing to do is halted, and a virtual one is then taken away by the machine's host: what wakes it, a
message or a timer, waits until it comes back, now and then for milliseconds. Servers that are to answer fast are set up
not to sleep; on a virtual machine a process at the lowest priority on each core has the same effect. All it does is to
give way to anything else on that core. It is no good where CPU time is limited for all processes together, as in a
container with fewer CPUs than it sees.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_STAY_AWAKE = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {core})
while os.getppid() == {parent}:
    for _ in range(10**5):
        os.sched_yield()
"""


@contextmanager
def awake_cores() -> Iterator[None]:
    """All cores that this process may use are kept awake, by child processes of it.

    Raises:
        RuntimeError: at the end, if one of them had died.
    """
    programs = [_STAY_AWAKE.format(core={core}, parent=os.getpid()) for core in sorted(os.sched_getaffinity(0))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for program in programs:
            processes.append(subprocess.Popen([sys.executable, "-c", program]))
        yield
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("a process that kept a core awake has died; what was measured may be late")
    finally:
        for process in processes:
            process.kill()
            process.wait()
