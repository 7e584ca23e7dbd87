"""A whole cluster for a benchmark, started as a user would, with `pdserve up FILE`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_TIMEOUT_S = 300.0
_URL = r"http://[\w.\-]+:\d+"
_BANNER = rf"^\W*admin\W+(?P<admin>{_URL}).*^curl .*?(?P<url>{_URL})"


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that is ready."""

    url: str
    admin_url: str
    pid: int
    """Process of `pdserve up`, the ancestor of all its processes."""
    log: Path
    """What it prints."""

    def router(self) -> psutil.Process:
        """Process of its only router."""
        children = psutil.Process(self.pid).children(recursive=True)
        [router] = [child for child in children if "pdserve.router" in child.cmdline()]
        return router


@contextmanager
def running_cluster(deployment: dict[str, Any], *options: str) -> Iterator[RunningCluster]:
    """`pdserve up` on a free port, stopped with SIGINT.

    Args:
        options: of the command line, beside the deployment file.

    Raises:
        RuntimeError: it did not start; the message is what it printed.
    """
    deployment = {**deployment, "router": {"port": 0, "open_metrics": True, **deployment.get("router", {})}}
    with tempfile.TemporaryDirectory() as work:
        file, log = Path(work) / "deployment.yaml", Path(work) / "log"
        file.write_text(json.dumps(deployment))
        started_s = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name("pdserve")), "up", str(file), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            while (found := re.search(_BANNER, log.read_text(), re.MULTILINE | re.DOTALL)) is None:
                if process.poll() is not None or time.perf_counter() - started_s > START_TIMEOUT_S:
                    raise RuntimeError(f"`pdserve up` did not start:\n{log.read_text()}")
                time.sleep(0.05)
            yield RunningCluster(found["url"], found["admin"], process.pid, log)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
