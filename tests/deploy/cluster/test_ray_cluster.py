"""Private Ray clusters: several at once, each without a trace after its stop."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from pdserve.deploy.cluster import ray_cluster
from pdserve.deploy.cluster.ray_cluster import ENDED_S, ExistingRay
from pdserve.deploy.cluster.ray_desk import RayDesk
from pdserve.deploy.cluster.supervised_process import ProcessState

SCRIPT = """
import os, sys, time
from pathlib import Path
from pdserve.deploy.cluster.ray_cluster import PrivateRay
from pdserve.deploy.cluster.ray_desk import RayDesk
from pdserve.deploy.cluster.supervised_process import ProcessState

cluster = PrivateRay(RayDesk(), Path(sys.argv[1]) / "ray", 1, sys.argv[2] * 64)
while cluster.state is not ProcessState.UP:
    cluster.check(time.monotonic())
    assert not cluster.failure, cluster.failure
    time.sleep(0.05)
import ray

class Actor:
    def process_id(self):
        return os.getpid()

actor = ray.remote(Actor).options(num_cpus=0, resources=cluster.worker_resources).remote()
print(ray.get(actor.process_id.remote()), *cluster.process_ids, flush=True)
sys.stdin.readline()
assert ray.get(actor.process_id.remote())
cluster.end()
cluster.end()
print(cluster.process_ids, flush=True)
"""


def start(folder: str, token_digit: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, folder, token_digit]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def object_store_files(pid: int) -> set[Path]:
    """Shared-memory files of Ray's object store that a process has mapped; Ray may have unlinked them."""
    mapped = psutil.Process(pid).memory_maps()
    return {Path(each.path.removesuffix(" (deleted)")) for each in mapped if "plasma" in each.path}


def test_clusters_live_side_by_side_and_end_alone() -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as first_folder,
        tempfile.TemporaryDirectory(dir="/tmp") as second_folder,
    ):
        first, second = start(first_folder, "1"), start(second_folder, "2")
        members = {}
        for driver in (first, second):
            assert driver.stdout is not None
            members[driver.pid] = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(members[driver.pid]) > 4, driver.communicate("\n")[1]
        assert not set(members[first.pid]) & set(members[second.pid])
        object_stores = {path for pids in members.values() for pid in pids for path in object_store_files(pid)}
        assert len(object_stores) == 2

        out, error = first.communicate("\n", timeout=60)
        assert out.strip() == "[]", error
        assert not any(psutil.pid_exists(pid) for pid in members[first.pid])
        assert not any(Path(first_folder).iterdir())

        # The other cluster still answers.
        assert all(psutil.pid_exists(pid) for pid in members[second.pid])
        out, error = second.communicate("\n", timeout=60)
        assert out.strip() == "[]", error
        assert second.returncode == 0
    assert not any(path.exists() for path in object_stores)


class SilentDesk(RayDesk):
    is_silent = True

    def submit(self, call: object) -> Future[None]:
        return Future()


@pytest.mark.parametrize("is_listening", [False, True])
def test_a_cluster_has_ended_once_nothing_listens_for_as_long_as_its_hosts_wait(is_listening: bool) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_listening:
            listener.listen()
        cluster = ExistingRay(SilentDesk(), f"127.0.0.1:{listener.getsockname()[1]}")
        cluster.state = ProcessState.UP
        for now_s in range(10, 10 + int(ENDED_S), 2):
            cluster.check(now_s)
            assert cluster.state is ProcessState.UP
        cluster.check(20 + ENDED_S)
        assert (cluster.state is ProcessState.UP) == is_listening
        assert cluster.failure.endswith("" if is_listening else "has ended")


def test_the_address_of_the_hosts_own_ray_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_cluster.current_ray_address() == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("10.0.0.1:6379\n")
    assert ray_cluster.current_ray_address() == "10.0.0.1:6379"
