"""Tests of ``pdserve up --detach``, without a cluster."""

from __future__ import annotations

import fcntl
import io
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.contracts.errors import DeployError
from pdserve.deploy.commands.detach import LOG, start_detached


def test_two_clusters_write_no_common_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(file=io.StringIO())
    with LOG.open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(DeployError, match=r"another cluster writes .*/pdserve\.log; start in another folder"):
            start_detached(["--version"], console)
    assert start_detached(["--version"], console) == 0
    assert LOG.read_text().startswith("pdserve ")
