"""Cost of the router beside a bare uvicorn app that sends as many streams as many bytes at the same pace.

    python -m pdserve.bench.edge [--seconds 8] [--streams 64] [--json FILE]

Workers are emulated. In turns, the CPU time of both servers for a token: their quotient is the share of the bare app's
tokens per second and process. And the TTFT of single requests, less the time that a worker computed their prompts,
beside that of the bare app, which sends its first token at once. Streams load both meanwhile: as many as would take
half of the router's core if its load grew with them. It is less, because steps grow, too.

At last bodies of up to 8 MiB of each kind, one in the time or four a second: p99 of the gaps between tokens of the
streams meanwhile, as a multiple of that without bodies, and by how much the longest gap exceeds the median. And the
same while the bare app, another process, reads these bodies in the router's place: what remains is the machine's, whose
cores all processes share.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from pdserve.bench.cluster import running_cluster
from pdserve.bench.script import publish, script_parser
from pdserve.loadgen.client import StreamClient, StreamedAnswer
from pdserve.router.http.asgi import disconnected

PAUSE_S = 0.005
"""Between single requests."""
TIME_SCALE = 25.0
"""An emulated token of the demo model then takes some 20 ms."""
NUM_ROUNDS = 3
START_S = 60.0
"""Within which all streams have begun."""
MARGIN_S = 0.5
"""By which streams outlast what is measured beside them."""
BODY_PACE_S = 0.25
"""Between the starts of bodies that follow one another: a router on two cores has read the one before."""
BARE_STEP_S = 0.024
BARE_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"shape","system_fingerprint":"pdserve-0.1.0","choices":'
    b'[{"index":0,"text":" the","logprobs":null,"finish_reason":null}]}\n\n'
)
PATH = "/v1/completions"
BODY_BYTES = 8 * 2**20 - 2**10


def time_first_tokens(address: str, seconds: float, results: Connection) -> None:
    """Time to the first token of each of a row of requests, by their ids."""
    body = json.dumps({"prompt": [7] * 100, "max_tokens": 1, "stream": True})
    ttft_s: dict[str, float] = {}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        request_id = f"first-{len(ttft_s)}"
        with closing(HTTPConnection(address)) as connection:
            connection.connect()
            start_s = time.monotonic()
            connection.request("POST", PATH, body, {"Content-Type": "application/json", "X-Request-Id": request_id})
            answer = connection.getresponse()
            while not answer.readline().startswith(b"data: "):
                assert not answer.isclosed(), "an answer without a token"
            ttft_s[request_id] = time.monotonic() - start_s
        time.sleep(PAUSE_S)
    results.send(ttft_s)


def large_bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body by kind, each as near to the edge's bounds as it may be before it is refused, or beyond them."""
    chat, call = (
        "/v1/chat/completions",
        '{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"%s"}}]}',
    )
    kinds = {
        "one text": (PATH, '{"prompt":"', "the time ", '"}', BODY_BYTES),
        "an escaped text": (PATH, '{"prompt":"', "\\u00e9", '"}', BODY_BYTES),
        "token ids": (PATH, '{"prompt":[7', ",77777", "]}", 2**18 - 1),
        "messages": (chat, '{"messages":[{"role":"user","content":"x"}',
                     ',{"role":"user","content":"%s"}' % ("x" * 450), "]}", 2**14 - 1),
        "values of calls": (chat, '{"messages":[{"role":"user","content":"x"}',
                            "," + call % ('{\\"a\\":[1' + ",1" * 200 + "]}"), "]}", 2**14 - 1),
        "values of a call": (chat, '{"messages":[' + call.partition("%s")[0] + "[1", ",1", ']"}}]}]}', BODY_BYTES),
    }  # fmt: skip
    return {
        kind: (path, (begin + part * min((BODY_BYTES - len(begin + end)) // len(part), most) + end).encode())
        for kind, (path, begin, part, end, most) in kinds.items()
    }


def cpu_s(pid: int) -> float:
    """CPU time of a process in nanoseconds' steps: files under ``/proc`` count ticks of 10 ms.

    Source: ``clock_getcpuclockid`` of Linux, which Python has for threads alone.
    """
    return time.clock_gettime(~pid << 3 | 2)


def token_times_s(answers: Sequence[StreamedAnswer]) -> np.ndarray:
    return np.concatenate([answer.token_s for answer in answers])


def gaps_s(answers: Sequence[StreamedAnswer]) -> np.ndarray:
    return np.concatenate([np.diff(answer.token_s) for answer in answers])


def gaps_beside_ms(url: str, num_streams: int, seconds: float, sends: Iterable[Callable[[], None]]) -> np.ndarray:
    """Gaps between tokens of streams in a time in which ``sends`` are called, one after the other."""
    received, results = multiprocessing.Pipe(duplex=False)
    with running(stream, url, num_streams, seconds, results, gaps_s):
        begun(received)
        for send in sends:
            next_s = time.monotonic() + BODY_PACE_S
            send()
            if received.poll(max(0.0, next_s - time.monotonic())):
                break
        return 1e3 * result_of(received)


def send_body(url: str, path: str, body: bytes) -> None:
    """Send a body, and wait for the status of its answer."""
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=120)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        connection.getresponse()


def beside_bodies(url: str, bare_url: str, num_streams: int, seconds: float, path: str, body: bytes) -> dict[str, Any]:
    """Gaps between tokens of the router's streams while it, or the bare app, reads a body."""
    none_ms = gaps_beside_ms(url, num_streams, seconds, ())
    figures = {}
    for name, address in (("bare", bare_url), ("router", url)):
        send = partial(send_body, address, path, body)
        for times, sends in (("one", [send]), ("four_a_second", repeat(send))):
            gaps_ms = gaps_beside_ms(url, num_streams, seconds, sends)
            figures[f"{name}_{times}"] = {
                "itl_p99_of_none": round(float(np.percentile(gaps_ms, 99) / np.percentile(none_ms, 99)), 2),
                "longest_over_median_ms": round(float(gaps_ms.max() - np.median(gaps_ms)), 1),
            }
    return figures


def stream(
    url: str,
    num_streams: int,
    seconds: float,
    results: Connection,
    result: Callable[[Sequence[StreamedAnswer]], Any] = token_times_s,
) -> None:
    """Read streams for ``seconds`` once all have begun; sends None then, and at the end what ``result`` makes of their
    answers since."""
    body = json.dumps({"prompt": [7] * 100, "max_tokens": 1900, "ignore_eos": True, "stream": True}).encode()

    async def run() -> None:
        client = StreamClient(url)
        await client.open(num_streams)
        answers = [StreamedAnswer() for _ in range(num_streams)]

        def begin(answer: StreamedAnswer) -> asyncio.Task[None]:
            return asyncio.create_task(client.complete(body, answer, START_S + seconds))

        streams = [begin(answer) for answer in answers]
        while not all(answer.token_s for answer in answers):
            await asyncio.sleep(0.01)
            for index, answer in enumerate(answers):
                if streams[index].done() and not answer.token_s:  # refused beside streams that are about to end
                    streams[index] = begin(answer)
        for answer in answers:
            del answer.token_s[:-1]
        results.send(None)
        await asyncio.wait(streams, timeout=seconds)
        results.send(result(answers))

    asyncio.run(run())


def serve_bare(ports: Connection) -> None:
    """Read bodies and answer with streams that their clients end, until killed; sends its port."""
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    turns: list[asyncio.Future[None]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send(start)
        await send({"type": "http.response.body", "body": BARE_EVENT, "more_body": True})
        leaving = asyncio.create_task(disconnected(receive))
        while not leaving.done():
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


def begun(received: Connection) -> None:
    """Wait until the streams of a process have begun."""
    assert received.poll(START_S), "not all streams have begun"
    received.recv()


def result_of(received: Connection) -> np.ndarray:
    """What a process has measured."""
    assert received.poll(START_S), "the streams have not ended"
    result: np.ndarray = received.recv()
    return result


def us_per_token(url: str, pid: int, num_streams: int, seconds: float) -> float:
    """CPU time of a server's process for a token of its streams, once all of them have begun."""
    received, results = multiprocessing.Pipe(duplex=False)
    with running(stream, url, num_streams, seconds + MARGIN_S, results, token_times_s):
        begun(received)
        before_s, began_s = cpu_s(pid), time.monotonic()
        time.sleep(seconds)
        spent_s, ended_s = cpu_s(pid) - before_s, time.monotonic()
        times_s = result_of(received)
    num_tokens = int(((times_s > began_s) & (times_s < ended_s)).sum())
    return 1e6 * spent_s / num_tokens


def compare_with_bare(
    url: str, pid: int, bare_url: str, bare_pid: int, num_streams: int, seconds: float
) -> dict[str, float | list[float]]:
    """CPU time for a token of the router and of a bare app, each round's and the median of their quotients."""
    router_us, bare_us = [], []
    for _ in range(NUM_ROUNDS):
        router_us.append(round(us_per_token(url, pid, num_streams, seconds), 1))
        bare_us.append(round(us_per_token(bare_url, bare_pid, num_streams, seconds), 1))
    share = float(np.median(np.array(bare_us) / np.array(router_us)))
    return {"router_us_per_token": router_us, "bare_us_per_token": bare_us, "tokens_per_s_of_bare": round(share, 3)}


def first_tokens(url: str, pid: int, num_streams: int, seconds: float) -> tuple[dict[str, float], float]:
    """TTFT of single requests beside streams, by their ids, and the share of a core that the server's process took."""
    address = urlsplit(url).netloc
    streamed, timed = multiprocessing.Pipe(duplex=False), multiprocessing.Pipe(duplex=False)
    with running(stream, url, num_streams, seconds + START_S, streamed[1]):
        begun(streamed[0])
        before_s, start_s = cpu_s(pid), time.monotonic()
        with running(time_first_tokens, address, seconds, timed[1]):
            assert timed[0].poll(seconds + 60), "the requests have not ended"
            ttft_s: dict[str, float] = timed[0].recv()
        share = (cpu_s(pid) - before_s) / (time.monotonic() - start_s)
    return ttft_s, share


def compare_first_tokens(
    url: str, pid: int, bare_url: str, bare_pid: int, num_streams: int, seconds: float, request_log: Path
) -> dict[str, Any]:
    """TTFT of the router without the prompts' computation, and of a bare app, in turns; and the medians of the phases
    that the router's log tells apart, and of what it does not see."""
    router_ms, bare_ms, shares = list[float](), list[float](), list[float]()
    parts_ms = defaultdict[str, list[float]](list)
    for _ in range(NUM_ROUNDS):
        request_log.write_bytes(b"")
        ttft_s, share = first_tokens(url, pid, num_streams, seconds)
        shares.append(share)
        time.sleep(1)  # until the last request is in the log
        for line in map(json.loads, request_log.read_text().splitlines()):
            if line["request_id"] in ttft_s and "prefill" in (phases_s := line.get("phases_s", {})):
                router_ms.append(1e3 * (ttft_s[line["request_id"]] - phases_s.pop("prefill")))
                phases_s["client"] = ttft_s[line["request_id"]] - line["ttft_s"]
                for part, spent_s in phases_s.items():
                    parts_ms[part].append(1e3 * spent_s)
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
        "router_p50_parts_ms": {part: round(float(np.median(times)), 2) for part, times in parts_ms.items()},
        "added_p50_ms": round(percentiles["router_p50_ms"] - percentiles["bare_p50_ms"], 2),
        "added_p99_ms": round(percentiles["router_p99_ms"] - percentiles["bare_p99_ms"], 2),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--streams", type=int, default=64)
    arguments = parser.parse_args()
    seconds: float = arguments.seconds
    with tempfile.TemporaryDirectory() as work:
        request_log = Path(work, "requests.jsonl")
        deployment = {
            "model": {"max_model_len": 2048},
            "router": {"request_log": str(request_log)},
            "slo": {"tpot_seconds": 1.0},  # or streams are held while others meet theirs
        }
        received, ports = multiprocessing.Pipe(duplex=False)
        with (
            running_cluster(deployment, "--emulate", "h100-sxm", "--time-scale", str(TIME_SCALE)) as cluster,
            running(serve_bare, ports) as bare_pid,
        ):
            url, pid, bare_url = cluster.url, cluster.router().pid, f"http://127.0.0.1:{received.recv()}"
            beside_bare = compare_with_bare(url, pid, bare_url, bare_pid, arguments.streams, seconds)
            _, share = first_tokens(url, pid, arguments.streams, seconds)
            num_streams = round(0.5 / share * arguments.streams)
            ttft = compare_first_tokens(url, pid, bare_url, bare_pid, num_streams, seconds, request_log)
            bodies = {
                kind: beside_bodies(url, bare_url, arguments.streams, seconds, *each)
                for kind, each in large_bodies().items()
            }
    sizes = {"streams": arguments.streams, "seconds": seconds}
    beside = {"beside_bare": beside_bare, "ttft_beside_streams": ttft, "beside_bodies": bodies}
    publish({**sizes, **beside}, arguments.json)


if __name__ == "__main__":
    main()
