"""The router under clients that mean it no good: does anybody else's stream wait?

    python -m pdserve.bench.edge [--seconds 15] [--streams 64] [--only bodies] [--json FILE]

A cluster with emulated workers answers the streams, while other processes send, one after the other: bodies of 8 MiB
of 20 kinds at 10 a second, 200 uploads of a few bytes now and then, 200 streams that nobody reads, and prompts of 128k
tokens at 2 a second. Measured meanwhile: how late the router answers ``GET /live``, which is how late its event loop is
and what the machine adds; the gaps between tokens of the streams; and the memory of the router. The same is measured
before without any of them. Before that, in turns, the CPU time for a token of the router and of a bare uvicorn app that
sends as many streams as many bytes at the same pace: their quotient is the share of its tokens per second and process.
And the TTFT of single requests, less the time that a worker computed their prompts, beside that of the bare app, which
sends its first token at once. Streams load both meanwhile: as many as would take half of the router's core if its load
grew with them. It is less, because steps grow, too.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import psutil
import uvicorn
import uvloop
from rich.console import Console
from starlette.types import Receive, Scope, Send

from pdserve.bench.cluster import running_cluster
from pdserve.bench.script import publish, script_parser
from pdserve.bench.stream_client import StreamClient, StreamedAnswer

BODY_BYTES = 8 * 2**20 - 2**10
BODIES_PER_S, PROMPTS_PER_S = 10, 2
NUM_CONNECTIONS = 200
PROBE_S = 0.005
TIME_SCALE = 3.0
"""Of the emulated workers: some 25 tokens a second in each stream."""
NUM_ROUNDS = 3
BARE_STEP_S = 0.024
BARE_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"shape","system_fingerprint":"pdserve-0.1.0","choices":'
    b'[{"index":0,"text":" the","logprobs":null,"finish_reason":null}]}\n\n'
)
DEMO_MODEL = Path(__file__).parents[1] / "model" / "demo" / "pdserve-demo"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = '"messages":[{"role":"user","content":"hi"}]'


def large_bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body by kind."""

    def filled(begin: str, part: str, end: str) -> bytes:
        num_parts = (BODY_BYTES - len(begin) - len(end)) // (len(part.encode()) + 1)
        return (begin + ",".join([part] * num_parts) + end).encode()

    def members(begin: str, end: str) -> bytes:
        return (begin + ",".join(f'"k{index}":1' for index in range(BODY_BYTES // 13)) + end).encode()

    text = "a" * (BODY_BYTES - 200)
    schema = f'{{{ASKED},"response_format":{{"type":"json_schema","json_schema":{{"schema":{{"enum":['
    bodies = {
        "objects in an unknown field": (CHAT, filled(f'{{{ASKED},"x":[', '{"a":1}', "]}")),
        "unknown fields": (CHAT, members(f"{{{ASKED},", "}")),
        "unknown fields of a message": (CHAT, members('{"messages":[{"role":"user","content":"x",', "}]}")),
        "empty messages": (CHAT, filled('{"messages":[', "{}", "]}")),
        "short messages": (CHAT, filled('{"messages":[', '{"role":"user","content":"x"}', "]}")),
        "parts of a message": (
            CHAT,
            filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":"x"}', "]}]}"),
        ),
        "calls of a message": (
            CHAT,
            filled(
                '{"messages":[{"role":"assistant","tool_calls":[', '{"function":{"name":"f","arguments":"{}"}}', "]}]}"
            ),
        ),
        "tools": (CHAT, filled(f'{{{ASKED},"tools":[', '{"type":"function","function":{"name":"f"}}', "]}")),
        "variables of the template": (CHAT, members(f'{{{ASKED},"chat_template_kwargs":{{', "}}")),
        "an enum": (CHAT, filled(schema, '"ab"', "]}}}}")),
        "biases": (TEXT, members('{"prompt":"x","logit_bias":{', "}}")),
        "stop strings": (TEXT, filled('{"prompt":"x","stop":[', '"abc"', "]}")),
        "prompts": (TEXT, filled('{"prompt":[', '"abc"', "]}")),
        "token ids": (TEXT, filled('{"prompt":[', "7", "]}")),
        "a long text": (TEXT, f'{{"prompt":"{text}"}}'.encode()),
        "an escaped text": (TEXT, ('{"prompt":"' + "\\u00e9" * (BODY_BYTES // 6 - 10) + '"}').encode()),
        "deep lists": (TEXT, b'{"prompt":' + b"[" * (BODY_BYTES - 20)),
        "no JSON at the end": (TEXT, f'{{"prompt":"{text}"'.encode()),
        "a text to tokenize": ("/tokenize", f'{{"prompt":"{text}"}}'.encode()),
        "items of a response": ("/v1/responses", filled('{"input":[', '{"role":"user","content":"x"}', "]}")),
    }
    assert all(len(body) <= BODY_BYTES + 2**10 for _, body in bodies.values())
    return bodies


class Address(NamedTuple):
    host: str
    port: int

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self, timeout=60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def head(self, path: str, length: int) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()


# Each runs in a process of its own until it is killed.


async def send_at(address: Address, requests: Callable[[int], tuple[str, bytes]], per_s: float) -> None:
    """Send requests at a rate; answers are read to their end, as far as they come within 10 s."""

    async def send(path: str, body: bytes) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(10):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(address.head(path, len(body)) + body)
                await reader.read()
                writer.close()

    start_s, tasks = time.monotonic(), set()
    for number in range(10**9):
        await asyncio.sleep(start_s + number / per_s - time.monotonic())
        task = asyncio.create_task(send(*requests(number)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def send_bodies(address: Address) -> None:
    bodies = [*large_bodies().values()]
    asyncio.run(send_at(address, lambda number: bodies[number % len(bodies)], BODIES_PER_S))


def send_prompts(address: Address) -> None:
    def prompt(number: int) -> tuple[str, bytes]:
        text = f"{number} " + "the time to first token is what a prompt waits for. " * 7500
        return CHAT, json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 1}).encode()

    asyncio.run(send_at(address, prompt, PROMPTS_PER_S))


def upload_slowly(address: Address) -> None:
    connections = [address.connect() for _ in range(NUM_CONNECTIONS)]
    for connection in connections:
        connection.sendall(address.head(CHAT, BODY_BYTES) + b'{"messages":[{"role":"user","content":"')
    while True:
        for connection in connections:
            with suppress(OSError):
                connection.sendall(b"a" * 64)
        time.sleep(0.5)


def read_nothing(address: Address) -> None:
    body = json.dumps({"prompt": [7] * 32, "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    connections = []
    for _ in range(NUM_CONNECTIONS):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.sendall(address.head(TEXT, len(body)) + body)
        connections.append(connection)
    time.sleep(10**6)


LOADS: dict[str, Callable[[Address], None]] = {
    "bodies": send_bodies,
    "uploads": upload_slowly,
    "readers": read_nothing,
    "prompts": send_prompts,
}


def probe(address: Address, seconds: float, results: Connection) -> None:
    """Seconds of each ``GET /live``."""
    connection = address.connect()
    request = f"GET /live HTTP/1.1\r\nHost: {address.host}\r\n\r\n".encode()
    took_s = []
    end_s = time.monotonic() + seconds
    while (start_s := time.monotonic()) < end_s:
        connection.sendall(request)
        connection.recv(4096)
        took_s.append(time.monotonic() - start_s)
        time.sleep(PROBE_S)
    results.send(took_s)


def time_first_tokens(address: Address, seconds: float, results: Connection) -> None:
    """Time to the first token of each of a row of requests, by their ids."""
    body = json.dumps({"prompt": [7] * 100, "max_tokens": 1, "stream": True}).encode()
    ttft_s: dict[str, float] = {}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        request_id = f"first-{len(ttft_s)}"
        head = address.head(TEXT, len(body)).replace(b"\r\n", f"\r\nX-Request-Id: {request_id}\r\n".encode(), 1)
        with address.connect() as connection:
            start_s, answer = time.monotonic(), b""
            connection.sendall(head + body)
            while b"data: " not in answer:
                answer += connection.recv(4096)
            ttft_s[request_id] = time.monotonic() - start_s
        time.sleep(PROBE_S)
    results.send(ttft_s)


def stream(url: str, num_streams: int, seconds: float, results: Connection) -> None:
    """Gaps between the tokens of streams, the first second left out, and the number of all tokens."""
    body = json.dumps({"prompt": [7] * 100, "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()

    async def run() -> None:
        client = StreamClient(url)
        await client.open(num_streams)
        began_s = time.monotonic()
        answers = [StreamedAnswer() for _ in range(num_streams)]
        await asyncio.gather(*(client.complete(body, answer, seconds) for answer in answers))
        client.close()
        gaps_s: list[float] = []
        for answer in answers:
            gaps_s += np.diff([at_s for at_s in answer.token_s if at_s > began_s + 1]).tolist()
        results.send((gaps_s, sum(len(answer.token_s) for answer in answers)))

    asyncio.run(run())


def serve_bare(ports: Connection) -> None:
    """Serve endless streams until killed; sends its port."""
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    turns: list[asyncio.Future[None]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start)
        await send({"type": "http.response.body", "body": BARE_EVENT, "more_body": True})
        while True:
            turn = asyncio.get_running_loop().create_future()
            turns.append(turn)
            await turn
            await send({"type": "http.response.body", "body": BARE_EVENT, "more_body": True})

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http="httptools", lifespan="off", log_level="error", access_log=False)
        serving = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listener]))
        ports.send(listener.getsockname()[1])
        while not serving.done():
            await asyncio.sleep(BARE_STEP_S)
            taken, turns[:] = [*turns], []
            for turn in taken:
                turn.set_result(None)

    uvloop.run(run())


@contextmanager
def running(target: Callable[..., None], *arguments: object) -> Iterator[int]:
    """Run a process; yields its id."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()


def us_per_token(url: str, pid: int, num_streams: int, seconds: float) -> float:
    """CPU time of a server's process for a token of its streams."""
    server, (received, results) = psutil.Process(pid), multiprocessing.Pipe(duplex=False)
    before_s: float = sum(server.cpu_times()[:2])
    with running(stream, url, num_streams, seconds, results):
        assert received.poll(seconds + 60), "the streams have not ended"
        num_tokens: int = received.recv()[1]
    spent_s: float = sum(server.cpu_times()[:2]) - before_s
    return 1e6 * spent_s / num_tokens


def compare_with_bare(url: str, pid: int, num_streams: int, seconds: float) -> dict[str, float | list[float]]:
    """CPU time for a token of the router and of a bare app, each round's and the median of their quotients."""
    received, ports = multiprocessing.Pipe(duplex=False)
    router_us, bare_us = [], []
    with running(serve_bare, ports) as bare_pid:
        bare_url = f"http://127.0.0.1:{received.recv()}"
        for _ in range(NUM_ROUNDS):
            router_us.append(round(us_per_token(url, pid, num_streams, seconds), 1))
            bare_us.append(round(us_per_token(bare_url, bare_pid, num_streams, seconds), 1))
    share = float(np.median(np.array(bare_us) / np.array(router_us)))
    return {"router_us_per_token": router_us, "bare_us_per_token": bare_us, "tokens_per_s_of_bare": round(share, 3)}


def first_tokens(url: str, pid: int, num_streams: int, seconds: float) -> tuple[dict[str, float], float]:
    """TTFT of single requests beside streams, by their ids, and the share of a core that the server's process took."""
    server, parts = psutil.Process(pid), urlsplit(url)
    streamed, timed = multiprocessing.Pipe(duplex=False), multiprocessing.Pipe(duplex=False)
    with running(stream, url, num_streams, seconds + 6, streamed[1]):
        time.sleep(3)
        before_s, start_s = sum(server.cpu_times()[:2]), time.monotonic()
        with running(time_first_tokens, Address(parts.hostname or "", parts.port or 0), seconds, timed[1]):
            assert timed[0].poll(seconds + 60), "the requests have not ended"
            ttft_s: dict[str, float] = timed[0].recv()
        share = (sum(server.cpu_times()[:2]) - before_s) / (time.monotonic() - start_s)
    return ttft_s, share


def compare_first_tokens(url: str, pid: int, num_streams: int, seconds: float, request_log: Path) -> dict[str, Any]:
    """TTFT of the router without the prompts' computation, and of a bare app, in turns."""
    received, ports = multiprocessing.Pipe(duplex=False)
    router_ms, bare_ms, shares = list[float](), list[float](), list[float]()
    with running(serve_bare, ports) as bare_pid:
        bare_url = f"http://127.0.0.1:{received.recv()}"
        for _ in range(NUM_ROUNDS):
            request_log.write_bytes(b"")
            ttft_s, share = first_tokens(url, pid, num_streams, seconds)
            shares.append(share)
            time.sleep(1)  # until the last request is in the log
            for line in map(json.loads, request_log.read_text().splitlines()):
                if line["request_id"] in ttft_s and "prefill" in line.get("phases_s", ()):
                    router_ms.append(1e3 * (ttft_s[line["request_id"]] - line["phases_s"]["prefill"]))
            bare_ms += [1e3 * each for each in first_tokens(bare_url, bare_pid, num_streams, seconds)[0].values()]
    percentiles = {
        f"{name}_p{percent}_ms": round(float(np.percentile(times_ms, percent)), 2)
        for name, times_ms in (("router", router_ms), ("bare", bare_ms))
        for percent in (50, 99)
    }
    return {
        "streams": num_streams,
        "router_share_of_core": round(float(np.mean(shares)), 2),
        "requests": len(router_ms),
        **percentiles,
        "added_p50_ms": round(percentiles["router_p50_ms"] - percentiles["bare_p50_ms"], 2),
        "added_p99_ms": round(percentiles["router_p99_ms"] - percentiles["bare_p99_ms"], 2),
    }


def measure(url: str, router: psutil.Process, load: str, num_streams: int, seconds: float) -> dict[str, float]:
    parts = urlsplit(url)
    address = Address(parts.hostname or "", parts.port or 0)
    probes, gaps = multiprocessing.Pipe(duplex=False), multiprocessing.Pipe(duplex=False)
    peak = before = router.memory_info().rss
    with running(stream, url, num_streams, seconds + 4, gaps[1]):
        time.sleep(2)
        with running(LOADS.get(load, time.sleep), address) if load else running(time.sleep, 10**6):
            time.sleep(1.5)  # until the load's process has started
            with running(probe, address, seconds, probes[1]):
                while not probes[0].poll(0.1):
                    peak = max(peak, router.memory_info().rss)
                late_ms = 1e3 * np.array(probes[0].recv())
        assert gaps[0].poll(60), "the streams have not ended"
        gaps_ms = 1e3 * np.array(gaps[0].recv()[0])
    return {
        "live_p99_ms": round(float(np.percentile(late_ms, 99)), 1),
        "live_max_ms": round(float(late_ms.max()), 1),
        "itl_p50_ms": round(float(np.percentile(gaps_ms, 50)), 1),
        "itl_p99_ms": round(float(np.percentile(gaps_ms, 99)), 1),
        "itl_max_ms": round(float(gaps_ms.max()), 1),
        "router_grew_mib": round((peak - before) / 2**20, 1),
    }


def write_model(folder: Path) -> Path:
    """The demo model's files with the shape of Llama-3-8B and 256k tokens of context; no weights."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    config: dict[str, Any] = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 2**18,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--only", choices=LOADS, help="this load alone")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as work:
        request_log = Path(work, "requests.jsonl")
        deployment = {
            "model": {"path": str(write_model(Path(work))), "dtype": "bfloat16"},
            "router": {"request_log": str(request_log)},
        }
        options = ("--emulate", "h100-sxm", "--time-scale", str(TIME_SCALE))
        with running_cluster(deployment, *options) as cluster:
            router = cluster.router()
            beside_bare = compare_with_bare(cluster.url, router.pid, arguments.streams, arguments.seconds / 2)
            console.print(beside_bare)
            _, share = first_tokens(cluster.url, router.pid, arguments.streams, arguments.seconds / 2)
            num_streams = round(0.5 / share * arguments.streams)
            ttft = compare_first_tokens(cluster.url, router.pid, num_streams, arguments.seconds / 2, request_log)
            console.print(ttft)
            for load in ("", *([arguments.only] if arguments.only else LOADS)):
                results[load or "none"] = measure(cluster.url, router, load, arguments.streams, arguments.seconds)
                console.print(load or "none", results[load or "none"])
                time.sleep(2)
    sizes = {"streams": arguments.streams, "seconds": arguments.seconds}
    publish({**sizes, "beside_bare": beside_bare, "ttft_beside_streams": ttft, "loads": results}, arguments.json)


if __name__ == "__main__":
    main()
