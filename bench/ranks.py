"""Prefill and decode steps by tensor-parallel degree on this machine's cores.

``python -m pdserve.bench.ranks``. Each round measures each case in processes of its own, in turn: one rank on one core,
one rank with a thread on each of N cores, and N ranks with a core each.
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
    cases = {"1 rank, 1 core": (1, cores[:1]), f"1 rank, {len(cores)} cores": (1, cores)}
    cases[f"{len(cores)} ranks, 1 core each"] = (len(cores), cores)
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
            for name, (num_ranks, of_case) in cases.items():
                runs[name].append(_run({"folder": folder, "num_ranks": num_ranks, "cores": of_case}))
    results = {name: {key: median(run[key] for run in each) for key in each[0]} for name, each in runs.items()}
    publish({"median_ms": results, "rounds": runs}, arguments.json, unshown=("rounds",))
    return 0


def measure_case(folder: str, num_ranks: int, cores: list[int]) -> dict[str, float]:
    """Median milliseconds of a step that prefills `NUM_PROMPT` tokens, and of one that decodes `NUM_ROWS` rows after as
    many cached tokens."""
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
        max_model_len=2 * NUM_PROMPT,
        num_kv_blocks=NUM_ROWS * blocks_per_row,
        swap_memory_bytes=0,
        cpu_cores=tuple(cores),
    )
    backend = choose_backend(config)
    memory = PoolMemory.create(backend.layout)
    built = backend.build_executor(memory)
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
    prefill_s = [_step_s(built.executor, [row]) for row in rows]
    for row in rows:
        row.tokens, row.cached_length = [5], NUM_PROMPT
    decode_s = [_step_s(built.executor, rows) for _ in range(_REPEATS)]
    if built.followers is not None:
        built.followers.close()
    return {"prefill": 1000 * median(prefill_s), "decode": 1000 * median(decode_s)}


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
