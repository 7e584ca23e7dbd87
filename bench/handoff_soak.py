"""Handoffs under faults: real workers and transfer processes, the router's dispatch, and a hash chain as the oracle.

    python -m pdserve.bench.handoff_soak [--handoffs 10000] [--transport memfd|tcp] [--seed 0] [--json FILE]

Two prefill and two decode workers emulate a model whose memory is a hash of all tokens so far, and check every context
that they continue: a lost, old or misplaced byte of KV ends in a failed step or a wrong token. The decode pools hold a
quarter of what the clients ask for. Meanwhile clients cancel, workers and transfer processes are killed, or stopped and
woken, and with tcp a proxy between the transfer processes flips bytes, delays them, breaks connections, and cuts the
link for seconds.

Each request must end in the right tokens or in one error. After each round, when every lease has ended, no block may be
referenced anywhere, and the workers that were started anew must serve.
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
from contextlib import closing, suppress
from typing import Any

import psutil

from pdserve.bench.checked_streams import expected_answer
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.codec import from_json, to_json
from pdserve.contracts.placement import WorkerConfig, WorkerEndpoint, WorkerRole
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.kv_transfer.data_stream import MAGIC
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.model.executors.hash_chain import HashVocabulary
from pdserve.model.weights.demo_model import DEMO_MODEL
from pdserve.proto.v1 import worker_pb2
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.cluster.remote_worker import RemoteWorker
from pdserve.router.metrics import RouterMetrics
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.interface import DispatchSettings
from pdserve.router.requests.request import GenerationError, RequestSpec

NUM_CLIENTS = 24
MAX_PROMPT, MAX_ANSWER = 240, 40
DECODE_BLOCKS = NUM_CLIENTS * (MAX_PROMPT + MAX_ANSWER) // 16 // 4 // 2
"""Of each of two decode workers: together a quarter of what all clients may need at once."""
PARK_TIMEOUT_S = 2.0
FREE_S = 2.0
"""After the end of every lease, the time until no block is referenced."""
FAULT_INTERVAL_S = 1.0
POLL_S = 0.05
START_S = 120.0
CHUNK_BYTES = 1 << 16
PROXY_HOST = "127.0.0.2"
"""Where a proxy listens, with the ports that the transfer process has at 127.0.0.1. Workers have no cluster token here:
its proofs name the address, which the proxy changes."""


class LinkFaults:
    """Faults of all connections between transfer processes."""

    def __init__(self, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.is_calm = False
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


async def start_proxy(port: int, faults: LinkFaults) -> asyncio.Server:
    """Pass connections on from `PROXY_HOST` to loopback."""

    async def pump(data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_data: bool) -> None:
        with suppress(OSError):
            while data or (data := await reader.read(CHUNK_BYTES)):
                writer.write(await faults.pass_on(data, is_data=is_data))
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

    def __init__(self, name: str, transport: str, faults: LinkFaults) -> None:
        role = WorkerRole(name.split("-")[0])
        self.name = name
        self._config = WorkerConfig(
            worker_id=name, role=role, model_path=str(DEMO_MODEL), emulate="h100-sxm", time_scale=0.0,
            num_kv_blocks=DECODE_BLOCKS if role is WorkerRole.DECODE else 4 * DECODE_BLOCKS, transport=transport,
            max_model_len=512, park_timeout_s=PARK_TIMEOUT_S,
        )  # fmt: skip
        self._faults = faults
        self._proxies: list[asyncio.Server] = []
        self.process: asyncio.subprocess.Process | None = None
        self.transfer_pid = 0
        self.endpoint: WorkerEndpoint | None = None

    async def start(self) -> None:
        module = f"pdserve.{self._config.role.value}_worker.worker"
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, "--config", "-", "--die-with-parent",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(to_json(self._config).encode() + b"\n")
        async with asyncio.timeout(START_S):
            line = await self.process.stdout.readline()
        self.endpoint = from_json(WorkerEndpoint, line.decode(), "the endpoint")
        children = psutil.Process(self.process.pid).children()
        (transfer,) = [each for each in children if any("transfer_process" in word for word in each.cmdline())]
        self.transfer_pid = transfer.pid
        if self._config.transport == "tcp" and self._config.role is WorkerRole.PREFILL:
            await self._start_proxies(transfer)

    async def _start_proxies(self, transfer: psutil.Process) -> None:
        for proxy in self._proxies:
            proxy.close()
        ports = {each.laddr.port for each in transfer.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        self._proxies = [await start_proxy(port, self._faults) for port in ports]

    async def stop(self) -> None:
        for proxy in self._proxies:
            proxy.close()
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class ProxiedCluster(Cluster):
    """Router whose decode workers reach prefill workers through the proxies."""

    is_proxied = False

    def check_model(self, worker: RemoteWorker, welcome: worker_pb2.Welcome) -> None:
        if self.is_proxied:
            welcome.kv_address = welcome.kv_address.replace("127.0.0.1", PROXY_HOST)
        super().check_model(worker, welcome)


class Soak:
    """One run over one transport."""

    def __init__(self, transport: str, seed: int, num_pairs: int) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults = LinkFaults(self.rng)
        model = DecoderConfig.from_folder(DEMO_MODEL)
        limits = model.limits(512)
        self._vocabulary = HashVocabulary(limits.vocab_size, limits.eos_token_ids)
        cost = CostModel(model.shape, hardware("h100-sxm"), Precision())
        self.metrics = RouterMetrics()
        self.dispatcher = Dispatcher(
            dict.fromkeys(WorkerRole, cost), DispatchSettings(deadline_s=60.0), time.monotonic, self.metrics
        )
        self.cluster = ProxiedCluster(self.dispatcher, self.metrics)
        self.cluster.is_proxied = transport == "tcp"
        self.workers = [
            WorkerProcess(f"{role}-{index}", transport, self.faults)
            for role in ("prefill", "decode")
            for index in range(num_pairs)
        ]

    @property
    def num_handoffs(self) -> int:
        """Pulls that decode workers have reported, failed ones too."""
        return sum(self.pulls().values())

    def pulls(self) -> Counter[str]:
        """Pulls by transport, and failed ones by stage."""
        counts: Counter[str] = Counter()
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "pdserve_kv_transfer_seconds_count":
                    counts[sample.labels["transport"]] += int(sample.value)
                elif sample.name == "pdserve_kv_transfer_failures_total" and sample.value:
                    counts[f"failed: {sample.labels['stage']}"] += int(sample.value)
        return counts

    async def run(self, num_handoffs: int, handoffs_per_round: int) -> None:
        sweep = asyncio.ensure_future(self.cluster.sweep_forever())
        try:
            await self._start_workers()
            while self.num_handoffs < num_handoffs:
                await self._round(min(num_handoffs, self.num_handoffs + handoffs_per_round))
                sys.stderr.write(f"{self.num_handoffs} handoffs: {dict(self.counts)} {dict(self.faults.counts)}\n")
        finally:
            sweep.cancel()
            await self.cluster.close()
            for worker in self.workers:
                await worker.stop()

    async def _start_workers(self) -> None:
        """Start the workers that do not run, until all of them take work."""
        async with asyncio.timeout(START_S):
            while True:
                ended = [each for each in self.workers if each.process is None or each.process.returncode is not None]
                if ended:
                    self.counts["workers started"] += len(ended)
                    await asyncio.gather(*(worker.start() for worker in ended))
                    await self.cluster.set_targets(each.endpoint for each in self.workers if each.endpoint is not None)
                elif all(worker.takes_work for worker in self.cluster.workers.values()):
                    return
                await asyncio.sleep(POLL_S)

    async def _round(self, num_handoffs: int) -> None:
        """Load and faults until so many handoffs, then calm, and a look at every block."""
        self.faults.is_calm = False
        async with asyncio.TaskGroup() as group:
            group.create_task(self._disturb(num_handoffs))
            for _ in range(NUM_CLIENTS):
                group.create_task(self._client(num_handoffs))
        self.faults.is_calm = True
        await self._start_workers()
        assert self.dispatcher.num_in_flight == 0
        await asyncio.sleep(PARK_TIMEOUT_S)
        await self._check_free()

    async def _check_free(self) -> None:
        deadline_s = time.monotonic() + FREE_S
        while busy := [worker for worker in self.cluster.workers.values() if _is_busy(worker.reported)]:
            if time.monotonic() > deadline_s:
                raise AssertionError(
                    f"blocks are still referenced: {[(each.worker_id, each.reported) for each in busy]}"
                )
            await asyncio.sleep(POLL_S)
        assert not self.metrics.redispatches.labels("failed")._value.get(), "a step found wrong KV"
        self.counts["rounds that ended with every block free"] += 1

    async def _client(self, num_handoffs: int) -> None:
        while self.num_handoffs < num_handoffs:
            length = self.rng.randint(1, MAX_PROMPT)
            family = self.rng.randrange(8)  # prompts of a family share a prefix
            prompt = tuple((family * 7 + index) % 512 for index in range(length))
            await self._request((*prompt, self.rng.randrange(512)), self.rng.randint(2, MAX_ANSWER))

    async def _request(self, prompt: tuple[int, ...], num_tokens: int) -> None:
        """One request, which must end in the right tokens or in one error."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        leaves = self.rng.random() < 0.1
        tokens: list[int] = []
        try:
            stream = self.cluster.start(
                RequestSpec(prompt_tokens=prompt, sampling=sampling, arrived_s=time.monotonic())
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(self.rng.random() / 10 if leaves else None):
                    tokens.extend([event.token async for event in stream])
            stream.cancel()
        except GenerationError as error:
            self.counts[f"error {error.status}"] += 1
            if error.status == 500 and "workers in a row" not in error.message:
                raise AssertionError(f"a request failed: {error.message}") from error
            await asyncio.sleep(0.2)
            return
        expected = expected_answer(prompt, num_tokens, self._vocabulary)
        if tokens != expected[: len(tokens)] or (len(tokens) < num_tokens and not leaves):
            raise AssertionError(f"prompt {prompt}: got {tokens}, expected {expected}")
        self.counts["right" if len(tokens) == num_tokens else "cancelled"] += 1

    async def _disturb(self, num_handoffs: int) -> None:
        """Kill, stop and wake processes, and cut the link; start workers that have ended."""
        while self.num_handoffs < num_handoffs:
            await asyncio.sleep(FAULT_INTERVAL_S * self.rng.random() * 2)
            worker = self.rng.choice(self.workers)
            assert worker.process is not None
            pid = self.rng.choice([worker.process.pid, worker.transfer_pid])
            kinds = ["kill", "stop", *(["cut"] if self.cluster.is_proxied else [])]
            match self.rng.choice(kinds):
                case "kill":
                    self.counts["processes killed"] += _send(pid, signal.SIGKILL)
                case "stop":
                    self.counts["processes stopped"] += _send(pid, signal.SIGSTOP)
                    await asyncio.sleep(self.rng.choice((0.1, 1.0, 5.0)))
                    _send(pid, signal.SIGCONT)
                case "cut":
                    await self.faults.cut(self.rng.choice((0.2, 1.0, 6.0)))
            await self._start_workers()


def _send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; returns whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _is_busy(load: worker_pb2.Load) -> bool:
    return load.num_blocks_referenced + load.num_running + load.num_waiting + load.num_parked > 0


def soak(
    transport: str, num_handoffs: int, *, seed: int = 0, handoffs_per_round: int = 500, num_pairs: int = 2
) -> dict[str, Any]:
    """Run ``num_handoffs`` over one transport, with as many prefill as decode workers; returns what was seen.

    Raises:
        AssertionError: a stream was wrong, or blocks were not freed.
    """
    run = Soak(transport, seed, num_pairs)
    started_s = time.monotonic()
    asyncio.run(run.run(num_handoffs, handoffs_per_round))
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "handoffs": run.num_handoffs,
        "pulls": dict(run.pulls()),
        "requests": dict(run.counts),
        "link": dict(run.faults.counts),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--handoffs", type=int, default=10_000, help="of each transport")
    parser.add_argument("--transport", choices=("memfd", "tcp"), action="append", help="may be repeated; default both")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transports = arguments.transport or ["memfd", "tcp"]
    publish({name: soak(name, arguments.handoffs, seed=arguments.seed) for name in transports}, arguments.json)


if __name__ == "__main__":
    main()
