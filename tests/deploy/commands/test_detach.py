"""Tests of ``pdserve up --detach``, without a cluster."""

from __future__ import annotations

import fcntl
import io
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from pdserve.contracts.errors import DeployError
from pdserve.deploy.commands.detach import LOG, start_detached, stop_cluster
from pdserve.deploy.commands.progress import Progress
from tests.patience import HANG_S


def test_two_clusters_write_no_common_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(file=io.StringIO())
    with LOG.open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(DeployError, match=r"another cluster writes .*/pdserve\.log; start in another folder"):
            start_detached(["--version"], console)
    assert start_detached(["--version"], console) == 0
    assert LOG.read_text().startswith("pdserve ")


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_it_returns_after_the_whole_banner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    banner, said = io.StringIO(), io.StringIO()
    Progress(Console(file=banner)).banner([("admin", "http://127.0.0.1:9000")], "curl it")
    (tmp_path / "banner").write_text(banner.getvalue())
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'router up'\nsleep 0.4\ncat banner\nsleep 1\necho 'decode-1 up'\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert start_detached([], Console(file=said)) == 0
    assert said.getvalue() == "router up\n" + banner.getvalue()
    assert said.getvalue().endswith("admin        http://127.0.0.1:9000\n\ncurl it\n")


def test_a_cluster_that_starts_ends_with_the_command_that_waits_for_it(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho started\nexec sleep 60\n")
    stub.chmod(0o755)
    code = f"import sys; sys.executable = {str(stub)!r}; from pdserve.deploy.cli import run; run(['up', '--detach'])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"started\n"
        (cluster,) = psutil.Process(command.pid).children()
        command.terminate()
    assert not cluster.is_running()


def test_a_cluster_that_nobody_reaps_has_ended() -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as container:
        assert container.stdout is not None
        cluster = int(container.stdout.readline())
        console = Console(file=io.StringIO())
        command = threading.Thread(target=stop_cluster, args=(cluster, console), kwargs={"now": False}, daemon=True)
        command.start()
        command.join(HANG_S)
        container.kill()
    assert not command.is_alive()
