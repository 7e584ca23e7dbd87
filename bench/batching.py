"""Continuous batching beside static and dynamic batches, in the simulator: by spread of lengths and rate of arrival.

    python -m pdserve.bench.batching [--requests N] [--json FILE]

Orca (Yu et al. 2022, OSDI) admits a request as soon as another one ends. A *static* batch is admitted when it is full,
a *dynamic* one also when its first request has waited `MAX_WAIT_S`, as in Triton Inference Server; both only after the
last answer of the batch before. The gate alone differs: kernels, cost model, chunked prefill and memory are the same,
an ended answer is not computed any more, and tokens are sent as they come. That is kind to batches: the published
factors, 36.9 (Orca over FasterTransformer) and 23 (Anyscale), are over engines that differ in all of it.

One H100 with Llama-3-8B and `BATCH_SIZE` slots. *Capacity* is of requests that are all there at the start, and an empty
slot is one without an answer while the batch runs; *good* is the share of Poisson arrivals with a first token within
5 s and 40 ms a token.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from math import inf
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import H100
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.engine.scheduling.table import AdmissionBudget, PlannedStep
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.planner.layout import Layout, Pool
from pdserve.planner.simulate import simulated_cluster
from pdserve.planner.simulate.attainment import Attainment, measure
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.conversations import Conversations
from pdserve.planner.workload.lengths import LogNormalLengths
from pdserve.planner.workload.workload import Workload

BATCH_SIZE = 32
MAX_WAIT_S = 0.1
GATES = {"continuous": None, "dynamic": MAX_WAIT_S, "static": inf}
SPREADS = (0.0, 0.5, 1.0, 2.0)
"""Standard deviation over mean, of answers of 200 tokens and prompts of 500 on average."""
SLO = SloConfig(ttft_seconds=5.0, tpot_seconds=0.04)
RATES = (1.0, 4.0, 8.0, 12.0)
"""Requests per second."""
_AT_ONCE = 1e6
"""Requests per second."""


class BatchScheduler(Scheduler):
    """Admits whole batches, each after the last answer of the one before."""

    def __init__(self, *arguments: Any, max_wait_s: float, **options: Any) -> None:
        """
        Args:
            max_wait_s: of the first request, for a batch to fill.
        """
        super().__init__(*arguments, **options)
        self._max_wait_s = max_wait_s
        self._num_to_admit = 0
        """Of the batch that is being admitted."""

    def plan_new_work(self, step: PlannedStep, now_s: float) -> None:
        waiting, admitted = self.prompts.waiting, self.prompts.admitted
        if not self.running and not admitted and not self.table.steps_in_flight:
            first = waiting.first()
            is_due = first is not None and now_s >= first.arrived_s + self._max_wait_s
            self._num_to_admit = min(len(waiting), BATCH_SIZE) if is_due or len(waiting) >= BATCH_SIZE else 0
        num_waiting = len(waiting)
        super().plan_new_work(step, now_s)
        self._num_to_admit -= num_waiting - len(waiting)

    def _budget(self) -> AdmissionBudget:
        budget = super()._budget()
        return AdmissionBudget(min(budget.num_slots, self._num_to_admit), budget.num_blocks)

    def next_deadline_s(self) -> float | None:
        deadlines_s = [super().next_deadline_s() or inf]
        if not self.running and (first := self.prompts.waiting.first()) is not None:
            deadlines_s.append(first.arrived_s + self._max_wait_s)
        return min(deadlines_s) if min(deadlines_s) < inf else None


def served(gate: str, spread: float, rate: float, num_requests: int) -> Attainment:
    """Serve ``num_requests`` at ``rate``, a multiple of `BATCH_SIZE`, so that the last static batch is full."""
    assert num_requests % BATCH_SIZE == 0
    lengths = LogNormalLengths(
        mean_prompt_tokens=500, mean_output_tokens=200, prompt_variation=spread, output_variation=spread
    )
    requests = Workload(name="", contents=Conversations(lengths=lengths)).draw(num_requests, max_model_len=8192)
    pool = Pool(role=WorkerRole.MIXED, replicas=1, hardware=H100, max_batch_size=BATCH_SIZE)
    max_wait_s = GATES[gate]
    scheduler = Scheduler if max_wait_s is None else partial(BatchScheduler, max_wait_s=max_wait_s)
    with patch.object(simulated_cluster, "Scheduler", scheduler):
        simulation = simulate(
            LLAMA_3_8B,
            Layout(mixed=pool),
            requests.at_rate(rate),
            slo=SLO,
            max_in_flight=num_requests,
            policy="round-robin",
        )
    return measure([simulation], SLO, rate)


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
    publish({"batch_size": BATCH_SIZE, "max_wait_s": MAX_WAIT_S, "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
