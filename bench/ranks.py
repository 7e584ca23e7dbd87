"""Prefill and decode steps by tensor- and pipeline-parallel degree on this machine's cores.

``python -m pdserve.bench.ranks``. Each round measures each case in processes of its own, in turn: one rank on one core,
one rank with a thread on each of N cores, and N ranks with a core each, as one stage and as N stages. Times are of a
step alone, and of the same work while every micro-batch of the pipeline is busy, each beside the cost model's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from pdserve.bench.awake_cores import awake_cores
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import Executor, StepBatch, StepRow
from pdserve.model.weights.random_checkpoint import write_random_checkpoint

NUM_LAYERS, HIDDEN_SIZE = 12, 1024
NUM_PROMPT, NUM_ROWS = 512, 8
BLOCK_SIZE = 16
_REPEATS = 12


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the widest case, and cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.case:
        sys.stdout.write(json.dumps(measure_case(**json.loads(arguments.case))) + "\n")
        return 0
    cores = sorted(os.sched_getaffinity(0))[: arguments.ranks]
    count = len(cores)
    cases = {
        "1 rank, 1 core": (1, 1, cores[:1]),
        f"1 rank, {count} cores": (1, 1, cores),
        f"{count} ranks, 1 core each": (count, 1, cores),
        f"{count} stages, 1 core each": (1, count, cores),
    }
    with tempfile.TemporaryDirectory() as folder, awake_cores():
        write_random_checkpoint(
            Path(folder),
            hidden_size=HIDDEN_SIZE,
            intermediate_size=3 * HIDDEN_SIZE,
            num_layers=NUM_LAYERS,
            num_heads=16,
            num_kv_heads=8,
            vocab_size=8192,
        )
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for _ in range(arguments.rounds):
            for name, (num_ranks, num_stages, of_case) in cases.items():
                runs[name].append(
                    _run({"folder": folder, "num_ranks": num_ranks, "num_stages": num_stages, "cores": of_case})
                )
    results = {name: {key: median(run[key] for run in each) for key in each[0]} for name, each in runs.items()}
    publish({"median_ms": results, "rounds": runs}, arguments.json, unshown=("rounds",))
    return 0


def measure_case(folder: str, num_ranks: int, num_stages: int, cores: list[int]) -> dict[str, float]:
    """Milliseconds to prefill `NUM_PROMPT` tokens, and to decode `NUM_ROWS` rows after as many cached tokens: the
    median of a step, and, while all micro-batches are busy, the mean. The same by the cost model."""
    os.sched_setaffinity(0, cores)
    from pdserve.engine.worker.backend import choose_backend
    from pdserve.kv_transfer.pool_memory import PoolMemory

    blocks_per_row = NUM_PROMPT // BLOCK_SIZE + 2
    config = WorkerConfig(
        worker_id="bench",
        role=WorkerRole.MIXED,
        model_path=folder,
        precision=Precision(dtype="float32"),
        tensor_parallel=num_ranks,
        pipeline_parallel=num_stages,
        max_model_len=2 * NUM_PROMPT,
        num_kv_blocks=NUM_ROWS * blocks_per_row,
        swap_memory_bytes=0,
        cpu_cores=tuple(cores),
    )
    backend = choose_backend(config)
    memory = PoolMemory.create(backend.layout)
    built = backend.build_executors(memory)
    executor = built.executors[0]
    greedy = SamplingParams(temperature=0.0)
    rows = [
        StepRow(
            sequence_id=index,
            tokens=[(7 * index + position) % 8192 for position in range(NUM_PROMPT)],
            cached_length=0,
            block_table=range(index * blocks_per_row, (index + 1) * blocks_per_row),
            sample=greedy,
        )
        for index in range(NUM_ROWS)
    ]
    shares = [rows[index::num_stages] for index in range(num_stages)]
    times_s = {"prefill": median(_step_s(executor, [row]) for row in rows)}
    times_s["prefill_busy"] = _busy_s(built.executors, [[[row] for row in share] for share in shares]) / NUM_ROWS
    for row in rows:
        row.tokens, row.cached_length = [5], NUM_PROMPT
    times_s["decode"] = median(_step_s(executor, rows) for _ in range(_REPEATS))
    times_s["decode_busy"] = _busy_s(built.executors, [[share] * _REPEATS for share in shares]) / _REPEATS
    if built.followers is not None:
        built.followers.close()
    cost, num_share = backend.cost, NUM_ROWS // num_stages
    times_s["predicted_prefill"] = cost.prefill_s(NUM_PROMPT)
    times_s["predicted_prefill_busy"] = cost.prefill_s(NUM_PROMPT) / num_stages
    times_s["predicted_decode"] = cost.decode_s(NUM_ROWS, NUM_ROWS * NUM_PROMPT)
    times_s["predicted_decode_busy"] = cost.decode_s(num_share, num_share * NUM_PROMPT)
    return {name: round(1000 * each_s, 2) for name, each_s in times_s.items()}


def _busy_s(executors: Sequence[Executor], steps: Sequence[Sequence[list[StepRow]]]) -> float:
    """Seconds in which every executor computes its steps, at the same time as the others."""

    def run(executor: Executor, of_executor: Sequence[list[StepRow]]) -> None:
        for rows in of_executor:
            _step_s(executor, rows)

    with ThreadPoolExecutor(len(executors)) as threads:
        started_s = time.perf_counter()
        list(threads.map(run, executors, steps))
        return time.perf_counter() - started_s


def _step_s(executor: Executor, rows: list[StepRow]) -> float:
    started_s = time.perf_counter()
    executor.submit(StepBatch(step_id=0, rows=rows)).result()
    return time.perf_counter() - started_s


def _run(case: dict[str, object]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.bench.ranks", "--case", json.dumps(case)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    raise SystemExit(main())
