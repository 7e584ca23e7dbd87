"""What metrics cost the router: CPU time and tokens a second with and without them, and the time of a scrape.

    python -m pdserve.bench.metrics_cost [--rounds 6] [--seconds 8] [--streams 64] [--json FILE]

A prefill and a decode worker, emulated in no time, serve two routers, in one of which nothing is counted. Both stream
by turns, as fast as the machine can. Workers have no metrics: they report the load of each step, which the router
needs, whether it is counted or not.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from statistics import median

import httpx
import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from rich.console import Console

from pdserve.bench.edge import run_streams, write_model
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.codec import from_json, to_json, to_plain
from pdserve.contracts.placement import WorkerConfig, WorkerEndpoint, WorkerRole
from pdserve.proto.v1 import worker_pb2
from pdserve.router.cluster.worker_metrics import WorkerMetrics
from pdserve.router.http.token_timer import TokenTimer
from pdserve.router.main import main as run_router
from pdserve.router.metrics import RouterMetrics
from pdserve.router.process_config import RouterProcessConfig
from pdserve.router.requests.interface import DispatchObserver

GPU = "h100-sxm"
START_S = 60.0
FLEETS = (64, 512)
"""Numbers of workers of a scrape."""
CALLS = 20_000


def serve(config: str, is_counted: bool) -> None:
    """A router, in a process of its own."""
    if not is_counted:
        observed = [name for name in vars(DispatchObserver) if not name.startswith("_")]
        for owner, names in (
            (RouterMetrics, [*observed, "responded", "tenant_served", "observe_transfer"]),
            (WorkerMetrics, ["observe"]),
            (TokenTimer, ["token", "wrote", "finished"]),
        ):
            for name in names:
                setattr(owner, name, lambda *_arguments, **_named: None)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        run_router(["--config", config, "--die-with-parent"])


@contextmanager
def running_worker(role: WorkerRole, model: Path) -> Iterator[WorkerEndpoint]:
    config = WorkerConfig(
        worker_id=f"{role.value}-0",
        role=role,
        model_path=str(model),
        max_model_len=8192,
        emulate=GPU,
        time_scale=0.0,
    )
    command = [sys.executable, "-m", f"pdserve.{role.value}_worker.worker", "--config", "-", "--die-with-parent"]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(to_json(config) + "\n")
            process.stdin.flush()
            yield from_json(WorkerEndpoint, process.stdout.readline(), "the endpoint")
        finally:
            process.kill()


@contextmanager
def running_router(
    model: Path, workers: list[WorkerEndpoint], is_counted: bool
) -> Iterator[tuple[str, psutil.Process]]:
    """URL and process of a router that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        port, admin_port = first.getsockname()[1], second.getsockname()[1]
    config = RouterProcessConfig(
        model_path=str(model), served_name="model", port=port, admin_port=admin_port, hardware=GPU, page=False
    )
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(to_json(config), is_counted), daemon=True
    )
    process.start()
    assert process.pid is not None
    try:
        url, deadline_s = f"http://127.0.0.1:{admin_port}", time.monotonic() + START_S
        while True:
            try:
                httpx.put(f"{url}/workers", json=to_plain(workers), trust_env=False).raise_for_status()
                if httpx.get(f"{url}/status", trust_env=False).json()["ready"]:
                    break
            except httpx.TransportError:
                pass  # it is starting
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the router is not ready after {START_S:.0f} s")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()


def measure(url: str, router: psutil.Process, num_streams: int, seconds: float) -> dict[str, float]:
    cpu_s, gaps_s, num_tokens = run_streams(url, router.pid, num_streams, seconds)
    return {
        "router_us_per_token": round(1e6 * cpu_s / num_tokens, 1),
        "tokens_per_s": round(num_tokens / seconds),
        "itl_p50_ms": round(1e3 * median(gaps_s), 1),
    }


def least_us(call: Callable[[], object], num_calls: int) -> float:
    """CPU time of a call, the least of five measurements."""
    found = []
    for _ in range(5):
        began_s = time.process_time()
        for _ in range(num_calls):
            call()
        found.append((time.process_time() - began_s) / num_calls)
    return round(1e6 * min(found), 2)


def calls() -> dict[str, float]:
    """Microseconds of a token, of a worker's frame and of scrapes."""
    metrics = RouterMetrics()
    timer = TokenTimer(metrics, time.monotonic())
    load = worker_pb2.Load(num_running=9, num_blocks_free=99, step_s=0.02, step_tokens=9, predicted_step_s=0.02)
    workers = [WorkerMetrics(metrics, "decode-0", WorkerRole.DECODE)]
    timer.token(0)
    found = {
        "token_us": least_us(lambda: timer.token(0), CALLS),
        "frame_us": least_us(lambda: workers[0].observe(load), CALLS),
    }
    for num_workers in FLEETS:
        for index in range(len(workers), num_workers):
            role = WorkerRole.PREFILL if index % 2 else WorkerRole.DECODE
            workers.append(WorkerMetrics(metrics, f"{role.value}-{index}", role))
        for name, write in (("text", generate_latest), ("openmetrics", generate_openmetrics)):

            def scrape(write: Callable[[CollectorRegistry], bytes] = write) -> bytes:
                for worker in workers:
                    worker.observe(load)
                metrics.refresh()
                return write(metrics.registry)

            found[f"scrape_{num_workers}_{name}_ms"] = round(least_us(scrape, 1) / 1e3, 1)
        found[f"lines_{num_workers}"] = generate_latest(metrics.registry).count(b"\n")
    return found


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each router in a round")
    parser.add_argument("--streams", type=int, default=64)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    called = calls()
    console.print(called)
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        model = write_model(Path(work))
        roles = (WorkerRole.PREFILL, WorkerRole.DECODE)
        workers = [stack.enter_context(running_worker(role, model)) for role in roles]
        routers = {each: stack.enter_context(running_router(model, workers, is_counted=each)) for each in found}
        for number in range(2 * arguments.rounds):
            is_counted = number % 4 in (0, 3)
            url, process = routers[is_counted]
            figures = measure(url, process, arguments.streams, arguments.seconds)
            found[is_counted].append(figures)
            console.print("with" if is_counted else "without", figures)
    names = ("router_us_per_token", "tokens_per_s", "itl_p50_ms")
    result = {
        "with" if is_counted else "without": {
            name: {"median": round(median(values), 2), "lowest": min(values), "highest": max(values)}
            for name in names
            for values in [[run[name] for run in runs]]
        }
        for is_counted, runs in found.items()
    }
    publish({"calls": called, "streams": arguments.streams, "rounds": arguments.rounds, **result}, arguments.json)


if __name__ == "__main__":
    main()
