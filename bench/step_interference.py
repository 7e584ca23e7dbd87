"""Effect of KV pulls on decoding: step times of a decode batch, quiet and under a full-rate pull, in one run.

    python -m pdserve.bench.step_interference [--transport memfd|tcp] [--json FILE]

One process decodes a real model on a core of its own; its transfer process pulls blocks of another pool without pause
on other cores. Quiet and loaded stretches alternate, so that the machine's noise affects both.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import torch

from pdserve.bench.script import publish, script_parser
from pdserve.bench.transfer import Engine
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepBatch, StepRow
from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.kv_pool import KvPool
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.executors.model import ModelExecutor
from pdserve.model.weights.random_checkpoint import write_random_checkpoint

BATCH_SIZE = 8
CONTEXT_TOKENS = 256
BLOCKS_PER_PULL = 512
STEPS_PER_STRETCH = 400
STRETCHES = 10


@contextmanager
def pulling(source: Engine, target: Engine) -> Iterator[list[float]]:
    """Pull the source's first blocks into the target's, without a pause, while the body runs; yields the times."""
    stopping = Event()
    seconds: list[float] = []

    def run() -> None:
        while not stopping.is_set():
            seconds.append(target.pull(source, BLOCKS_PER_PULL, settle_s=0.0))

    thread = Thread(target=run)
    thread.start()
    try:
        yield seconds
    finally:
        stopping.set()
        thread.join()


def build_executor(folder: Path, memory: PoolMemory, config: DecoderConfig) -> ModelExecutor:
    """The checkpoint in ``folder`` over ``memory``, computed by one thread."""
    use_threads(1)
    pool = KvPool(torch.frombuffer(memory.blocks, dtype=torch.uint8), memory.layout.shape, torch.float32)
    return ModelExecutor(folder=folder, config=config, layout=memory.layout, pool=pool, precision=Precision())


def decode_batch(step_id: int, layout: KvLayout) -> StepBatch:
    """`BATCH_SIZE` sequences with a context of `CONTEXT_TOKENS` after the pulled blocks, one new token each."""
    blocks_per_row = layout.num_blocks_for(CONTEXT_TOKENS + 1)
    firsts = range(BLOCKS_PER_PULL, layout.num_blocks, blocks_per_row)
    greedy = SamplingParams(temperature=0.0)
    return StepBatch(
        step_id=step_id,
        rows=[
            StepRow(
                sequence_id=row, tokens=[7 + row], cached_length=CONTEXT_TOKENS, sample=greedy,
                block_table=range(first, first + blocks_per_row),
            )
            for row, first in enumerate(firsts[:BATCH_SIZE])
        ],
    )  # fmt: skip


def step_times_s(executor: ModelExecutor, layout: KvLayout) -> list[float]:
    """Wall time of each step of one stretch."""
    times = []
    for step_id in range(STEPS_PER_STRETCH):
        started_s = time.perf_counter()
        executor.submit(decode_batch(step_id, layout)).result()
        times.append(time.perf_counter() - started_s)
    return times


def measure(transport: str) -> dict[str, Any]:
    """Step-time percentiles, quiet and loaded, their ratio, and the pulls' rate."""
    cores = sorted(os.sched_getaffinity(0))
    transfer_cores = tuple(cores[1:])
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_checkpoint(Path(folder), hidden_size=256, intermediate_size=688)
        config = DecoderConfig.from_folder(path)
        layout = config.kv_layout(num_blocks=1024, block_size=16, dtype="float32", model_hash="bench")
        source_memory, target_memory = PoolMemory.create(layout), PoolMemory.create(layout)
        executor = build_executor(path, target_memory, config)
    source = Engine(source_memory, transport, cpu_cores=transfer_cores)
    target = Engine(target_memory, transport, cpu_cores=transfer_cores)
    os.sched_setaffinity(0, {cores[0]})
    num_pulls = 0
    try:
        step_times_s(executor, layout)  # warm-up
        quiet, loaded, loaded_s = [], [], 0.0
        for _ in range(STRETCHES):
            quiet += step_times_s(executor, layout)
            started_s = time.perf_counter()
            with pulling(source, target) as pulls:
                loaded += step_times_s(executor, layout)
            loaded_s += time.perf_counter() - started_s
            num_pulls += len(pulls)
    finally:
        os.sched_setaffinity(0, set(cores))
        target.process.close()
        source.process.close()
    return report(transport, quiet, loaded, num_pulls * BLOCKS_PER_PULL * layout.block_bytes / loaded_s, layout)


def report(
    transport: str, quiet: list[float], loaded: list[float], bytes_per_s: float, layout: KvLayout
) -> dict[str, Any]:
    def percentiles_ms(times: list[float]) -> dict[str, float]:
        return {f"p{p}_ms": float(np.percentile(times, p) * 1e3) for p in (50, 90, 99)}

    return {
        "transport": transport,
        "batch_size": BATCH_SIZE,
        "context_tokens": CONTEXT_TOKENS,
        "pull_bytes": BLOCKS_PER_PULL * layout.block_bytes,
        "num_steps_each": len(quiet),
        "quiet": percentiles_ms(quiet),
        "loaded": percentiles_ms(loaded),
        "p99_ratio": float(np.percentile(loaded, 99) / np.percentile(quiet, 99)),
        "p50_ratio": float(np.percentile(loaded, 50) / np.percentile(quiet, 50)),
        "pull_gbytes_per_s": bytes_per_s / 1e9,
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--transport", choices=("memfd", "tcp"), default="memfd")
    arguments = parser.parse_args()
    publish(measure(arguments.transport), arguments.json)


if __name__ == "__main__":
    main()
