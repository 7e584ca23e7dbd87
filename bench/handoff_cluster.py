"""A cluster to break: real workers and transfer processes, and the router's dispatch.

Used by `pdserve.bench.handoff_soak`, `failover` and `relabels`, which bring the faults. Each request must end in the
right tokens or in one error, and after the end of every lease no block may be referenced anywhere.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, replace

import psutil

from pdserve.bench.handoff_models import MAX_ANSWER, MAX_PROMPT, ComputedModel, Model, Question
from pdserve.contracts import metrics
from pdserve.contracts.codec import from_json, to_json
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.events import RequestEvent, RequestEventKind, SchedulerLoad
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerConfig, WorkerEndpoint, WorkerRole
from pdserve.kv_transfer.data_stream import MAGIC
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware, slowed
from pdserve.proto.v1 import worker_pb2
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.cluster.remote_worker import RemoteWorker
from pdserve.router.cluster.worker import Worker
from pdserve.router.metrics import RouterMetrics
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.requests.settings import NO_OBJECTIVES, DispatchSettings
from pdserve.router.token_stream import TokenStream

NUM_CLIENTS = 24
BLOCK_SIZE = 16
MAX_MODEL_LEN = MAX_PROMPT + MAX_ANSWER + 8
DECODE_BLOCKS = NUM_CLIENTS * MAX_MODEL_LEN // BLOCK_SIZE // 4 // 2
"""Of each of two decode workers: together a quarter of what all clients may need at once."""
STEP_TIMEOUT_S = 5.0
"""Wait for a handoff to reach a step."""
PARK_TIMEOUT_S = 2.0
FREE_S = 2.0
"""After the end of every lease, the time until no block is referenced."""
POLL_S = 0.05
START_S = 120.0
CHUNK_BYTES = 1 << 16
PROXY_HOST = "127.0.0.2"
"""Where a proxy listens, with the ports that the transfer process has at 127.0.0.1. Workers have no cluster token here:
its proofs name the address, which the proxy changes."""

Degrees = tuple[int, int]
"""Tensor-parallel ranks, and pipeline stages."""


EVENT_STEPS = {
    RequestEventKind.STARTED: "started",
    RequestEventKind.LAST_CHUNK: "offered",
    RequestEventKind.JOINED: "pulled",
    RequestEventKind.RELEASED: "released",
}
LINK_STEPS = ("pull message", "bytes sent", "half of them")
"""Steps that a proxy sees: a chunk of a gRPC stream, and a chunk of a data stream before and amid its way."""


class Steps:
    """Steps of handoffs as they are seen from outside: in events at the router, and in bytes at a proxy."""

    def __init__(self) -> None:
        self._awaited = ""
        self._action: Callable[[], None] = lambda: None
        self._has_come = asyncio.Event()

    async def at_next(self, step: str, action: Callable[[], None]) -> None:
        """Call ``action`` as soon as any handoff reaches ``step``, before anything follows from it; give up after
        `STEP_TIMEOUT_S`."""
        self._awaited, self._action = step, action
        self._has_come.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await self._has_come.wait()
        self._awaited = ""

    def reached(self, step: str) -> None:
        if step == self._awaited:
            self._awaited = ""
            self._action()
            self._has_come.set()


class LinkFaults:
    """Faults of all connections between transfer processes; none while it is calm."""

    def __init__(self, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.is_calm = True
        self._rng = rng
        self._whole = asyncio.Event()
        self._whole.set()

    async def cut(self, seconds: float) -> None:
        """Hold back every byte for a while."""
        self.counts["link cut"] += 1
        self._whole.clear()
        await asyncio.sleep(seconds)
        self._whole.set()

    async def pass_on(self, data: bytes, *, is_data: bool) -> bytes:
        """Bytes to send on instead of ``data``; flipped ones on data streams only, whose blocks have digests.

        Raises:
            ConnectionError: the connection breaks.
        """
        await self._whole.wait()
        fault = self._rng.random()
        if self.is_calm or fault > 0.01:
            return data
        if fault < 0.002:
            self.counts["connection broken"] += 1
            raise ConnectionError
        if fault < 0.005 and is_data:
            self.counts["byte flipped"] += 1
            damaged = bytearray(data)
            damaged[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
            return bytes(damaged)
        self.counts["delayed"] += 1
        await asyncio.sleep(self._rng.random() / 5)
        return data


async def start_proxy(port: int, faults: LinkFaults, steps: Steps) -> asyncio.Server:
    """Pass connections on from `PROXY_HOST` to loopback."""

    async def pump(data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_data: bool) -> None:
        with suppress(OSError):
            while data or (data := await reader.read(CHUNK_BYTES)):
                data = await faults.pass_on(data, is_data=is_data)
                steps.reached("bytes sent" if is_data else "pull message")
                writer.write(data[: len(data) // 2])
                await writer.drain()
                if is_data:
                    steps.reached("half of them")
                writer.write(data[len(data) // 2 :])
                await writer.drain()
                data = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError):
            first = await reader.read(CHUNK_BYTES)
            is_data = first.startswith(MAGIC)
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            with closing(far_writer):
                pumps = [
                    asyncio.ensure_future(pump(first, reader, far_writer, is_data)),
                    asyncio.ensure_future(pump(b"", far_reader, writer, is_data)),
                ]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for each in pumps:
                    each.cancel()

    return await asyncio.start_server(serve, PROXY_HOST, port)


class WorkerProcess:
    """A worker that is started anew whenever it has ended."""

    def __init__(self, config: WorkerConfig, faults: LinkFaults, steps: Steps) -> None:
        self.name = config.worker_id
        self.command = [sys.executable, "-m", "pdserve.engine.worker.process"]
        self._config = config
        self._faults = faults
        self._steps = steps
        self._proxies: list[asyncio.Server] = []
        self.process: asyncio.subprocess.Process | None = None
        self.pids: list[int] = []
        """The worker, its transfer process, its other ranks."""
        self.endpoints: list[WorkerEndpoint] = []
        """Of each micro-batch."""

    @property
    def is_prefill(self) -> bool:
        return self.name.startswith("prefill")

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.returncode is not None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self.command, "--config", "-", "--die-with-parent",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(to_json(self._config).encode() + b"\n")
        async with asyncio.timeout(START_S):
            lines = [await self.process.stdout.readline() for _ in range(self._config.pipeline_parallel)]
        self.endpoints = [from_json(WorkerEndpoint, line.decode(), "the endpoint") for line in lines]
        children = psutil.Process(self.process.pid).children()
        self.pids = [self.process.pid, *(child.pid for child in children)]
        if self._config.transport == "tcp" and self.is_prefill:
            await self._start_proxies(children)

    async def _start_proxies(self, children: list[psutil.Process]) -> None:
        for proxy in self._proxies:
            proxy.close()
        ports = {
            each.laddr.port
            for child in children
            for each in child.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
        self._proxies = [await start_proxy(port, self._faults, self._steps) for port in ports]

    async def stop(self) -> None:
        for proxy in self._proxies:
            proxy.close()
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Send a signal; returns whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class _ProxiedCluster(Cluster):
    """Router whose decode workers may reach prefill workers through the proxies."""

    is_proxied = False

    def check_model(self, worker: RemoteWorker, welcome: worker_pb2.Welcome) -> None:
        if self.is_proxied:
            welcome.kv_address = welcome.kv_address.replace("127.0.0.1", PROXY_HOST)
        super().check_model(worker, welcome)


class _WatchedDispatcher(Dispatcher):
    """Dispatcher that says which steps its requests reach."""

    steps: Steps

    def event_received(self, worker: Worker, event: RequestEvent) -> None:
        if event.kind in EVENT_STEPS:
            self.steps.reached(EVENT_STEPS[event.kind])
        super().event_received(worker, event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Steps that take the predicted time, in pools as large as the emulated GPU's."""

    time_scale: float = 0.0
    """0 is instantaneous, in small pools."""
    max_model_len: int = MAX_MODEL_LEN
    dtype: str = "float32"
    slo: SloConfig = NO_OBJECTIVES


INSTANT = Pace()


class HandoffCluster:
    """Built by `running_cluster`."""

    def __init__(
        self, model: Model, layouts: Mapping[str, Degrees], transport: str, rng: random.Random, pace: Pace
    ) -> None:
        self.model = model
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.faults = LinkFaults(rng)
        self.metrics = RouterMetrics()
        device = hardware("h100-sxm")
        device = slowed(device, pace.time_scale) if pace.time_scale else device
        cost = CostModel(DecoderConfig.from_folder(model.path).shape, device, Precision(dtype=pace.dtype))
        self.steps = Steps()
        self.dispatcher = _WatchedDispatcher(
            dict.fromkeys(WorkerRole, cost),
            DispatchSettings(max_silence_s=60.0, slo=pace.slo),
            time.monotonic,
            self.metrics,
            call_soon=asyncio.get_running_loop().call_soon,
        )
        self.dispatcher.steps = self.steps
        self._cluster = _ProxiedCluster(self.dispatcher, self.metrics)
        self._cluster.is_proxied = self.is_proxied = transport == "tcp"
        self.workers = {
            name: WorkerProcess(worker_config(name, model, degrees, pace, transport=transport), self.faults, self.steps)
            for name, degrees in layouts.items()
        }

    def pulls(self) -> Counter[str]:
        """Pulls that decode workers have reported, by transport, and failed ones by stage."""
        counts: Counter[str] = Counter()
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "pdserve_kv_transfer_seconds_count":
                    counts[sample.labels["transport"]] += int(sample.value)
                elif sample.name == "pdserve_kv_transfer_failures_total" and sample.value:
                    counts[f"failed: {sample.labels['stage']}"] += int(sample.value)
        return counts

    async def start_workers(self) -> None:
        """Start the workers that do not run, until all of them take work."""
        async with asyncio.timeout(START_S):
            while True:
                ended = [worker for worker in self.workers.values() if worker.has_ended]
                if ended:
                    self.counts["workers started"] += len(ended)
                    await asyncio.gather(*(worker.start() for worker in ended))
                    await self._cluster.set_targets(
                        endpoint for worker in self.workers.values() for endpoint in worker.endpoints
                    )
                elif all(worker.takes_work for worker in self._cluster.workers.values()):
                    return
                await asyncio.sleep(POLL_S)

    async def kill(self, name: str) -> None:
        """Kill a worker, and start it anew."""
        worker = self.workers[name]
        assert worker.process is not None
        worker.process.kill()
        await worker.process.wait()
        self.counts["killed"] += 1
        await self.start_workers()

    async def relabel(self, roles: Mapping[str, WorkerRole]) -> None:
        """Have workers take these roles, by name."""
        for name, role in roles.items():
            worker = self.workers[name]
            worker.endpoints = [replace(endpoint, role=role) for endpoint in worker.endpoints]
        await self._cluster.set_targets(endpoint for worker in self.workers.values() for endpoint in worker.endpoints)

    def session(self, worker_id: str) -> RemoteWorker:
        """The router's session with a worker, or with a micro-batch of one."""
        return self._cluster.workers[worker_id]

    async def sweep(self) -> None:
        """Enforce deadlines, until cancelled."""
        await self._cluster.sweep_forever()

    async def close(self) -> None:
        await self._cluster.close()
        for worker in self.workers.values():
            await worker.stop()

    def start(self, question: Question) -> TokenStream:
        prompt, sampling = question
        spec = RequestSpec(prompt_tokens=prompt, sampling=sampling, arrived_s=time.monotonic())
        stream = TokenStream(self.dispatcher, spec)
        self.dispatcher.start(stream)
        return stream

    async def request(
        self, question: Question, *, leaves_after_s: float | None = None, times_s: list[float] | None = None
    ) -> bool:
        """Send one request, which must end in the right tokens or in one error; returns whether it got tokens.

        Args:
            times_s: gets the time of each token.

        Raises:
            AssertionError: it did not.
        """
        tokens: list[int] = []
        try:
            stream = self.start(question)
            with suppress(TimeoutError):
                async with asyncio.timeout(leaves_after_s):
                    async for event in stream:
                        tokens.append(event.token)
                        if times_s is not None:
                            times_s.append(time.monotonic())
            stream.cancel()
        except GenerationError as error:
            self.counts[f"error {error.status}"] += 1
            if error.status == 500 and "workers ended" not in error.message:
                raise AssertionError(f"a request failed: {error.message}") from error
            return False
        expected = self.model.answer(question)
        is_whole = len(tokens) == len(expected)
        if tokens != expected[: len(tokens)] or not (is_whole or leaves_after_s is not None):
            raise AssertionError(f"{question}: got {tokens}, expected {expected}")
        self.counts["right" if is_whole else "cancelled"] += 1
        return True

    async def check_free(self) -> None:
        """Check that no block is referenced `FREE_S` after the end of every lease.

        Raises:
            AssertionError: some are.
        """
        await self.start_workers()
        assert self.dispatcher.num_in_flight == 0
        await asyncio.sleep(PARK_TIMEOUT_S)
        deadline_s = time.monotonic() + FREE_S
        while busy := [worker for worker in self._cluster.workers.values() if _is_busy(worker.load)]:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"blocks are still referenced: {[(each.worker_id, each.load) for each in busy]}")
            await asyncio.sleep(POLL_S)
        assert not self.metrics[metrics.REDISPATCHES].labels("failed")._value.get(), "a step found wrong KV"


@asynccontextmanager
async def running_cluster(
    model: Model,
    layouts: Mapping[str, Degrees],
    transport: str,
    *,
    seed: int = 0,
    pace: Pace = INSTANT,
) -> AsyncIterator[HandoffCluster]:
    """Start workers and yield their cluster.

    Args:
        layouts: degrees of each worker, by name.
        pace: of emulated workers.
    """
    cluster = HandoffCluster(model, layouts, transport, random.Random(seed), pace)
    sweep = asyncio.ensure_future(cluster.sweep())
    try:
        await cluster.start_workers()
        yield cluster
    finally:
        sweep.cancel()
        await cluster.close()


async def learn(model: ComputedModel) -> None:
    """Learn the model's answers from a worker of one rank, without a handoff."""
    async with running_cluster(model, {"mixed-0": (1, 1)}, "memfd") as cluster:
        model.answers = [[event.token async for event in cluster.start(question)] for question in model.questions]


def worker_config(name: str, model: Model, degrees: Degrees, pace: Pace, *, transport: str) -> WorkerConfig:
    """A decode worker whose pool, without a pace, has a quarter of the blocks that its clients may need at once, or
    another worker."""
    role = WorkerRole(name.partition("-")[0])
    num_blocks = DECODE_BLOCKS if role is WorkerRole.DECODE else 4 * DECODE_BLOCKS
    return WorkerConfig(
        worker_id=name, role=role, model_path=str(model.path), emulate=model.emulate, time_scale=pace.time_scale,
        precision=Precision(dtype=pace.dtype), tensor_parallel=degrees[0], pipeline_parallel=degrees[1],
        max_model_len=pace.max_model_len, block_size=BLOCK_SIZE, num_kv_blocks=0 if pace.time_scale else num_blocks,
        transport=transport, park_timeout_s=PARK_TIMEOUT_S,
    )  # fmt: skip


def _is_busy(load: SchedulerLoad) -> bool:
    return load.num_blocks_referenced + load.num_running + load.num_waiting + load.num_parked > 0
