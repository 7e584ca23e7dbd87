"""The router under more requests than its cluster can serve, while it refuses what would meet its objectives nowhere.

    python -m pdserve.bench.overload [--seconds 60] [--factors 1,2,5,10] [--json FILE]

One prefill and one decode worker, emulated and slowed. For each factor, that many times `RATE` arrive per second, then
`REST_RATE` for `REST_S`. Measured: good requests/s, which meet both objectives; how long a refusal takes, and its CPU
time: what the router used beyond as many answers at the first factor; the share of good ones among those that arrive
`BACK_S` after the overload or later; the router's memory. With the second factor once more, refused clients come back
when `Retry-After` says, `NUM_RETRIES` times at most: how many are served in the end.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import psutil
import uvloop

from pdserve.bench.cluster import RunningCluster, running_cluster
from pdserve.bench.script import publish, script_parser
from pdserve.loadgen.client import StreamClient, StreamedAnswer

RATE = 9.0
"""Requests per second: about what the cluster can serve."""
TTFT_S, TPOT_S, TIME_SCALE = 0.5, 0.05, 60
PROMPT_TOKENS, ANSWER_TOKENS = (200, 601), (30, 91)
REST_S, REST_RATE, BACK_S = 12.0, 0.8 * RATE, 5.0
NUM_RETRIES = 2
"""As OpenAI's clients have."""
DEPLOYMENT: dict[str, Any] = {
    "prefill": {"replicas": 1},
    "decode": {"replicas": 1},
    "model": {"max_model_len": 2048},
    "slo": {"ttft_seconds": TTFT_S, "tpot_seconds": TPOT_S, "when_hopeless": "refuse"},
}


@dataclass(slots=True)
class Sent:
    """A request, the body it is sent with, and its answers: all refused but the last one, which may be, too."""

    at_s: float
    body: bytes
    answers: list[StreamedAnswer] = field(default_factory=list)

    @property
    def is_served(self) -> bool:
        return self.answers[-1].status == 200 and not self.answers[-1].error

    @property
    def is_good(self) -> bool:
        tokens_s = self.answers[-1].token_s[: self.answers[-1].num_tokens]
        if not self.is_served:
            return False
        ttft_s = tokens_s[0] - self.answers[-1].sent_s
        return ttft_s <= TTFT_S and tokens_s[-1] - tokens_s[0] <= TPOT_S * (len(tokens_s) - 1)


async def send_all(url: str, requests: list[Sent], router: psutil.Process, overload_s: float, retries: int) -> float:
    """Send the requests and wait for all answers; return the router's CPU seconds until ``overload_s``."""
    client = StreamClient(url)
    await client.open()

    async def send(request: Sent) -> None:
        for number in range(1 + retries):
            request.answers.append(answer := StreamedAnswer())
            await client.complete(request.body, answer, timeout_s=120.0)
            if answer.status != 429 or number == retries:
                return
            await asyncio.sleep(answer.retry_after_s)

    async def used_s(instant_s: float) -> float:
        await asyncio.sleep(instant_s - time.monotonic())
        return sum(router.cpu_times()[:2])

    began_s, before_s = time.monotonic(), await used_s(0.0)
    after_s = asyncio.create_task(used_s(began_s + overload_s))
    tasks = []
    for request in requests:
        await asyncio.sleep(began_s + request.at_s - time.monotonic())
        tasks.append(asyncio.create_task(send(request)))
    await asyncio.gather(*tasks)
    client.close()
    return await after_s - before_s


def run(cluster: RunningCluster, factor: float, seconds: float, retries: int = 0) -> dict[str, Any]:
    """One overload and, unless refused clients come back, the rest after it."""
    router = cluster.router()
    random = np.random.default_rng(int(factor))
    parts = [(0.0, seconds, factor * RATE), (seconds, REST_S, 0.0 if retries else REST_RATE)]
    at_s = [start_s + each for start_s, long_s, rate in parts for each in random.uniform(0, long_s, int(rate * long_s))]
    requests = [Sent(each, _body(random)) for each in sorted(at_s)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cpu_s = runner.run(send_all(cluster.url, requests, router, seconds, retries))
    over, back = (
        [each for each in requests if first_s <= each.at_s < last_s]
        for first_s, last_s in ((0, seconds), (seconds + BACK_S, seconds + REST_S))
    )
    shed_s = [each.ended_s - each.sent_s for request in over for each in request.answers if each.status == 429]
    return {
        "factor": factor,
        "requests": len(over),
        "served": sum(each.is_served for each in over),
        "good": sum(each.is_good for each in over),
        "good_per_s": round(sum(each.is_good for each in over) / seconds, 2),
        "refusals": len(shed_s),
        "refusal_p99_ms": round(float(np.percentile(shed_s or [0.0], 99)) * 1e3, 1),
        "failed": sum(each.answers[-1].status not in (200, 429) for each in over),
        "router_cpu_s": round(cpu_s, 2),
        "router_rss_mib": router.memory_info().rss >> 20,
        "back_good_share": round(sum(each.is_good for each in back) / len(back), 3) if back else None,
    }


def _body(random: np.random.Generator) -> bytes:
    body = {"max_tokens": int(random.integers(*ANSWER_TOKENS)), "ignore_eos": True, "temperature": 0, "stream": True}
    prompt = random.integers(0, 256, random.integers(*PROMPT_TOKENS)).tolist()
    return msgspec.json.encode({"prompt": prompt, "stream_options": {"include_usage": True}, **body})


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each overload")
    parser.add_argument("--factors", default="1,2,5,10", help="loads, in multiples of what the cluster can serve")
    arguments = parser.parse_args()
    factors = [float(factor) for factor in arguments.factors.split(",")]
    with running_cluster(DEPLOYMENT, "--emulate", "h100-sxm", "--time-scale", str(TIME_SCALE)) as cluster:
        runs = [run(cluster, factor, arguments.seconds) for factor in factors]
        obeyed = run(cluster, factors[min(1, len(factors) - 1)], arguments.seconds, NUM_RETRIES)
    for each in runs[1:]:
        own_s = each["router_cpu_s"] - runs[0]["router_cpu_s"] * each["served"] / runs[0]["served"]
        each["refusal_cpu_ms"] = round(own_s / max(1, each["refusals"]) * 1e3, 2)
    publish({"seconds": arguments.seconds, "runs": runs, "retry_after_obeyed": obeyed}, arguments.json)


if __name__ == "__main__":
    main()
