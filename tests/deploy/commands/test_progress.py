"""What `pdserve up` says, where nobody can read it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SAID_TWICE = """
import sys
from rich.console import Console
from pdserve.deploy.commands.progress import Progress
progress = Progress(Console())
for name in ("ray", "router"):
    progress.note(name, "up")
sys.stderr.write("serves on")
"""


@pytest.mark.parametrize("is_full", [True, False], ids=["full disk", "pipe without a reader"])
def test_a_cluster_outlives_its_log(is_full: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if is_full else writer, "wb", buffering=0) as log:
        ended = subprocess.run([sys.executable, "-c", SAID_TWICE], stdout=log, stderr=subprocess.PIPE, check=False)
    if is_full:
        os.close(writer)
    assert ended.stderr.startswith(b"serves on")
