"""``pdserve up`` on a Ray cluster of two hosts: real Ray, with one node on each of two loopback addresses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pdserve.deploy.cluster.processes import end_session, start_tied
from tests.deploy.clusters import pdserve, wait_for
from tests.patience import HANG_S
from tests.shared import shared

with socket.create_server(("127.0.0.1", 0)) as listener:
    PORT = listener.getsockname()[1]
KEEPER = Path(__file__).parents[2] / "deploy/ray/keep-control-store"
HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for the address on the network
LIGHT = (
    *("--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"),
    *("--dashboard-agent-listen-port=0", "--include-log-monitor=false"),
)
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64}


class Node:
    """A node of Ray, with its processes."""

    def __init__(self, folder: Path, address: str, *options: str) -> None:
        store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}
        env = {**ENVIRONMENT, **store}
        command = [sys.executable, "-m", "pdserve.deploy.cluster.ray_start", "start", f"--node-ip-address={address}"]
        self._log_path = folder / f"{address}.log"
        self._process = start_tied([*command, *LIGHT, *options], env=env, log_path=self._log_path)

    def wait(self) -> None:
        wait_for(lambda: "Ray runtime started." in self._log_path.read_text(), "a node of Ray")

    def end(self) -> None:
        end_session(self._process, 0)


class Cluster:
    def __init__(self, folder: Path, *options: str) -> None:
        self.log_path = folder / "pdserve.log"
        (folder / "random.py").write_text("raise RuntimeError('a file of the user, not the module')")
        command = [str(Path(sys.executable).with_name("pdserve")), "up", "--port", "0", "--detach"]
        self.process = subprocess.Popen(
            [*command, "--ray-address", f"{HEAD}:{PORT}", *options],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
        )

    def says(self, text: str) -> bool:
        return self.log_path.exists() and text in self.log_path.read_text()

    def row(self, name: str) -> str:
        """Value of the banner's row ``name``."""
        lines = self.log_path.read_text().splitlines()
        return next(line.split(maxsplit=1)[1] for line in lines if line.split()[:1] == [name])

    def workers(self) -> list[dict[str, Any]]:
        """Workers that are up."""
        found: dict[str, Any] = json.loads(pdserve("status", "--json", "--admin-url", self.row("admin")).stdout)
        return [each for each in found["workers"] if each["up"]]

    def hosts(self) -> dict[str, str]:
        """Host of each worker that is up."""
        return {each["worker_id"]: each["address"].rpartition(":")[0] for each in self.workers()}

    def answer(self) -> str:
        messages = [{"role": "user", "content": "What is 17 + 25?"}]
        body = {"model": "pdserve-demo", "messages": messages, "temperature": 0}
        reply = httpx.post(f"{self.row('API')}/chat/completions", json=body, trust_env=False, timeout=HANG_S)
        return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.fixture
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Node:
    return shared(request, lambda: running_head(tmp_path_factory.mktemp("ray")))


@contextmanager
def running_head(folder: Path) -> Iterator[Node]:
    node = Node(folder, HEAD, "--head", f"--port={PORT}", "--no-monitor", "--include-dashboard=false")
    try:
        node.wait()
        with subprocess.Popen([KEEPER, str(PORT)]) as keeper:
            wait_for(psutil.Process(keeper.pid).children, "the keeper of the control store")
            try:
                yield node
            finally:
                keeper.kill()
    finally:
        node.end()
        for store in control_stores():
            store.kill()


def control_stores() -> list[psutil.Process]:
    """Ray's control store, unless it has ended."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if f"--gcs_server_port={PORT}" in (each.info["cmdline"] or ())]


def test_a_worker_without_a_host_is_waited_for_by_name(head: Node, tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("decode: {resources: {big: 2}}")
    cluster = Cluster(tmp_path, str(file))
    try:
        wait_for(lambda: cluster.says("none has 2 big left for decode-0"), "what is missing")
    finally:
        cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(HANG_S) == 130


def test_workers_are_spread_and_move_when_their_host_is_lost(head: Node, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "--hosts", "2")
    wait_for(lambda: cluster.says("1 of 2 have joined"), "the first host")
    other = Node(tmp_path, OTHER, f"--address={HEAD}:{PORT}")
    try:
        assert cluster.process.wait(HANG_S) == 0, cluster.log_path.read_text()
        assert sorted(cluster.hosts().values()) == [HEAD, OTHER]
        assert cluster.answer() == "42"
        (store,), epochs = control_stores(), [each["epoch"] for each in cluster.workers()]
        store.kill()
        store.wait()
        wait_for(control_stores, "the control store, started again")
        other.end()
        wait_for(lambda: list(cluster.hosts().values()) == [HEAD, HEAD], "the worker on the other host")
        assert cluster.answer() == "42"
        assert len({each["epoch"] for each in cluster.workers()} & {*epochs}) == 1
        assert cluster.says(f"({OTHER}) its agent has ended; starting it again")
    finally:
        other.end()
        down = pdserve("down", "--admin-url", cluster.row("admin"))
    assert down.stdout == "stopped\n"
    assert cluster.says("stopping")
