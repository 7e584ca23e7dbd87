"""Time of the router's two decisions about a request by the policy `goodput`, and of what each report of a worker adds.

    python -m pdserve.bench.decisions [--json FILE]

N prefill and N decode workers, 256 answers on each of the latter, and a prompt on its way to each. Before each decision
every decode worker reports a step, so that nothing holds that was computed of it before; its snapshot is made then, as
a session does with each frame, and counted apart. Prompts are cached nowhere, or on every worker; their block hashes
are computed once, by the first decision.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import layout
from pdserve.bench.script import publish, script_parser, show_table
from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.request import GenerationRequest, KvSource
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import CostModel
from pdserve.router.cluster.block_set import BlockSet
from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.goodput import Goodput
from pdserve.router.requests.placement import Arrival, PromptBlocks

NUM_ANSWERS, NUM_CONTEXT_TOKENS = 256, 900
"""On each decode worker, and the least context of each."""
TTFT_S, TPOT_S = 0.25, 0.05
BLOCK_SIZE, NUM_BLOCKS = 16, 20_000
NUM_CACHES = 16
"""Different prefix caches, half full of other prompts; each is that of several workers."""
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


class Times(NamedTuple):
    """Process times of one request."""

    decisions_us: float
    """Of both together."""
    report_us: float
    """For the snapshot that follows one report of a worker."""


def _worker(role: WorkerRole, index: int, cost: CostModel, cached: BlockSet) -> IdleWorker:
    worker = IdleWorker(f"{role.value}-{index}", role)
    worker.block_size, worker.max_batch_tokens, worker.max_batch_size = BLOCK_SIZE, 2048, 512
    worker.cost, worker.cached_blocks = cost, cached
    if role is WorkerRole.PREFILL:
        worker.load = SchedulerLoad(num_blocks_free=NUM_BLOCKS, num_waiting_tokens=3000 + 97 * index % 1000)
    else:
        num_context = NUM_ANSWERS * (NUM_CONTEXT_TOKENS + 13 * index % 100)
        worker.load = SchedulerLoad(num_running=NUM_ANSWERS, num_blocks_free=NUM_BLOCKS, num_context_tokens=num_context)
    return worker


def _step(workers: Sequence[Worker]) -> float:
    """All answers of ``workers`` have one more token; return microseconds per snapshot."""
    for worker in workers:
        load = worker.load
        worker.num_steps += 1
        worker.stepped_s += TPOT_S / 2
        worker.load = load._replace(num_context_tokens=load.num_context_tokens + load.num_running)
    began_ns = time.process_time_ns()
    for worker in workers:
        worker.snapshot()
    return (time.process_time_ns() - began_ns) / 1e3 / len(workers)


def decision_times(num_workers: int, num_tokens: int, num_decisions: int, *, is_cached: bool) -> list[Times]:
    """Times of each request but the first."""
    costs = {pool.role: pool.cost(LLAMA_3_8B) for pool in layout(1, 1).pools}
    policy = Goodput(costs, tpot_slo_s=TPOT_S)
    prompt = range(num_tokens)
    caches = [BlockSet(NUM_BLOCKS) for _ in range(NUM_CACHES)]
    for number, cached in enumerate(caches):
        cached.update(b"%d %d" % (number, other) for other in range(NUM_BLOCKS // 2))
        cached.update(block_hashes(prompt, BLOCK_SIZE) if is_cached else ())
    prefills, decodes = (
        [_worker(role, index, costs[role], caches[index % NUM_CACHES]) for index in range(num_workers)]
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
    )
    for worker_index, worker in enumerate(decodes):
        snapshot = worker.snapshot()
        for index in range(NUM_ANSWERS):
            policy.decoding(-1 - worker_index * NUM_ANSWERS - index, -100 * TPOT_S * index / NUM_ANSWERS, 100, snapshot)
    times = []
    blocks = PromptBlocks(prompt, BLOCK_SIZE)
    for request_id in range(num_decisions + num_workers):
        now_s = request_id * 0.005
        arrival = Arrival(request_id, blocks, now_s, now_s + TTFT_S, tpot_slo_s=TPOT_S)
        report_us = _step(decodes)
        began_ns = time.process_time_ns()
        choice = policy.prefill(arrival, [worker.snapshot() for worker in (*prefills, *decodes)])
        assert choice is not None
        policy.placed(arrival, choice)
        if request_id < num_workers:
            continue
        policy.prefilled(request_id)
        chosen_ns = time.process_time_ns() - began_ns
        _step(decodes)
        began_ns = time.process_time_ns()
        binding = policy.decode(arrival, [worker.snapshot() for worker in decodes], set(), "")
        times.append(Times((time.process_time_ns() - began_ns + chosen_ns) / 1e3, report_us))
        assert binding is not None
        bound = next(worker for worker in decodes if worker.worker_id == binding.worker_id)
        bound.in_flight.add_decode(request_id, num_tokens, blocks.num_blocks())
        bound.in_flight.remove(request_id)
    return times[1:]


def main() -> None:
    parser = script_parser(__doc__)
    arguments = parser.parse_args()
    records = []
    for num_workers, num_tokens, is_cached, num_decisions in CASES:
        times = decision_times(num_workers, num_tokens, num_decisions, is_cached=is_cached)
        p50, p99 = (round(float(each)) for each in np.percentile([each.decisions_us for each in times], (50, 99)))
        report = round(float(np.median([each.report_us for each in times])), 1)
        case = {"workers": num_workers, "prompt_tokens": num_tokens, "cached": is_cached}
        records.append({**case, "p50_us": p50, "p99_us": p99, "report_us": report})
    show_table("decisions", tuple(records[0]), [tuple(map(str, each.values())) for each in records])
    publish({"decisions": records}, arguments.json, unshown=("decisions",))


if __name__ == "__main__":
    main()
