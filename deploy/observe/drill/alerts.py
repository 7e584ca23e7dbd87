"""Each alert, made to fire by its fault on a live cluster, with windows and delays that are shorter by `SPEED`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import psutil

from pdserve.bench.cluster import RunningCluster, running_cluster
from pdserve.deploy.cluster.folder import admin_headers
from pdserve.deploy.observe.drill.live import (
    emulated_cluster,
    load,
    mispredicted_cluster,
    processes,
    running_prometheus,
    wait_for,
)
from pdserve.deploy.observe.drill.pictures import draw_all

SPEED = 20.0
TIMEOUT_S = 75.0
PORT = 9391
SLO = {"ttft_seconds": 0.5, "tpot_seconds": 0.05}
_BLKIO = Path("/sys/fs/cgroup/blkio")

Fault = Callable[[RunningCluster, Event], None]
"""Goes wrong until the event is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster, its load, and what goes wrong."""

    what: str
    alerts: tuple[str, ...]
    deployment: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    rate: float = 4.0
    num_prompt_tokens: int = 500
    num_output_tokens: int = 40
    cluster: Callable[..., AbstractContextManager[RunningCluster]] = emulated_cluster
    fault: Fault | None = None


def _paused(mark: str, on_s: float, off_s: float) -> Fault:
    """Processes with ``mark`` in their command line stand still for ``on_s``, again and again."""

    def fault(cluster: RunningCluster, end: Event) -> None:
        while not end.is_set():
            _send(cluster, mark, signal.SIGSTOP)
            end.wait(on_s)
            _send(cluster, mark, signal.SIGCONT)
            end.wait(off_s)

    return fault


def _without_files(mark: str) -> Fault:
    """Processes with ``mark`` in their command line can open nothing any more, neither files nor connections."""

    def fault(cluster: RunningCluster, end: Event) -> None:
        for process in processes(cluster, mark):
            process.rlimit(psutil.RLIMIT_NOFILE, (0, 0))

    return fault


def _changed_back_and_forth(cluster: RunningCluster, end: Event) -> None:
    """The router is told of changes as the supervisor tells of its own, which take a minute each: too long for here."""
    headers = admin_headers(cluster.admin_url)
    while not end.is_set():
        for reason in ("decode_short", "surplus"):
            httpx.put(f"{cluster.admin_url}/scaled", params={"reason": reason}, headers=headers).raise_for_status()
        end.wait(1.0)


def _without_tier(cluster: RunningCluster, end: Event) -> None:
    """The file of the tier of each worker is deleted."""
    for _, file in _tiers(cluster):
        file.unlink()


def _tiers(cluster: RunningCluster) -> Iterator[tuple[psutil.Process, Path]]:
    """Each mixed worker, and the file of its tier."""
    for process in processes(cluster, "ray::mixed"):
        for file in process.open_files():
            if file.path.endswith(".kv"):
                yield process, Path(file.path)


def _on_a_slow_disk(cluster: RunningCluster, end: Event) -> None:
    """A worker reads 256 KiB/s, and nothing from the page cache of its tier's file, while prompts that fill 1.5 pools
    come again and again. Needs root, and the first version of control groups."""
    [(worker, path)] = _tiers(cluster)
    device = path.stat().st_dev
    group = _BLKIO / f"pdserve-drill-{worker.pid}"
    group.mkdir()
    (group / "blkio.throttle.read_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {256 * 2**10}")
    (group / "cgroup.procs").write_text(str(worker.pid))
    try:
        with path.open("r+b") as file, httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as client:
            for number in cycle(range(80)):
                if end.is_set():
                    return
                os.fdatasync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                body = {"prompt": [number + 1] * 256, "max_tokens": 1}
                client.post("/v1/completions", json=body).raise_for_status()
    finally:
        (_BLKIO / "cgroup.procs").write_text(str(worker.pid))
        group.rmdir()


@contextmanager
def _happening(fault: Fault | None, cluster: RunningCluster) -> Iterator[None]:
    end = Event()
    thread = Thread(target=fault or (lambda cluster, end: None), args=(cluster, end))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _send(cluster: RunningCluster, mark: str, number: signal.Signals) -> None:
    for process in processes(cluster, mark):
        try:
            process.send_signal(number)
        except psutil.Error:
            continue  # it has just ended


_ONE_EACH = {"slo": SLO, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}
_WITH_TIER = {
    "slo": SLO,
    "prefill": {"replicas": 0},
    "decode": {"replicas": 0},
    "mixed": {"replicas": 1, "kv_memory": "16MiB", "kv_tier": {"path": "tiers", "size": "64MiB"}},
}
CASES = (
    Case(
        what="objectives that no request can meet",
        alerts=("SloBudgetBurnsFast", "SloBudgetBurns", "PromptsPlacedLate", "PromptsWait"),
        deployment={**_ONE_EACH, "slo": {"ttft_seconds": 0.001, "tpot_seconds": 0.001}},
    ),
    Case(
        what="long prompts at twice the rate that prefill can serve",
        alerts=("PrefillBusierThanDecode", "PromptsWait", "SloBudgetBurnsFast"),
        deployment={**_ONE_EACH, "router": {"policy": "least-loaded"}},  # the default would use the decode worker, too
        options=("--time-scale", "4"),
        rate=3.0,
        num_prompt_tokens=4000,
        num_output_tokens=2,
    ),
    Case(
        what="long answers, and a KV pool of decode that holds few of them",
        alerts=("AnswersArePreempted", "KvDoesNotMove", "ParkedPromptsExpire", "PlacementFallsBack"),
        deployment={**_ONE_EACH, "decode": {"replicas": 1, "kv_memory": "1GiB", "swap_memory": 0}},
        options=("--time-scale", "4"),
        rate=1.0,
        num_prompt_tokens=900,
        num_output_tokens=2000,
    ),
    Case(
        what="short answers to more prompts than the KV pool of decode holds",
        alerts=("DecodeKvFull",),
        deployment={**_ONE_EACH, "prefill": {"replicas": 2}, "decode": {"replicas": 1, "kv_memory": "1GiB"}},
        options=("--time-scale", "16"),
        rate=14.0,
        num_prompt_tokens=232,  # with its answer 16 blocks, all of which it holds from the start
        num_output_tokens=24,
    ),
    Case(
        what="long answers to short prompts, on a decode worker too slow for the objective",
        alerts=("DecodeBusierThanPrefill",),
        deployment={**_ONE_EACH, "slo": {"ttft_seconds": 0.5, "tpot_seconds": 0.02}},
        options=("--time-scale", "4"),
        rate=2.0,
        num_prompt_tokens=30,
        num_output_tokens=500,
    ),
    Case(
        what="the profile of a machine ten times as fast",
        alerts=("StepsSlowerThanPredicted",),
        deployment=_ONE_EACH,
        cluster=mispredicted_cluster,
        num_prompt_tokens=50,
        num_output_tokens=20,
    ),
    Case(
        what="a prefill worker that stands still",
        alerts=("NoPrefillWorker", "WorkerFlaps"),
        deployment=_ONE_EACH,
        fault=_paused("ray::prefill", 8.0, 2.0),
    ),
    Case(
        what="a decode worker that stands still",
        alerts=("NoDecodeWorker",),
        deployment=_ONE_EACH,
        fault=_paused("ray::decode", 9.0, 2.0),
    ),
    Case(
        what="transfer processes that can open no connection",
        alerts=("KvPullsFail",),
        deployment={**_ONE_EACH, "kv_transfer": {"transport": "tcp"}},
        fault=_without_files("transfer_process"),
    ),
    Case(
        what="workers that are added and taken away again",
        alerts=("ScaleFlaps",),
        deployment=_ONE_EACH,
        fault=_changed_back_and_forth,
    ),
    Case(
        what="a file of a tier that is deleted",
        alerts=("KvTierOff",),
        deployment=_WITH_TIER,
        cluster=running_cluster,
        num_prompt_tokens=50,
        num_output_tokens=2,
        fault=_without_tier,
    ),
    Case(
        what="a tier on a disk that is slower than computing",
        alerts=("KvTierSlow",),
        deployment=_WITH_TIER,
        cluster=running_cluster,
        num_prompt_tokens=50,
        num_output_tokens=2,
        fault=_on_a_slow_disk,
    ),
    Case(
        what="a router that stands still",
        alerts=("RouterDown",),
        deployment=_ONE_EACH,
        fault=_paused("pdserve.router", 9.0, 5.0),
    ),
)


def fire_alerts(wanted: AbstractSet[str], pictures: Path | None) -> tuple[dict[str, Any], bool]:
    """Make the alerts ``wanted`` fire; returns the seconds until each did by its fault, and whether all did."""
    fired: dict[str, str] = {}
    for case in CASES:
        if wanted & set(case.alerts) - set(fired):
            for name, after_s in _play(case, pictures).items():
                if name not in fired:
                    fired[name] = f"{after_s:.0f} s after: {case.what}"
                    sys.stderr.write(f"{name}: fired {fired[name]}\n")
    missing = sorted(wanted - set(fired))
    return {"speed": SPEED, "fired": fired, "not_fired": missing}, not missing


def _play(case: Case, pictures: Path | None) -> dict[str, float]:
    """Seconds from the fault until each alert fired."""
    fired: dict[str, float] = {}
    sys.stderr.write(f"{case.what}\n")
    with ExitStack() as stack:
        cluster = stack.enter_context(case.cluster(case.deployment, *case.options))
        prometheus = stack.enter_context(running_prometheus(cluster.admin_url, PORT, speed=SPEED))
        # Before its first scrape, Prometheus had nothing from the router.
        wait_for(lambda: not prometheus.firing() & set(case.alerts), TIMEOUT_S)
        stack.enter_context(load(cluster, case.rate, case.num_prompt_tokens, case.num_output_tokens))
        stack.enter_context(_happening(case.fault, cluster))
        began_s = time.time()
        while time.time() - began_s < TIMEOUT_S and not set(case.alerts) <= set(fired):
            for name in prometheus.firing() & set(case.alerts):
                fired.setdefault(name, time.time() - began_s)
            time.sleep(0.5)
        if pictures:
            draw_all(prometheus, pictures / case.what.replace(" ", "-"), began_s - 10, time.time(), speed=SPEED)
    return fired
