"""Router process: ``python -m pdserve.router --config JSON``.

Prints one JSON line with its addresses once both ports listen. SIGTERM or SIGINT drains: new requests get 503, running
ones finish within a time limit, and the process exits with 0; a second signal ends it at once. Wires the router's parts
together and owns nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop
from fastapi import FastAPI

from pdserve.contracts.codec import from_json
from pdserve.contracts.deployment import DEFAULT_TIER, PhaseConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.sampling_defaults import sampling_defaults
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware, slowed
from pdserve.proto.parent_death import die_with_parent
from pdserve.router.admin import create_admin_app
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.http.app import create_app
from pdserve.router.http.keys import KeyFile
from pdserve.router.http.protocol import MAX_CONNECTIONS, BoundedHttpProtocol
from pdserve.router.http.request_log import RequestLog
from pdserve.router.log_format import configure_log
from pdserve.router.metrics import RouterMetrics
from pdserve.router.overview import Overview
from pdserve.router.process_config import RouterProcessConfig
from pdserve.router.record import RecordSink
from pdserve.router.replicas import Replicas
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.placement import Costs
from pdserve.router.requests.settings import DispatchSettings
from pdserve.router.text.tokenizer import ChatTokenizer
from pdserve.router.text.tool_calls import TOOL_FORMATS

if TYPE_CHECKING:  # it needs an extra
    from pdserve.router.http.tracing import Tracer

log = logging.getLogger(__name__)

PROG = "python -m pdserve.router"
IDLE_CONNECTION_S = 65
"""Idle client connections stay open longer than most client pools keep them."""
CLOSE_TIMEOUT_S = 5
"""Seconds for responses to reach their clients after the drain."""
BACKLOG = 2048
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Parameters of mallopt in glibc."""
KEPT_BYTES = 2**20
"""Smaller blocks of memory are kept for the next ones. What arrives at once is smaller, and to get new pages for it
costs more than to read it."""
SWITCH_S = 0.0002
"""After which a thread that computes lets the event loop go on. A step takes several turns, which wait so long each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a router until a signal ends it; return the exit status."""
    parser = argparse.ArgumentParser(prog=PROG, description="The router of a pdserve cluster, as a plain process.")
    parser.add_argument(
        "--config", required=True, help="the router's configuration as a JSON object; - reads a line from stdin"
    )
    parser.add_argument("--die-with-parent", action="store_true", help="end as soon as the starting process is gone")
    arguments = parser.parse_args(argv)
    if arguments.die_with_parent:
        die_with_parent()
    try:
        # Every user of the host can read a command line, and the configuration holds the cluster token.
        text = sys.stdin.readline() if arguments.config == "-" else arguments.config
        config = from_json(RouterProcessConfig, text, "the router's configuration")
        configure_log(config.router.log_format)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(config))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{PROG}: {' '.join(str(error).split())}\n")
        return 1


async def serve(config: RouterProcessConfig) -> int:
    """Build the router, serve both ports and drain on a signal.

    Raises:
        ValueError: a port is taken, or a model folder, hardware name, file of API keys or log of requests is invalid.
    """
    router, model, slo = config.router, config.deployment.model, config.deployment.slo
    stopped = asyncio.create_task(_stop_on_signals().wait())
    _return_memory()
    sys.setswitchinterval(SWITCH_S)
    # One, for metrics and keys: several would only wait for one another, and the event loop for all of them.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    tokenizer = ChatTokenizer.from_folder(Path(model.path), TOOL_FORMATS.get(model.tool_format))
    defaults = sampling_defaults(Path(model.path)) if model.generation_config == "auto" else {}
    costs = build_cost_models(config)
    # From the token, so that a restarted router finds the blocks that workers have cached.
    cache_secret = config.cluster_token.encode() or secrets.token_bytes(32)
    tiers = (DEFAULT_TIER, *slo.tiers)
    replicas = Replicas(router.replicas)
    keys = KeyFile(Path(router.keys_file), cache_secret, tiers, replicas) if router.keys_file else None
    sinks: list[RecordSink] = [RequestLog(Path(router.request_log))] if router.request_log else []
    if router.tracing:
        sinks.append(_tracer(router.tracing))
    public = listen(router.host, router.port, "router.port", is_shared=router.replicas > 1)
    admin = listen(router.admin_host, router.admin_port, "router.admin_port")

    metrics = RouterMetrics(slo, has_workers=config.replica == 0)
    settings = DispatchSettings(
        policy=router.policy,
        max_in_flight=router.max_queued_requests,
        max_silence_s=router.max_silence_seconds,
        slo=slo,
    )
    call_soon = asyncio.get_running_loop().call_soon
    dispatcher = Dispatcher(costs, settings, time.monotonic, metrics, replicas, call_soon)
    metrics.track(dispatcher)
    cluster = Cluster(dispatcher, metrics, cluster_token=config.cluster_token, tls=config.deployment.security.tls)
    overview = Overview(cluster, slo, model.served_name)
    app = create_app(
        cluster,
        tokenizer,
        config.deployment,
        defaults=defaults,
        keys=keys,
        sinks=sinks,
        overview=overview if router.page else None,
    )
    max_connections = max(MAX_CONNECTIONS, 2 * router.max_queued_requests)  # clients keep some without a request
    servers = [
        (_server(app, router.tls_certificate, router.tls_key, max_connections), public),
        (_server(create_admin_app(cluster, config, costs, overview)), admin),
    ]
    gc.collect()
    gc.freeze()  # or full collections go through every module, and hold up every stream
    serving = [asyncio.create_task(server.serve(sockets=[listener])) for server, listener in servers]
    endless = (cluster.sweep_forever(), cluster.keep_proven(), overview.sample_forever())
    helpers = [asyncio.create_task(each) for each in endless]
    addresses: dict[str, str | int] = {}
    for name, listener in (("", public), ("admin_", admin)):
        addresses[f"{name}host"], addresses[f"{name}port"] = listener.getsockname()[:2]
    sys.stdout.write(json.dumps(addresses) + "\n")
    sys.stdout.flush()
    try:
        await asyncio.wait([stopped, *serving, *helpers], return_when=asyncio.FIRST_COMPLETED)
        for task in (*serving, *helpers):
            if task.done():
                task.result()
        await _drain(cluster, config.drain_timeout_s)
    finally:
        for helper in helpers:
            helper.cancel()
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*serving, *helpers, return_exceptions=True)
        await cluster.close()
        for sink in sinks:
            await asyncio.to_thread(sink.close)
    return 0


def _return_memory() -> None:
    """Have the C library return the memory of large bodies to the system, instead of keeping it for the next ones."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # other C libraries have none
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, 2)


def _tracer(collector: str) -> Tracer:
    """
    Raises:
        ValueError: OpenTelemetry is not installed.
    """
    try:
        from pdserve.router.http.tracing import Tracer
    except ImportError as error:
        raise ValueError("router.tracing needs OpenTelemetry: pip install 'pdserve[tracing]'") from error
    return Tracer(collector)


def build_cost_models(config: RouterProcessConfig) -> Costs:
    """Cost models of the deployment's checkpoint, one per role; the degrees of a role that has no workers do not
    count."""
    model = config.deployment.model
    shape = DecoderConfig.from_folder(Path(model.path)).shape
    catalogued = hardware(config.hardware, num_cores=config.cores_per_rank)
    costs = {}
    for role in WorkerRole:
        device = slowed(config.devices.get(role, catalogued), config.time_scale)
        phase = config.deployment.phase(role)
        if not (phase.replicas or phase.max_replicas):
            phase = PhaseConfig()
        costs[role] = CostModel(
            shape,
            device,
            model.precision,
            phase.tensor_parallel,
            phase.pipeline_parallel,
            config.deployment.kv_transfer.transport,
            expert_parallel=phase.expert_parallel,
        )
    return costs


def listen(host: str, port: int, key: str, *, is_shared: bool = False) -> socket.socket:
    """Open a socket that listens on ``host:port``; ``is_shared`` with other processes of this user.

    Raises:
        ValueError: the address is unusable; the message names ``key`` of the deployment file as the remedy.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_dual = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(
            address, family=family, backlog=BACKLOG, reuse_port=is_shared, dualstack_ipv6=is_dual
        )
    except socket.gaierror as error:
        raise ValueError(f"cannot listen on {host}: {error}") from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ValueError(
            f"cannot listen on {host} port {port}: {reason}; set {key} to a free port, or to 0 to have one picked"
        ) from None


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: this process has one drain for both servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(
    app: FastAPI, certificate: str = "", key: str = "", max_connections: int = MAX_CONNECTIONS
) -> uvicorn.Server:
    return _QuietServer(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            ssl_certfile=certificate or None,
            ssl_keyfile=key or None,
            limit_concurrency=max_connections,
            timeout_keep_alive=IDLE_CONNECTION_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
    )


def _stop_on_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM, SIGINT or SIGHUP sets; the second one ends the process."""
    stop = asyncio.Event()

    def receive() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(number, receive)
    return stop


async def _drain(cluster: Cluster, timeout_s: float) -> None:
    dispatcher = cluster.dispatcher
    dispatcher.admission.begin_drain()
    log.info("draining %d requests", dispatcher.num_in_flight)
    try:
        async with asyncio.timeout(timeout_s):
            await cluster.wait_idle()
    except TimeoutError:
        dispatcher.fail_all(f"the router stopped before the answer was complete ({timeout_s:g} s)")
