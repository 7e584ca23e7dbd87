"""What `pdserve up` says, where nobody can read it."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from pdserve.deploy.commands.progress import Progress

SAID_TWICE = """
import sys
from rich.console import Console
from pdserve.deploy.commands.progress import Progress
progress = Progress(Console())
for name in ("ray", "router"):
    progress.note(name, "up")
sys.stderr.write("serves on")
"""


class _Disk(io.StringIO):
    """That is full for a while."""

    is_full = True

    def write(self, text: str) -> int:
        if text and self.is_full:
            raise OSError(errno.ENOSPC, "no space left")
        return super().write(text)


def test_lines_that_found_no_room_are_not_written_again() -> None:
    disk = _Disk()
    progress = Progress(Console(file=disk))
    for name in ("ray", "router"):
        progress.note(name, "up")
    disk.is_full = False
    progress.note("prefill-0", "up")
    assert [line.split()[1] for line in disk.getvalue().splitlines()] == ["prefill-0"]


@pytest.mark.parametrize("is_full", [True, False], ids=["full disk", "pipe without a reader"])
def test_a_cluster_outlives_its_log(is_full: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if is_full else writer, "wb", buffering=0) as log:
        ended = subprocess.run([sys.executable, "-c", SAID_TWICE], stdout=log, stderr=subprocess.PIPE, check=False)
    if is_full:
        os.close(writer)
    assert ended.stderr.startswith(b"serves on")
