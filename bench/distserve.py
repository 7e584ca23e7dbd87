"""The planner under DistServe's assumptions: its fitted step times, its short burst, its criteria.

    python -m pdserve.bench.distserve --fits simdistserve_fit_a100_80g.csv [--requests 300] [--json FILE]

Reference: DistServe's simulator (OSDI 2024; LLMServe/DistServe, simdistserve) reports 1.56 requests/s per GPU for
OPT-13B on 4 A100-80GB with TTFT 200 ms and TPOT 100 ms, by prefill of TP 2 and decode of TP 1; its bisection had
rejected 1.72. Taken from DistServe: fitted step times, no transfer time, no chunks, one prefill and one decode
instance, a burst of 300 requests, and 90th percentiles of each latency by itself. Its simulator caps decode at 50,000
tokens; here the KV pool is what the devices' memory holds. Router policy, schedulers and reservations are pdserve's.
Such a burst need not be sustainable, so the steady state is printed too, judged jointly and without the warm-up.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from pdserve.bench.models import OPT_13B
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate.attainment import measure
from pdserve.planner.simulate.simulator import NO_OVERHEADS, simulate
from pdserve.planner.workload.presets import preset

DEVICES = 4
DEGREES = (1, 2, 4)
SLO = SloConfig(ttft_seconds=0.2, tpot_seconds=0.1, attainment=0.9)
MAX_RATE_PER_DEVICE = 5.0
SMALL_BATCH = 95
"""Decode batches from here on have a fit of their own."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Milliseconds: a + b * tokens + c * (tokens squared in prefill, sequences in decode)."""

    a: float
    b: float
    c: float

    def seconds(self, num_tokens: float, other: float) -> float:
        return (self.a + self.b * num_tokens + self.c * other) / 1000


Fits = dict[tuple[int, str], Fit]
"""By (tensor parallelism, phase)."""


def read_fits(path: Path, model: str, engine: str = "distserve") -> Fits:
    with path.open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {
            (int(row["tp"]), row["phase"]): Fit(float(row["a_ms"]), float(row["b_ms_per_token"]), float(row["c"]))
            for row in rows
            if (row["engine"], row["model"]) == (engine, model)
        }


class FittedCost(CostModel):
    """Step times by DistServe's fits; a step is either all prefill or all decode."""

    def __init__(self, model: PlannedModel, pool: Pool, fits: Fits) -> None:
        super().__init__(
            model.shape, pool.hardware, model.precision, pool.tensor_parallel, pipeline_parallel=pool.pipeline_parallel
        )
        self._fits = fits

    def _fit(self, phase: str) -> Fit:
        return self._fits[self.tensor_parallel, phase]

    def step_s(self, rows: Iterable[tuple[int, int]], batch_size: int = 0, context_tokens: int = 0) -> float:
        rows = list(rows)
        if all(num_new == 1 for num_new, _ in rows):
            num_cached_tokens = sum(num_cached for _, num_cached in rows)
            return self.decode_s(len(rows) + batch_size, num_cached_tokens + context_tokens)
        assert not batch_size, "decode instances do not prefill"
        return self._prefill_batch_s(sum(num_new for num_new, _ in rows), sum(num_new**2 for num_new, _ in rows))

    def prefill_s(self, num_new: int, num_cached: int = 0) -> float:
        return self._prefill_batch_s(num_new, num_new**2)

    def _prefill_batch_s(self, num_tokens: int, sum_of_squares: int) -> float:
        sends_s = 1e-3 * self.pipeline_parallel**2  # of every stage, a millisecond for each of the stages
        call_s = 2e-3 + 1e-7 * num_tokens
        return self._fit("prefill").seconds(num_tokens, sum_of_squares) + sends_s + call_s

    def decode_s(self, batch_size: int, context_tokens: int) -> float:
        return self.decode_run_s(batch_size, context_tokens)[0]

    def decode_run_s(self, batch_size: int, context_tokens: int) -> tuple[float, float]:
        fit = self._fit("decoding_smallbs" if batch_size < SMALL_BATCH else "decoding_largebs")
        return fit.seconds(context_tokens, batch_size), fit.b * batch_size / 1000

    def mixed_s(self, num_new: int, num_cached: int, batch_size: int, context_tokens: int) -> float:
        """Never: its decode instances do not prefill."""
        return float("inf")

    def transfer_s(self, num_tokens: int, *, same_host: bool) -> float:
        return 0.0

    def max_kv_blocks(
        self, block_size: int, memory_fraction: float = 0.9, *, max_batch_tokens: int = 0, max_batch_size: int = 0
    ) -> int:
        return super().max_kv_blocks(block_size, memory_fraction)


def layouts() -> Iterator[Layout]:
    """One prefill and one decode instance, on 4 devices together at most."""
    degrees = [(tensor, pipeline) for tensor, pipeline in product(DEGREES, DEGREES) if tensor * pipeline < DEVICES]
    for prefill, decode in product(degrees, degrees):
        if prefill[0] * prefill[1] + decode[0] * decode[1] <= DEVICES:
            yield Layout(prefill=_pool(WorkerRole.PREFILL, *prefill), decode=_pool(WorkerRole.DECODE, *decode))


def _pool(role: WorkerRole, tensor_parallel: int, pipeline_parallel: int) -> Pool:
    return Pool(
        role=role,
        replicas=1,
        hardware=hardware("a100-80gb"),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        max_batch_tokens=2**20,
        max_batch_size=2048,
    )


def highest_rate(layout: Layout, fits: Fits, num_requests: int, *, is_finite: bool, tolerance: float) -> float:
    """By bisection, as DistServe's: requests per second and device."""
    sample = preset("sharegpt-synthetic").draw(num_requests, 0, max_model_len=OPT_13B.max_model_len)
    low, high = 0.0, MAX_RATE_PER_DEVICE
    while high - low > tolerance:
        rate = (low + high) / 2
        offered = rate * layout.num_devices
        run = simulate(
            OPT_13B,
            layout,
            sample.at_rate(offered),
            slo=SLO,
            overheads=NO_OVERHEADS,
            max_in_flight=2**31,
            cost_of=lambda pool: FittedCost(OPT_13B, pool, fits),
        )
        judged = measure([run], SLO, offered, is_finite=is_finite)
        low, high = (rate, high) if judged.meets(SLO.attainment) else (low, rate)
    return low


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--fits", type=Path, required=True, help="table of DistServe's fits")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--steady-requests", type=int, default=3000)
    arguments = parser.parse_args()
    fits = read_fits(arguments.fits, "facebook/opt-13b")
    console = Console(stderr=True)
    found: list[dict[str, Any]] = []
    for layout in layouts():
        # The burst is judged as DistServe does, each latency's 90th percentile by itself; the steady state without
        # warm-up, 90 % meeting both.
        burst = highest_rate(layout, fits, arguments.requests, is_finite=True, tolerance=0.02)
        steady = highest_rate(layout, fits, arguments.steady_requests, is_finite=False, tolerance=0.02)
        found.append({"layout": str(layout), "burst": round(burst, 3), "steady": round(steady, 3)})
        console.print(f"{layout}: {burst:.2f} requests/s per GPU in a burst, {steady:.2f} sustained", highlight=False)
    found.sort(key=lambda each: -each["burst"])
    console.print(f"best: {found[0]['layout']} at {found[0]['burst']}; DistServe: prefill TP 2, decode TP 1 at 1.56")
    result = {
        "slo": {"ttft_s": SLO.ttft_seconds, "tpot_s": SLO.tpot_seconds, "share": SLO.attainment},
        "requests": {"burst": arguments.requests, "steady": arguments.steady_requests},
        "found": found,
    }
    publish(result, arguments.json)


if __name__ == "__main__":
    main()
