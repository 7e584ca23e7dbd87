"""Memory growth: mixed load on a whole cluster for a long time, with the memory of each of its processes.

    python -m pdserve.bench.soak [--minutes 60] [--clients 8] [--shape tiny|half] [--dtype bfloat16]
                                 [--json FILE]

The load mixes whole and streamed answers, short and long prompts, continued conversations, several choices, log
probabilities, refused requests, and clients that disconnect half-way. Memory is the proportional set size (PSS), which
counts pages shared by processes once, such as a KV pool that its transfer process maps too. A worker's memory is shown
with the size of its weights and pool; the rest is the interpreter, torch and Ray.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from pdserve.bench.cluster import running_cluster
from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import SHAPES
from pdserve.model.weights.random_checkpoint import write_random_checkpoint

SAMPLE_S = 10.0
KV_POOL_MIB = 64
MIB = 2**20


class Load:
    """Clients that send one random request after the other."""

    def __init__(self, url: str, vocab_size: int, num_clients: int) -> None:
        self.counts: Counter[str] = Counter()
        self._url = url
        self._vocab_size = vocab_size
        self._num_clients = num_clients

    async def run(self, until_s: float) -> None:
        limits = httpx.Limits(max_connections=2 * self._num_clients)

        async def send_until(rng: random.Random) -> None:
            while time.monotonic() < until_s:
                kind = rng.choice(("whole", "streamed", "leaver", "conversation", "refused"))
                await self._send(client, kind, rng)
                self.counts[kind] += 1

        async with httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits) as client:
            await asyncio.gather(*(send_until(random.Random(seed)) for seed in range(self._num_clients)))

    async def _send(self, client: httpx.AsyncClient, kind: str, rng: random.Random) -> None:
        if kind == "conversation":
            messages = [{"role": "user", "content": f"Tell me about the number {rng.randrange(10**6)}."}]
            for _ in range(3):
                body = {"messages": messages, "max_tokens": rng.randint(1, 60), "temperature": 0}
                response = await client.post("/v1/chat/completions", json=body)
                messages.append(response.raise_for_status().json()["choices"][0]["message"])
                messages.append({"role": "user", "content": "Go on."})
            return
        if kind == "refused":
            body = rng.choice([{"prompt": [1] * 5000}, {"prompt": "a", "n": 10**6}, {"prompt": 7}])
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 400, response.text
            return
        body = {
            "prompt": [rng.randrange(self._vocab_size) for _ in range(int(rng.lognormvariate(4.5, 1)) % 800 + 1)],
            "max_tokens": rng.randint(1, 100),
            "temperature": rng.choice([0, 0.8]),
            "n": rng.choice([1, 1, 1, 3]),
            "logprobs": rng.choice([None, None, 3]),
            "presence_penalty": rng.choice([0, 0.5]),
            "stream": kind != "whole",
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                if kind == "leaver" and rng.random() < 0.2:
                    return


def memory_mib(root: psutil.Process) -> dict[str, float]:
    """PSS of every process of the cluster, by a name that stays over a restart."""
    sizes: defaultdict[str, float] = defaultdict(float)
    for process in [root, *root.children(recursive=True)]:
        try:
            sizes[_name(process)] += process.memory_full_info().pss / MIB
        except psutil.Error:
            continue
    return {name: round(size, 1) for name, size in sizes.items()}


def _name(process: psutil.Process) -> str:
    words = process.cmdline() or [process.name()]
    for word in words:
        if (found := re.search(r"ray::(\w+)|^pdserve\.([\w.]+)", word)) is not None:
            name: str = found[1] or found[2]
            return name
    return Path(words[0].split()[0]).name


async def soak(load: Load, root: psutil.Process, minutes: float, console: Console) -> dict[str, Any]:
    """Load for ``minutes`` and sample memory; the first samples come after a minute of warm-up."""
    started_s = time.monotonic()
    running = asyncio.create_task(load.run(started_s + 60 * minutes))
    samples = []
    while not running.done():
        await asyncio.wait([running], timeout=SAMPLE_S)
        elapsed_s = round(time.monotonic() - started_s, 1)
        samples.append({"s": elapsed_s, "mib": memory_mib(root)})
        if len(samples) % 6 == 1:
            console.print(
                f"{elapsed_s / 60:.0f} of {minutes:g} min, {load.counts.total()} requests, MiB: {samples[-1]['mib']}"
            )
    await running
    return {"requests": dict(load.counts), "samples": samples}


def growth(samples: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per process: mean MiB of the second quarter and of the last quarter of the time."""
    quarter = len(samples) // 4
    spans = {"second_quarter": samples[quarter : 2 * quarter], "last_quarter": samples[-quarter:]}
    names = sorted(samples[-1]["mib"])
    return {
        name: {
            span: round(sum(sample["mib"].get(name, 0.0) for sample in members) / max(1, len(members)), 1)
            for span, members in spans.items()
        }
        for name in names
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as work:
        shape = SHAPES[arguments.shape]
        folder = write_random_checkpoint(
            Path(work) / "model", **shape, max_position_embeddings=1024, dtype=arguments.dtype
        )
        weights_mib = (folder / "model.safetensors").stat().st_size / MIB
        kv_memory = {"kv_memory": f"{KV_POOL_MIB}MiB"}
        model = {"path": str(folder), "dtype": arguments.dtype}
        with running_cluster({"model": model, "prefill": kv_memory, "decode": kv_memory}) as cluster:
            root = psutil.Process(cluster.pid)
            load = Load(cluster.url, shape["vocab_size"], arguments.clients)
            result = asyncio.run(soak(load, root, arguments.minutes, console))
    result = {
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "weights_mib": round(weights_mib, 1),
        "kv_pool_mib": KV_POOL_MIB,
        "growth_mib": growth(result["samples"]),
        **result,
    }
    publish(result, arguments.json, unshown=["samples"])


if __name__ == "__main__":
    main()
