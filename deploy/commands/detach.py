"""``pdserve up --detach`` and ``pdserve down``: a cluster in the background, and its end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.processes import is_alive
from pdserve.deploy.commands.progress import READY

LOG = Path("pdserve.log")
"""Log of a detached cluster, in the current folder; its process holds a lock on it."""
_POLL_S = 0.1


def start_detached(arguments: Sequence[str], console: Console) -> int:
    """Run ``pdserve`` with ``arguments`` in a session of its own; return once it serves, or has ended.

    Returns:
        0 if it serves, else its exit status; its log has the reason and is shown.
    """
    try:
        with LOG.open("ab") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            start = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pdserve.deploy.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except BlockingIOError as error:
        raise DeployError(f"another cluster writes {LOG.absolute()}; start in another folder") from error
    except OSError as error:
        raise DeployError(f"cannot write {LOG.absolute()}: {error.strerror}; start in another folder") from error
    with LOG.open("rb") as said:
        said.seek(start)
        try:
            text = b""
            while (status := process.poll()) is None and READY.encode() not in text:
                time.sleep(_POLL_S)
                text = said.read()
                _relay(text, console)
            _relay(said.read(), console)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    return status or 0


def stop_cluster(process_id: int, console: Console, *, now: bool) -> int:
    """End a running cluster and wait for it.

    Args:
        process_id: its supervisor's.
        now: cut running requests off instead of finishing them.
    """
    try:
        process = psutil.Process(process_id)
        os.kill(process_id, signal.SIGTERM)
        if now:
            time.sleep(_POLL_S)  # two signals at once count as one
            os.kill(process_id, signal.SIGTERM)
        while is_alive(process):  # not `wait`: where process 1 reaps no others, as in containers, it would not return
            time.sleep(_POLL_S)
    except (ProcessLookupError, psutil.NoSuchProcess):
        pass
    console.print("stopped", highlight=False)
    return 0


def _relay(text: bytes, console: Console) -> None:
    console.out(text.decode(errors="replace"), end="", highlight=False)
