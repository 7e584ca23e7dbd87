"""The private Ray cluster that tests of actors join.

Ray reads its token once per process, so all clusters that one pytest process joins must share it. Ray reads its
settings at import, so tests import it only after they have joined.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.deploy.cluster.ray_cluster import PrivateRay
from pdserve.deploy.cluster.ray_desk import RayDesk
from pdserve.deploy.cluster.supervised_process import ProcessState

_TOKEN = "0" * 64


@contextmanager
def joined_ray() -> Iterator[PrivateRay]:
    """A private cluster that this process has joined; it ends with the context."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        cluster = PrivateRay(RayDesk(), Path(folder), num_workers=1, token=_TOKEN)
        try:
            while cluster.state is not ProcessState.UP:
                cluster.check(time.monotonic())
                assert not cluster.failure
                time.sleep(0.05)
            yield cluster
        finally:
            cluster.end()
