"""Faults of Ray under a cluster of one host: what they cost the requests, and how long until all is back.

    python -m pdserve.bench.ray_faults [--faults gcs-stopped-10,raylet-killed] [--rounds 3] [--json FILE]

Each round starts `pdserve up --emulate` with two prefill and two decode workers, and 64 streams whose tokens are
checked (`pdserve.bench.checked_streams`). Then it breaks something, with ``+worker`` kills a decode worker 1 s later,
and waits until every worker is up again, counted from the end of the fault. Last, Ctrl-C must end every process.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from pdserve.bench.checked_streams import Streams, summary
from pdserve.bench.cluster import RunningCluster, running_cluster
from pdserve.bench.script import publish, script_parser

NUM_WORKERS = 4
TIME_SCALE = 25.0
"""An emulated token of the demo model then takes some 20 ms."""
BACK_TIMEOUT_S = 180.0
_UNDER_WAY_S = 3.0
_KILL_AFTER_S = 1.0
_SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to which process of the cluster."""

    process: str
    """Part of its name or command line."""
    number: signal.Signals
    lasts_s: float = 0.0
    """Seconds until SIGCONT, for a process that is stopped; without, it stays stopped."""
    is_for_good: bool = False
    """True if nothing comes back before Ctrl-C."""


FAULTS = {
    "gcs-stopped-10": Fault("gcs_server", signal.SIGSTOP, 10),
    "gcs-stopped-120": Fault("gcs_server", signal.SIGSTOP, 120),
    "gcs-stopped": Fault("gcs_server", signal.SIGSTOP, 15, is_for_good=True),
    "gcs-killed": Fault("gcs_server", signal.SIGKILL),
    "raylet-killed": Fault("raylet/raylet", signal.SIGKILL),
    "ray-start-killed": Fault("ray.scripts.scripts start", signal.SIGKILL),
    "worker-killed": Fault("ray::DecodeWorker", signal.SIGKILL),
    "worker-stopped": Fault("ray::DecodeWorker", signal.SIGSTOP),
}
ALL = [*FAULTS, *(f"{name}+worker" for name in FAULTS if not name.startswith("worker")), "worker-stopped-starting"]


class Cluster:
    """The processes of a running cluster, and what its router says."""

    def __init__(self, cluster: RunningCluster, token: str) -> None:
        self.url = cluster.url
        self._root = psutil.Process(cluster.pid)
        self._status_url = f"{cluster.admin_url}/status"
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=2)

    def processes(self, text: str = "") -> list[psutil.Process]:
        return [each for each in self._root.children(recursive=True) if text in _description(each)]

    def epochs(self) -> dict[str, int]:
        """Epoch of each worker that is up; empty if the router does not answer."""
        with contextlib.suppress(httpx.HTTPError):
            workers = self._http.get(self._status_url).raise_for_status().json()["workers"]
            return {each["worker_id"]: each["epoch"] for each in workers if each["up"]}
        return {}

    def wait_whole(self, condition: Callable[[dict[str, int]], bool] = bool) -> bool:
        """Wait until every worker is up, and ``condition`` holds for their epochs."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        while time.monotonic() < deadline_s:
            epochs = self.epochs()
            if len(epochs) == NUM_WORKERS and condition(epochs):
                return True
            time.sleep(0.1)
        return False


def _description(process: psutil.Process) -> str:
    try:
        return f"{process.name()} {' '.join(process.cmdline())}"
    except psutil.Error:  # it has just ended
        return ""


@contextlib.contextmanager
def emulated_cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        deployment = {
            "prefill": {"replicas": 2},
            "decode": {"replicas": 2},
            "model": {"max_model_len": 2048},
            "router": {"admin_token_file": str(token_file)},
        }
        options = ("--emulate", "h100-sxm", "--time-scale", str(TIME_SCALE), "--drain-timeout", "0")
        with running_cluster(deployment, *options) as cluster:
            yield Cluster(cluster, token_file.read_text())


def try_fault(name: str) -> dict[str, Any]:
    """One round; returns what was seen."""
    family: list[psutil.Process] = []
    result: dict[str, Any] = {"fault": name}
    with emulated_cluster() as cluster:
        if not cluster.wait_whole():
            raise RuntimeError("the cluster did not start")
        streams = Streams(cluster.url)
        try:
            time.sleep(_UNDER_WAY_S)
            back_s = _stop_while_starting(cluster) if name == "worker-stopped-starting" else _break(cluster, name)
            time.sleep(_SETTLE_S)
        finally:
            answers = streams.end()
        result |= {"back_s": back_s, **summary(answers)}
        family = cluster.processes()
        ending_s = time.monotonic()
    result["ended_s"] = round(time.monotonic() - ending_s, 1)
    result["left"] = [_description(each) for each in family if each.is_running()]
    return result


def _break(cluster: Cluster, name: str) -> float | None:
    """Break what ``name`` says; returns the seconds from the end of the fault until all is back, if it came back."""
    fault = FAULTS[name.removesuffix("+worker")]
    before = cluster.epochs()
    victim = cluster.processes(fault.process)[0]
    victim.send_signal(fault.number)
    began_s = time.monotonic()
    is_worker_lost = name.endswith("+worker") or fault.process.startswith("ray::")
    if name.endswith("+worker"):
        time.sleep(_KILL_AFTER_S)
        for worker in cluster.processes("ray::DecodeWorker")[:1]:  # it may have ended with the fault
            worker.kill()
    if fault.lasts_s:
        time.sleep(max(0.0, began_s + fault.lasts_s - time.monotonic()))
        if fault.is_for_good:
            return None
        victim.resume()
        began_s = time.monotonic()
    is_ray_lost = fault.number is signal.SIGKILL and not fault.process.startswith("ray::")
    num_new = NUM_WORKERS if is_ray_lost else int(is_worker_lost)
    is_back = cluster.wait_whole(lambda epochs: sum(epochs[each] != before[each] for each in epochs) >= num_new)
    return round(time.monotonic() - began_s, 1) if is_back else None


def _stop_while_starting(cluster: Cluster) -> float | None:
    """Stop the process of a worker before it is up; returns the seconds until another is up in its place."""
    known = {each.pid for each in cluster.processes("ray::DecodeWorker")}
    before = cluster.epochs()
    cluster.processes("ray::DecodeWorker")[0].kill()
    began_s = time.monotonic()
    while not (starting := [each for each in cluster.processes("ray::DecodeWorker") if each.pid not in known]):
        if time.monotonic() > began_s + BACK_TIMEOUT_S:
            return None
        time.sleep(0.01)
    starting[0].suspend()
    is_back = cluster.wait_whole(lambda epochs: epochs != before)
    return round(time.monotonic() - began_s, 1) if is_back else None


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--faults", default=",".join(ALL), help=f"some of {', '.join(ALL)}")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    names = arguments.faults.split(",")
    if unknown := set(names) - set(ALL):
        sys.exit(f"ray_faults: no fault is called {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    console, rounds = Console(stderr=True), []
    for name in [name for name in names for _ in range(arguments.rounds)]:
        rounds.append(try_fault(name))
        console.print(rounds[-1], highlight=False)
    publish({"rounds": rounds}, arguments.json)


if __name__ == "__main__":
    main()
