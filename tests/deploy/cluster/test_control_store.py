"""A control store that keeps its data is started again, unless all of Ray has ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.control_store import RESTART_S, ControlStore
from pdserve.deploy.cluster.processes import is_alive
from tests.deploy.clusters import wait_for

PORT = 41234
COMMAND = (f"--gcs_server_port={PORT}", "--session-name=session_7")
SCRIPT = "#!/bin/bash\nread < {fifo}\n"


class Ray:
    """Processes with the names of Ray's, which wait to be killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.mkfifo(folder / "fifo")
        self._fifo = os.open(folder / "fifo", os.O_RDWR)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        path = self._folder / name
        path.write_text(SCRIPT.format(fifo=self._folder / "fifo"))
        path.chmod(0o755)
        process = subprocess.Popen([str(path), *arguments], env={**os.environ, **environment})
        self.started.append(process)
        wait_for(lambda: str(path) in psutil.Process(process.pid).cmdline(), name)
        return process

    def stores(self) -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [each for each in found if COMMAND[0] in (each.info["cmdline"] or ()) and is_alive(each)]

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        for store in self.stores():
            store.kill()
            store.wait()
        os.close(self._fifo)


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[Ray]:
    ray = Ray(tmp_path)
    try:
        yield ray
    finally:
        ray.end()


@pytest.mark.parametrize(("storage", "num_after"), [("rocksdb", 1), ("memory", 0)])
def test_a_store_that_keeps_its_data_is_restarted(ray: Ray, storage: str, num_after: int) -> None:
    ray.start("raylet", "--session=session_7")
    process = ray.start("gcs_server", *COMMAND, RAY_gcs_storage=storage)
    store = ControlStore(PORT)
    store.check(0.0)
    process.kill()
    process.wait()
    for now_s in (10.0, 10.0 + RESTART_S):
        store.check(now_s)
        assert ray.stores() == []
    for now_s in (10.1 + RESTART_S, 11.0 + RESTART_S):
        store.check(now_s)
        wait_for(lambda: len(ray.stores()) == num_after, "the store")  # a new process has no command line for a moment
    assert all(each.environ()["RAY_gcs_storage"] == storage for each in ray.stores())


def test_a_ray_that_was_stopped_is_not_started_again(ray: Ray) -> None:
    raylet, process = ray.start("raylet", "--session=session_7"), ray.start("gcs_server", *COMMAND)
    store = ControlStore(PORT)
    store.check(0.0)
    process.kill()
    process.wait()
    store.check(1.0)
    raylet.kill()
    raylet.wait()
    with pytest.raises(DeployError, match="it was stopped on this host"):
        store.check(2.0 + RESTART_S)
    store.check(3.0 + RESTART_S)
    assert ray.stores() == []
