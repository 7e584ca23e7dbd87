"""Steps of a worker by its tensor-parallel ranks: computed on this machine's cores, and emulated on H100s.

    python -m pdserve.bench.ranks [--ranks 2] [--rounds 9] [--json FILE]

On the cores, each rank has one to itself and computes its share of a 0.5B model. The goal of a decode step is that of
one rank divided by the ranks, and 5 % more, plus two all-reduces per layer, measured alone. One rank on as many cores
shows what memory allows, which the cores share. Emulated steps are those of Llama 3 8B. All are shown beside the cost
model. Medians; the cases take turns.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import LLAMA_3_8B_CONFIG, SHAPES
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import Executor, StepBatch, StepRow
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.engine.worker.backend import choose_backend
from pdserve.engine.worker.followers import rank_cores
from pdserve.kernels.cpu.ranks import RankMemory
from pdserve.kernels.cpu.threads import use_cores
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.weights.random_checkpoint import write_random_checkpoint

BLOCK_SIZE = 16
NUM_ROWS, CONTEXT = 8, 128
PROMPT_TOKENS, EMULATED_PROMPT_TOKENS = 256, 2048
GREEDY = SamplingParams(temperature=0)


def all_reduce_s(rank: int, fd: int, cores: list[int], hidden_size: int) -> float:
    """Seconds of an all-reduce of a decode step's activations, on one rank."""
    os.sched_setaffinity(0, {cores[rank]})
    group, x, seconds = RankMemory(len(cores)).group(fd, 0, rank), torch.zeros(NUM_ROWS, hidden_size), []
    for _ in range(2000):
        start_s = time.perf_counter()
        group.sum_(x)
        seconds.append(time.perf_counter() - start_s)
    return median(seconds)


def all_reduces_s(cores: list[int], num_layers: int, hidden_size: int) -> float:
    """Seconds of the all-reduces of a decode step: one for attention and one for the MLP of each layer."""
    fd, num_ranks = RankMemory(len(cores)).create(), len(cores)
    with ProcessPoolExecutor(num_ranks, get_context("fork")) as pool:
        parts = [pool.submit(all_reduce_s, rank, fd, cores, hidden_size) for rank in range(num_ranks)]
        return 2 * num_layers * max(part.result() for part in parts)


@contextmanager
def running_worker(config: WorkerConfig) -> Iterator[tuple[Executor, CostModel]]:
    if config.cpu_cores:
        os.sched_setaffinity(0, config.cpu_cores)  # followers inherit it
    backend = choose_backend(config)
    memory = PoolMemory.create(backend.layout)
    built = backend.build_executors(memory)
    yield built.executors[0], backend.cost
    built.executors[0].close()
    if built.followers is not None:
        built.followers.close()


def step_s(executor: Executor, num_rows: int, num_new: int, num_cached: int) -> float:
    """Seconds of a step whose rows have ``num_new`` tokens after ``num_cached``."""
    each = -(-(num_new + num_cached) // BLOCK_SIZE)
    rows = [
        StepRow(
            sequence_id=row, tokens=[5 + row] * num_new, cached_length=num_cached, sample=GREEDY,
            block_table=range(row * each, (row + 1) * each), sample_position=num_new + num_cached,
        )
        for row in range(num_rows)
    ]  # fmt: skip
    start_s = time.perf_counter()
    executor.submit(StepBatch(step_id=0, rows=rows)).result()
    return time.perf_counter() - start_s


def compare(configs: dict[str, WorkerConfig], num_prompt_tokens: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of steps by case, measured and predicted."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in configs}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(running_worker(config)) for name, config in configs.items()}
        for _ in range(num_rounds + 1):
            for name, (executor, _) in workers.items():
                if cores := configs[name].cpu_cores:
                    use_cores(rank_cores(cores, 0, configs[name].tensor_parallel))
                prefill_s = step_s(executor, 1, num_prompt_tokens, 0)
                decode_s = median(step_s(executor, NUM_ROWS, 1, CONTEXT) for _ in range(20))
                seconds[name].append((prefill_s, decode_s))
    rows = {}
    for name, (_, cost) in workers.items():
        measured = [median(each) for each in zip(*seconds[name][1:], strict=True)]
        predicted = cost.prefill_s(num_prompt_tokens), cost.decode_s(NUM_ROWS, NUM_ROWS * CONTEXT)
        names = "prefill_ms", "decode_ms", "predicted_prefill_ms", "predicted_decode_ms"
        rows[name] = {key: round(1e3 * value, 2) for key, value in zip(names, (*measured, *predicted), strict=True)}
    return rows


def measure(num_ranks: int, num_rounds: int, folder: Path) -> dict[str, Any]:
    cores, shape = sorted(os.sched_getaffinity(0)), SHAPES["half"]
    sums_ms = 1e3 * all_reduces_s(cores[:num_ranks], shape["num_layers"], shape["hidden_size"])
    worker = WorkerConfig(
        worker_id="ranks", role=WorkerRole.MIXED, model_path=str(write_random_checkpoint(folder / "half", **shape)),
        precision=Precision(dtype="float32"), device="cpu", block_size=BLOCK_SIZE, num_kv_blocks=256,
        max_model_len=4096, swap_memory_bytes=0,
    )  # fmt: skip
    alone, ranks = "1 rank on 1 core", f"{num_ranks} ranks on {num_ranks} cores"
    all_cores = tuple(cores[:num_ranks])
    computed = {
        alone: replace(worker, cpu_cores=all_cores[:1]),
        f"1 rank on {num_ranks} cores": replace(worker, cpu_cores=all_cores),
        ranks: replace(worker, cpu_cores=all_cores, tensor_parallel=num_ranks),
    }
    on_cores = compare(computed, PROMPT_TOKENS, num_rounds)
    os.sched_setaffinity(0, cores)
    goal_ms = sums_ms + 1.05 * on_cores[alone]["decode_ms"] / num_ranks
    on_cores[ranks] |= {"all_reduces_ms": round(sums_ms, 2), "decode_goal_ms": round(goal_ms, 2)}
    (folder / "8b").mkdir()
    (folder / "8b" / "config.json").write_text(json.dumps(LLAMA_3_8B_CONFIG))
    worker = replace(worker, model_path=str(folder / "8b"), precision=Precision(dtype="bfloat16"), emulate="h100-sxm")
    emulated = {f"{degree} x H100": replace(worker, tensor_parallel=degree) for degree in (1, 2, 4, 8)}
    return {"on_cores": on_cores, "emulated": compare(emulated, EMULATED_PROMPT_TOKENS, num_rounds)}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="on the cores")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        publish(measure(arguments.ranks, arguments.rounds, Path(folder)), arguments.json)


if __name__ == "__main__":
    main()
