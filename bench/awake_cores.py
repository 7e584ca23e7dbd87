"""Keeps a machine's cores awake during a measurement.

An idle core halts, and the host may then take a virtual core away: the message or timer that wakes it waits, sometimes
for milliseconds, until the core is back. Servers tuned for latency disable sleep. On a virtual machine, one process at
the lowest priority on each core has the same effect; it yields to anything else on that core. This does not work if all
processes share one limit of CPU time, as in a container with fewer CPUs than it sees.
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
