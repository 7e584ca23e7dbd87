"""Child processes that never outlive this one: each leads a new session, and the whole session ends with it.

Used for Ray and for the router. A separate session shields children from the terminal's Ctrl-C, so that the supervisor
decides the order of shutdown. It also names every descendant: nothing is left behind, and nothing else is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from pdserve.proto.parent_death import die_with_parent

_ERROR = re.compile(r"(?:python -m \S+: |Fatal Python error: |[\w.]*(?:Error|Exception)\b|\*\*\* SIG|\s*what\(\): )")
"""Beginning of a log line that gives the cause of death: ours, a traceback's, a crash's, or C++'s."""
_NUM_LAST_LINES = 40


def start_tied(
    command: Sequence[str], *, env: Mapping[str, str], log_path: Path, with_pipes: bool = False
) -> subprocess.Popen[bytes]:
    """Start ``command`` as the leader of a new session; it gets SIGTERM when the calling thread dies.

    Call it from the main thread: Linux watches the thread that forked, not its process.

    Args:
        log_path: receives stderr, and stdout unless ``with_pipes``.
        with_pipes: connect stdin and stdout to this process by pipes.
    """
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.PIPE if with_pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if with_pipes else log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
        )


def session_members(session_id: int) -> list[psutil.Process]:
    """Every live process of the session."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def is_alive(process: psutil.Process) -> bool:
    """True unless the process has ended, reaped or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end_session(leader: subprocess.Popen[bytes], grace_s: float) -> None:
    """End every process of ``leader``'s session: SIGTERM to the leader, then SIGKILL to the rest after ``grace_s``.

    Kills at once if the leader has ended already. Reaps the leader; no process of the session runs after the return.
    """
    deadline_s = time.monotonic()
    if leader.poll() is None:
        leader.terminate()
        deadline_s += grace_s
    while (members := session_members(leader.pid)) and time.monotonic() < deadline_s:
        leader.poll()
        time.sleep(0.05)
    while members:
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        leader.poll()
        time.sleep(0.02)
        members = session_members(leader.pid)
    leader.wait()


def pin_process(process_id: int, cores: Sequence[int]) -> None:
    """Restrict every present and future thread of the process to ``cores``."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{process_id}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)


def last_line(log_path: Path) -> str:
    """Last non-blank line of a log; empty if there is none."""
    return next(iter(_last_lines(log_path)), "").strip()


def last_error(log_path: Path) -> str:
    """Last line near the end of a log that names an error; empty if there is none."""
    lines = _last_lines(log_path)[:_NUM_LAST_LINES]
    return next((line.strip() for line in lines if _ERROR.match(line)), "")


def _last_lines(log_path: Path) -> list[str]:
    """Non-blank lines, last first."""
    with contextlib.suppress(OSError):
        return [line for line in reversed(log_path.read_text(errors="replace").splitlines()) if line.strip()]
    return []
