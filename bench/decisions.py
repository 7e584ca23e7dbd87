"""Time of the router's two decisions about a request by the policy `goodput`, snapshots of workers included.

    python -m pdserve.bench.decisions [--json FILE]

N prefill and N decode workers, 256 answers on each of the latter. Before each request every decode worker reports a
step, so that nothing holds that was computed of it before. Prompts are cached nowhere, or on every worker; their block
hashes are computed once, by the first decision.
"""

from __future__ import annotations

import time

import numpy as np
from rich.console import Console
from rich.table import Table

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import layout
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.request import GenerationRequest, KvSource
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.goodput import Goodput
from pdserve.router.requests.placement import Arrival, PromptBlocks

NUM_ANSWERS, NUM_CONTEXT_TOKENS = 256, 900
"""On each decode worker, and the context of each."""
TTFT_S, TPOT_S = 0.25, 0.05
BLOCK_SIZE = 16
CASES = ((8, 1000, False, 2000), (8, 8000, True, 200), (8, 128_000, True, 40), (512, 1000, False, 40))
"""Workers of each role, prompt tokens, whether they are cached, and decisions."""


class IdleWorker(Worker):
    """A worker that takes no command."""

    def submit(self, request: GenerationRequest) -> None:
        raise AssertionError

    def prepare(self, request: GenerationRequest, source: KvSource) -> None:
        raise AssertionError

    def cancel(self, request_id: int, attempt: int) -> None:
        raise AssertionError


def _worker(role: WorkerRole, index: int, cached: frozenset[bytes]) -> IdleWorker:
    worker = IdleWorker(f"{role.value}-{index}", role)
    worker.block_size, worker.max_batch_tokens, worker.max_batch_size = BLOCK_SIZE, 2048, 512
    worker.cached_blocks = cached
    if role is WorkerRole.PREFILL:
        worker.load = SchedulerLoad(num_blocks_free=20_000, num_waiting_tokens=3000)
    else:
        num_context = NUM_ANSWERS * NUM_CONTEXT_TOKENS
        worker.load = SchedulerLoad(num_running=NUM_ANSWERS, num_blocks_free=20_000, num_context_tokens=num_context)
    return worker


def _step(worker: Worker) -> None:
    """All answers of ``worker`` have one more token."""
    load = worker.load
    worker.num_steps += 1
    worker.stepped_s += TPOT_S / 2
    worker.load = load._replace(num_context_tokens=load.num_context_tokens + load.num_running)


def decision_times_us(num_workers: int, num_tokens: int, num_decisions: int, *, is_cached: bool) -> list[float]:
    """Process time of each request's two decisions."""
    costs = {pool.role: pool.cost(LLAMA_3_8B) for pool in layout(1, 1).pools}
    policy = Goodput(costs, tpot_slo_s=TPOT_S)
    prompt = range(num_tokens)
    cached = frozenset(block_hashes(prompt, BLOCK_SIZE)) if is_cached else frozenset[bytes]()
    prefills, decodes = (
        [_worker(role, index, cached) for index in range(num_workers)]
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
    )
    for worker_index, worker in enumerate(decodes):
        snapshot = worker.snapshot()
        for index in range(NUM_ANSWERS):
            policy.decoding(-1 - worker_index * NUM_ANSWERS - index, -100 * TPOT_S * index / NUM_ANSWERS, 100, snapshot)
    times_us = []
    blocks = PromptBlocks(prompt, BLOCK_SIZE)
    for request_id in range(num_decisions):
        for worker in decodes:
            _step(worker)
        now_s = request_id * 0.005
        arrival = Arrival(request_id, blocks, now_s, now_s + TTFT_S, tpot_slo_s=TPOT_S)
        began_ns = time.process_time_ns()
        choice = policy.prefill(arrival, [worker.snapshot() for worker in (*prefills, *decodes)])
        assert choice is not None
        policy.placed(arrival, choice)
        policy.prefilled(request_id, choice.worker_id)
        binding = policy.decode(arrival, [worker.snapshot() for worker in decodes], set(), "")
        times_us.append((time.process_time_ns() - began_ns) / 1e3)
        assert binding is not None
        bound = next(worker for worker in decodes if worker.worker_id == binding.worker_id)
        bound.in_flight.add_decode(request_id, num_tokens, blocks.num_blocks())
        bound.in_flight.remove(request_id)
    return times_us[1:]


def main() -> None:
    parser = script_parser(__doc__)
    arguments = parser.parse_args()
    table = Table("workers", "prompt", "cached", "p50 us", "p99 us", box=None)
    records = []
    for num_workers, num_tokens, is_cached, num_decisions in CASES:
        times_us = decision_times_us(num_workers, num_tokens, num_decisions, is_cached=is_cached)
        p50, p99 = (round(float(each)) for each in np.percentile(times_us, (50, 99)))
        table.add_row(f"{num_workers} + {num_workers}", f"{num_tokens:,}", str(is_cached), f"{p50:,}", f"{p99:,}")
        records.append(
            {"workers": num_workers, "prompt_tokens": num_tokens, "cached": is_cached, "p50_us": p50, "p99_us": p99}
        )
    Console(stderr=True).print(table)
    publish({"decisions": records}, arguments.json, unshown=("decisions",))


if __name__ == "__main__":
    main()
