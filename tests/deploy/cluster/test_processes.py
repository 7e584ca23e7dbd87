"""Children never outlive their parent, and end with their whole session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pdserve.deploy.cluster.processes import (
    end_session,
    last_error,
    last_line,
    pin_process,
    session_members,
    start_tied,
)
from tests.patience import HANG_S

FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def start_family(log_path: Path) -> subprocess.Popen[bytes]:
    family = start_tied([sys.executable, "-c", FAMILY], env=os.environ, log_path=log_path)
    deadline_s = time.monotonic() + HANG_S
    while not last_line(log_path):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return family


def test_a_session_is_ended_whole_even_if_it_ignores_sigterm(tmp_path: Path) -> None:
    family = start_family(tmp_path / "log")
    assert len(session_members(family.pid)) == 2
    end_session(family, grace_s=0.1)
    assert session_members(family.pid) == []
    assert family.returncode == -signal.SIGKILL
    end_session(family, grace_s=0.1)


def test_a_session_whose_leader_has_died_is_ended_too(tmp_path: Path) -> None:
    family = start_family(tmp_path / "log")
    family.kill()
    family.wait()
    assert len(session_members(family.pid)) == 1
    end_session(family, grace_s=0.1)
    assert session_members(family.pid) == []


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    code = f"""
import os, signal
from pathlib import Path
from pdserve.deploy.cluster.processes import start_tied
child = start_tied(["sleep", "600"], env=os.environ, log_path=Path({str(log_path)!r}))
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)
    child = int(run.stdout)
    deadline_s = time.monotonic() + HANG_S
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_pinning_reaches_a_process_and_its_children_to_come(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    family = start_family(tmp_path / "log")
    pin_process(family.pid, [core])
    assert os.sched_getaffinity(family.pid) == {core}
    end_session(family, grace_s=0)
    pin_process(family.pid, [core])


def test_the_last_line_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_text("first\n  cause  \n\n")
    assert last_line(log) == "cause"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ""),
        ("INFO started\nINFO error rates are fine\n", ""),
        ("ValueError: old\n" + "INFO served\n" * 50, ""),
        ("Traceback (most recent call last):\n  raise X\nmodel.Broken.Error: no\n\n", "model.Broken.Error: no"),
        ("Fatal Python error: Segmentation fault\n\nThread 0x1:\n  File x\n", "Fatal Python error: Segmentation fault"),
        ("terminate called after throwing\n  what():  bad\n", "what():  bad"),
        ("KeyError: 'a'\npython -m pdserve.router: port 80 is taken\n", "python -m pdserve.router: port 80 is taken"),
    ],
)
def test_the_last_error_near_the_end_of_a_log(tmp_path: Path, text: str, error: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert last_error(log) == error
