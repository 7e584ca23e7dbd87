"""Faults of Ray under a cluster of one host: what they cost the requests, and how long until all is back.

    python -m pdserve.bench.ray_faults [--faults gcs-stopped-10,raylet-killed+ctrl-c] [--rounds 3] [--json FILE]

Each round starts `pdserve up --emulate` with two prefill and two decode workers, and 64 streams whose tokens are
checked (`pdserve.bench.checked_streams`). Then it breaks something, and waits until every worker is up again, counted
from the end of the fault. Last, Ctrl-C must end every process. With ``+worker`` a decode worker is killed 1 s after
the fault; with ``+ctrl-c`` Ctrl-C comes up to 8 s after it, at random, whatever is going on.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
_CTRL_C_WITHIN_S = 8.0
_SETTLE_S = 3.0
_MARK = "PDSERVE_RAY_FAULTS"
"""Environment variable that all processes of a round share."""


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
    is_starting: bool = False
    """True if the process is killed first, and its successor meets the fault while it starts."""


FAULTS = {
    "gcs-stopped-10": Fault("gcs_server", signal.SIGSTOP, 10),
    "gcs-stopped-120": Fault("gcs_server", signal.SIGSTOP, 120),
    "gcs-stopped": Fault("gcs_server", signal.SIGSTOP, 15, is_for_good=True),
    "gcs-killed": Fault("gcs_server", signal.SIGKILL),
    "raylet-killed": Fault("raylet/raylet", signal.SIGKILL),
    "ray-start-killed": Fault("ray.scripts.scripts start", signal.SIGKILL),
    "worker-killed": Fault("ray::DecodeWorker", signal.SIGKILL),
    "worker-stopped": Fault("ray::DecodeWorker", signal.SIGSTOP),
    "worker-stopped-starting": Fault("ray::DecodeWorker", signal.SIGSTOP, is_starting=True),
}
ALL = [
    *FAULTS,
    *(f"{name}+worker" for name in FAULTS if not name.startswith("worker")),
    *(f"{name}+ctrl-c" for name, fault in FAULTS.items() if not fault.lasts_s or fault.is_for_good),
]


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
    fault, _, twist = name.partition("+")
    os.environ[_MARK] = secrets.token_hex(8)
    with emulated_cluster() as cluster:
        if not cluster.wait_whole():
            raise RuntimeError("the cluster did not start")
        streams = Streams(cluster.url)
        time.sleep(_UNDER_WAY_S)
        result = {"fault": name, "load_average": round(os.getloadavg()[0], 1)}
        result["back_s"] = _break(cluster, FAULTS[fault], twist)
        if twist != "ctrl-c":
            time.sleep(_SETTLE_S)
            result |= summary(streams.end())
        ending_s = time.monotonic()
    result["ended_s"] = round(time.monotonic() - ending_s, 1)
    if twist == "ctrl-c":
        streams.end()  # they fail with the cluster
    result["left"] = [_description(each) for each in psutil.process_iter() if _is_marked(each)]
    return result


def _is_marked(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(_MARK) == os.environ[_MARK]
    return False


def _break(cluster: Cluster, fault: Fault, twist: str) -> float | None:
    """Returns the seconds from the end of the fault until all is back, or until that is given up; None if nothing is to
    come back."""
    before = cluster.epochs()
    victim = _successor(cluster, fault.process) if fault.is_starting else cluster.processes(fault.process)[0]
    victim.send_signal(fault.number)
    began_s = time.monotonic()
    is_worker_lost = twist == "worker" or fault.process.startswith("ray::")
    if twist == "ctrl-c":
        time.sleep(random.uniform(0, _CTRL_C_WITHIN_S))
        return None
    if twist == "worker":
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
    cluster.wait_whole(lambda epochs: sum(epochs[each] != before[each] for each in epochs) >= num_new)
    return round(time.monotonic() - began_s, 1)


def _successor(cluster: Cluster, text: str) -> psutil.Process:
    """Kill a process; returns the one that starts in its place."""
    known = {each.pid for each in cluster.processes(text)}
    cluster.processes(text)[0].kill()
    deadline_s = time.monotonic() + BACK_TIMEOUT_S
    while time.monotonic() < deadline_s:
        for process in cluster.processes(text):
            if process.pid not in known:
                return process
        time.sleep(0.01)
    raise RuntimeError(f"nothing took the place of {text}")


def totals(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all rounds of a fault have shown."""
    failed: Counter[str] = Counter()
    for each in rounds:
        failed.update(each.get("failed", {}))
    back_s = [each["back_s"] for each in rounds if each["back_s"] is not None]
    return {
        "fault": rounds[0]["fault"],
        "rounds": len(rounds),
        "load_average": statistics.median(each["load_average"] for each in rounds),
        "streams": sum(each.get("streams", 0) for each in rounds),
        "wrong": sum(each.get("wrong", 0) for each in rounds),
        "failed": dict(failed),
        "median_back_s": statistics.median(back_s) if back_s else None,
        "longest_back_s": max(back_s, default=None),
        "longest_gap_s": max(each.get("longest_gap_s", 0.0) for each in rounds),
        "longest_end_s": max(each["ended_s"] for each in rounds),
        "left": [process for each in rounds for process in each["left"]],
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--faults", default=",".join(ALL), help=f"some of {', '.join(ALL)}")
    parser.add_argument("--rounds", type=int, default=1, help="of each fault; Ctrl-C publishes those so far")
    arguments = parser.parse_args()
    names = arguments.faults.split(",")
    if unknown := set(names) - set(ALL):
        sys.exit(f"ray_faults: no fault is called {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    console, seen = Console(stderr=True), {name: list[dict[str, Any]]() for name in names}
    try:
        for name in names * arguments.rounds:
            seen[name].append(try_fault(name))
            console.print(seen[name][-1], highlight=False)
    finally:
        publish({"faults": [totals(rounds) for rounds in seen.values() if rounds]}, arguments.json)


if __name__ == "__main__":
    main()
