"""Private Ray clusters: several at once, each without a trace after its stop."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.deploy.cluster import ray_cluster
from pdserve.deploy.cluster.ray_cluster import ExistingRay, RayNode
from pdserve.deploy.cluster.ray_desk import RayDesk
from pdserve.deploy.cluster.supervised_process import ProcessState
from tests.patience import HANG_S

SCRIPT = """
import os, sys, time
from pathlib import Path
import psutil
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
if len(sys.argv) > 3:
    victim = next(each for each in map(psutil.Process, cluster.process_ids) if each.name() == sys.argv[3])
    victim.parent().suspend()  # within a second it would notice, and end the others
    victim.kill()
    while not cluster.failure:
        cluster.check(time.monotonic())
    assert cluster.failure == f"its {sys.argv[3]} ended", cluster.failure
cluster.end()
cluster.end()
print(cluster.process_ids, flush=True)
"""


def start(folder: str, token_digit: str, *victim: str) -> subprocess.Popen[str]:
    """``victim``: process of Ray that is killed in the end."""
    command = [sys.executable, "-c", SCRIPT, folder, token_digit, *victim]
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
        first, second = start(first_folder, "1"), start(second_folder, "2", "raylet")
        members = {}
        for driver in (first, second):
            assert driver.stdout is not None
            members[driver.pid] = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(members[driver.pid]) > 4, driver.communicate("\n")[1]
        assert not set(members[first.pid]) & set(members[second.pid])
        object_stores = {path for pids in members.values() for pid in pids for path in object_store_files(pid)}
        assert len(object_stores) == 2

        out, error = first.communicate("\n", timeout=HANG_S)
        assert out.strip() == "[]", error
        assert not any(psutil.pid_exists(pid) for pid in members[first.pid])
        assert not any(Path(first_folder).iterdir())

        # The other cluster still answers.
        assert all(psutil.pid_exists(pid) for pid in members[second.pid])
        out, error = second.communicate("\n", timeout=HANG_S)
        assert out.strip() == "[]", error
        assert second.returncode == 0
    assert not any(path.exists() for path in object_stores)


def test_a_head_loads_no_other_command_of_ray() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "pdserve.deploy.cluster.ray_start", "start", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "--head" in run.stdout
    loaded = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "ray.autoscaler" in loaded
    assert not {"ray.serve", "ray.dashboard.modules.job", "ray.util.state", "fastapi"} & loaded


class PromptDesk(RayDesk):
    """Runs each call at once."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(call())
        return answer


@pytest.mark.parametrize(
    ("nodes", "is_same_store", "is_lost"),
    [(["ours", "b"], True, False), (["b"], True, True), (["ours", "b"], False, True)],
)
def test_a_cluster_is_lost_with_its_data_or_with_our_node(
    monkeypatch: pytest.MonkeyPatch, nodes: list[str], is_same_store: bool, is_lost: bool
) -> None:
    def live_nodes() -> list[RayNode]:
        if not is_same_store:
            raise RuntimeError("RPC error: WrongClusterID: Perhaps the client is accessing GCS after it has restarted.")
        return [RayNode(node_id=name, address="", hostname="", resources={}) for name in nodes]

    monkeypatch.setattr(ray_cluster, "_live_nodes", live_nodes)
    monkeypatch.setattr(ray_cluster, "_own_node", lambda: "ours")
    cluster = ExistingRay(PromptDesk(), "127.0.0.1:9")
    cluster.state = ProcessState.UP
    cluster.check(10.0)
    assert cluster.is_lost == is_lost
    assert cluster.state is ProcessState.UP


def test_a_cluster_is_lost_with_the_node_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = subprocess.Popen(["sleep", "600"])
    node = RayNode(node_id="ours", address="", hostname="", resources={})
    monkeypatch.setattr(ray_cluster, "_live_nodes", lambda: [node])
    monkeypatch.setattr(ray_cluster, "_own_node", lambda: "ours")
    cluster = ExistingRay(PromptDesk(), "127.0.0.1:9")
    cluster.state, cluster._raylet = ProcessState.UP, psutil.Process(raylet.pid)
    cluster.check(10.0)
    seen = [cluster.is_lost]
    raylet.kill()
    raylet.wait()
    cluster.check(11.0)
    assert [*seen, cluster.is_lost] == [False, True]
    assert cluster.state is ProcessState.UP


class Child:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        if not self._name:
            raise psutil.NoSuchProcess(1)
        return self._name


@pytest.mark.parametrize(("names", "missing"), [(["gcs_server", ""], "raylet"), (["", "raylet"], "gcs_server")])
def test_a_server_that_has_ended_by_the_first_look_is_named(
    monkeypatch: pytest.MonkeyPatch, names: list[str], missing: str
) -> None:
    children = [Child("log_monitor"), *map(Child, names)]
    monkeypatch.setattr(psutil.Process, "children", lambda self: children)
    with pytest.raises(RuntimeError, match=f"its {missing} ended"):
        ray_cluster._find_servers(os.getpid())
    children.append(Child(missing))
    assert ray_cluster._find_servers(os.getpid()).keys() == {"gcs_server", "raylet"}


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_the_address_of_the_hosts_own_ray_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert ray_cluster.current_ray_address() == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("10.0.0.1:6379\n")
    assert ray_cluster.current_ray_address() == "10.0.0.1:6379"


def test_what_ended_a_server_of_a_head_that_does_not_start_is_told(tmp_path: Path) -> None:
    ray = ray_cluster.PrivateRay(RayDesk(), tmp_path, 1, "0" * 64)
    logs = tmp_path / "r" / "session_2026-11-29_00-13-22_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text(
        "[2026-11-29 00:13:22,209 I 15543 15552] (raylet) main.cc:1: Starting\n"
        "[2026-11-29 00:13:22,209 C 15543 15552] (raylet) dlmalloc.cc:161: failed to open file /dev/shm/plasma\n"
        "*** StackTrace Information ***\n"
    )
    ray._process = subprocess.Popen(["false"])
    ray._process.wait()
    with pytest.raises(RuntimeError, match=r"^its raylet ended: failed to open file /dev/shm/plasma$"):
        ray._check_process()
