"""Continuous batching beside static and dynamic batches, in the simulator: by spread of lengths and rate of arrival.

    python -m pdserve.bench.batching [--requests N] [--json FILE]

Orca (Yu et al. 2022, OSDI) admits a request as soon as another one ends; the other gates are those of
`pdserve.engine.worker.batches`, where a dynamic batch waits for `MAX_WAIT_S`. The gate alone differs: kernels, cost
model, chunked prefill and memory are the same, an ended answer is not computed any more, and tokens are sent as they
come. That is kind to batches: the published factors, 36.9 (Orca over FasterTransformer) and 23 (Anyscale), are over
engines that differ in all of it.

One H100 with Llama-3-8B and `BATCH_SIZE` slots. *Capacity* is of requests that are all there at the start, and an empty
slot is one without an answer while the batch runs; *good* is the share of Poisson arrivals with a first token within
5 s and 40 ms a token. *Live* is the demo model on a worker of this machine without a router, by the process's time: how
many times the tokens/s of static batches continuous ones have.
"""

from __future__ import annotations

import time
from itertools import product
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import H100
from pdserve.bench.script import publish, script_parser
from pdserve.bench.speculation import Server
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.engine.worker.batches import scheduler_with
from pdserve.model.weights.demo_model import DEMO_MODEL
from pdserve.planner.layout import Layout, Pool
from pdserve.planner.simulate import simulated_cluster
from pdserve.planner.simulate.attainment import Attainment, measure
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.conversations import Conversations
from pdserve.planner.workload.lengths import LogNormalLengths
from pdserve.planner.workload.workload import Workload

BATCH_SIZE = 32
MAX_WAIT_S = 0.1
GATES: dict[str, str | float] = {"continuous": "continuous", "dynamic": MAX_WAIT_S, "static": "static"}
SPREADS = (0.0, 0.5, 1.0, 2.0)
"""Standard deviation over mean, of answers of 200 tokens and prompts of 500 on average."""
SLO = SloConfig(ttft_seconds=5.0, tpot_seconds=0.04)
RATES = (1.0, 4.0, 8.0, 12.0)
"""Requests per second."""
_AT_ONCE = 1e6
"""Requests per second."""
_LIVE_ROUNDS = 3


def served(gate: str, spread: float, rate: float, num_requests: int) -> Attainment:
    """Serve ``num_requests`` at ``rate``, a multiple of `BATCH_SIZE`, so that the last static batch is full."""
    assert num_requests % BATCH_SIZE == 0
    lengths = LogNormalLengths(
        mean_prompt_tokens=500, mean_output_tokens=200, prompt_variation=spread, output_variation=spread
    )
    requests = Workload(name="", contents=Conversations(lengths=lengths)).draw(num_requests, max_model_len=8192)
    pool = Pool(role=WorkerRole.MIXED, replicas=1, hardware=H100, max_batch_size=BATCH_SIZE)
    with patch.object(simulated_cluster, "Scheduler", scheduler_with(GATES[gate])):
        simulation = simulate(
            LLAMA_3_8B,
            Layout(mixed=pool),
            requests.at_rate(rate),
            slo=SLO,
            max_in_flight=num_requests,
            policy="round-robin",
        )
    return measure([simulation], SLO, rate)


def live(spread: float, num_requests: int) -> float:
    """Tokens/s of continuous over static batches, of a worker's scheduler and executor."""
    lengths = LogNormalLengths(
        mean_prompt_tokens=50, mean_output_tokens=50, prompt_variation=spread, output_variation=spread
    )
    pairs = lengths.draw(num_requests, np.random.default_rng(0))
    requests = [
        GenerationRequest(
            request_id=number,
            prompt_tokens=tuple(Random(number).choices(range(6, 500), k=min(int(num_prompt), 256))),
            sampling=SamplingParams(seed=number, max_tokens=min(int(num_output), 256), ignore_eos=True),
        )
        for number, (num_prompt, num_output) in enumerate(zip(*pairs, strict=True))
    ]
    seconds: dict[str, list[float]] = {"continuous": [], "static": []}
    servers = {
        gate: Server(
            WorkerConfig(
                worker_id="mixed-0",
                role=WorkerRole.MIXED,
                model_path=str(DEMO_MODEL),
                max_model_len=512,
                num_kv_blocks=2048,
                max_batch_size=BATCH_SIZE,
                batching=gate,
                device="cpu",
            )
        )
        for gate in seconds
    }
    for _ in range(_LIVE_ROUNDS):
        for gate, server in servers.items():
            began_s = time.process_time()
            answers, _ = server.serve(requests, num_requests)
            assert len(answers) == num_requests
            seconds[gate].append(time.process_time() - began_s)
    return min(seconds["static"]) / min(seconds["continuous"])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--requests", type=int, default=10 * BATCH_SIZE)
    arguments = parser.parse_args()
    table = Table("spread", "gate", "tokens/s", "empty slots", *(f"good at {rate:g}/s" for rate in RATES), "p50 TTFT")
    rows: list[dict[str, Any]] = []
    for spread, gate in product(SPREADS, GATES):
        full = served(gate, spread, _AT_ONCE, arguments.requests)
        at_rates = [served(gate, spread, rate, arguments.requests) for rate in RATES]
        row = {
            "spread": spread,
            "gate": gate,
            "tokens_per_s": round(full.output_tokens_per_s),
            "empty_slots": round(1 - full.pools[0].mean_batch_size / BATCH_SIZE, 3),
            **{f"good_at_{rate:g}": round(each.share, 3) for rate, each in zip(RATES, at_rates, strict=True)},
            f"ttft_p50_s_at_{RATES[0]:g}": round(at_rates[0].ttft.percentile(50), 3),
        }
        rows.append(row)
        table.add_row(*map(str, row.values()))
    Console(stderr=True).print(table)
    on_cpu = {str(spread): round(live(spread, arguments.requests), 2) for spread in SPREADS}
    publish({"batch_size": BATCH_SIZE, "max_wait_s": MAX_WAIT_S, "rows": rows, "live": on_cpu}, arguments.json)


if __name__ == "__main__":
    main()
