"""The private Ray cluster that tests of actors join.

Ray reads its token once in the life of a process, so whatever one pytest process joins must have the same one; and it
reads its settings when it is imported, so that tests import it only after they have joined.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.deploy.cluster.ray_cluster import PrivateRay

_TOKEN = "0" * 64


@contextmanager
def joined_ray() -> Iterator[PrivateRay]:
    """A cluster of its own that this process has joined; ended with the context."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        cluster = PrivateRay(Path(folder), num_workers=1, token=_TOKEN)
        try:
            while not cluster.is_started:
                assert cluster.is_running, cluster.failure
                time.sleep(0.05)
            cluster.connect()
            yield cluster
        finally:
            cluster.stop()
