"""Whether the search states the rates that long runs do, though its own runs end early: by layout and traffic.

    python -m pdserve.bench.plan_looks [--seeds 12] [--only NUMBER ...] [--json FILE]

The search ends a run as soon as its attainment surely meets or surely misses the target, or would stay unsure
(`pdserve.planner.search.goodput.LOOKS`). Here it searches goodputs with the scout in place of the simulator: its queues
are those under ``least-time``, and it is fast enough for thousands of runs. At each look the run ends with its last
answer, as in the search. The truth are long runs on other seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from statistics import fmean, median
from typing import Any, NamedTuple

from rich.console import Console

from pdserve.bench.models import LLAMA_3_8B, LLAMA_3_70B
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.goodput import Goodput, Runner, Trial, run_lengths, search_goodput
from pdserve.planner.search.plan import Effort
from pdserve.planner.search.rates import carried_out, highest_rate
from pdserve.planner.search.search import usual_run_s
from pdserve.planner.simulate.attainment import NUM_LOOKS, Attainment, measure
from pdserve.planner.workload.presets import preset

NEAR = 1.05
"""Ratio of a stated rate to the goodput that passes, or its inverse."""
_STARTS = (0.87, 1.0, 1.1, 0.95)
"""Rates at which searches start, in goodputs."""
_MAX_IN_FLIGHT = 4096
_LONG, _LONG_SEEDS = 40_000, range(1000, 1006)


class Case(NamedTuple):
    """A layout under a kind of traffic."""

    model: PlannedModel
    traffic: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.model.name}, {self.traffic}, {self.layout}"


def _pool(role: WorkerRole, replicas: int, tensor_parallel: int) -> Pool:
    kind = hardware("h100-sxm")
    return Pool(role=role, replicas=replicas, hardware=kind, tensor_parallel=tensor_parallel, max_batch_tokens=1024)


def _apart(num_prefill: int, num_decode: int, tensor_parallel: int = 1) -> Layout:
    return Layout(
        prefill=_pool(WorkerRole.PREFILL, num_prefill, tensor_parallel),
        decode=_pool(WorkerRole.DECODE, num_decode, tensor_parallel),
    )


def _together(num_mixed: int, tensor_parallel: int = 1) -> Layout:
    return Layout(mixed=_pool(WorkerRole.MIXED, num_mixed, tensor_parallel))


_70B = replace(LLAMA_3_70B, max_model_len=8192)
CASES = (
    Case(LLAMA_3_8B, "chat", _together(4)),
    Case(LLAMA_3_8B, "chat", _apart(1, 3)),
    Case(LLAMA_3_8B, "code", _apart(2, 2)),
    Case(LLAMA_3_8B, "summarisation", _together(4)),
    Case(LLAMA_3_8B, "agent", _together(4)),
    Case(LLAMA_3_8B, "agent", _apart(2, 2)),
    Case(_70B, "chat", _apart(3, 5, 4)),
    Case(_70B, "summarisation", _apart(4, 4, 4)),
    Case(_70B, "agent", _together(8, 4)),
)


class Scouted:
    """Runs of one case by the scout, on the same requests at all rates."""

    def __init__(self, case: Case) -> None:
        workload = preset(case.traffic)
        self._case, self._workload, self.slo = case, workload, workload.slo or SloConfig()
        self._runner = Runner(workload)

    def long(self, rate: float, seed: int) -> Attainment:
        return self._runner.scouted(self._trial(_LONG, seed=seed), rate)

    def goodput(self) -> tuple[float, float]:
        """Rate at which long runs meet the target on average, in a steady state, and the mean residence time there."""
        residence_s: dict[float, float] = {}

        def meets(rate: float) -> bool:
            seen = [self.long(rate, seed) for seed in _LONG_SEEDS]
            residence_s[rate] = fmean(each.mean_residence_s for each in seen)
            num_saturated = sum(each.is_saturated for each in seen)
            return fmean(each.share for each in seen) >= self.slo.attainment and num_saturated <= len(seen) / 2

        rate = highest_rate(meets, 10.0, 1.5, 1.01)
        return rate, residence_s[rate]

    def searched(self, goodput: float, residence_s: float, seed: int) -> Goodput:
        """What the search states on the requests of ``seed``."""
        effort, max_model_len = Effort(), self._case.model.max_model_len
        sample = self._workload.draw(1000, seed, max_model_len=max_model_len).at_rate(goodput)
        run_s = usual_run_s(sample, residence_s, self.slo)
        trial = replace(self._trial(effort.requests_of_run(goodput, run_s), seed=seed), run_s=run_s)
        start_rate = goodput * _STARTS[seed % len(_STARTS)]
        search = search_goodput(trial, start_rate, tolerance=effort.tolerance)
        return carried_out(search, lambda run: self._seen(*run))

    def _seen(self, trial: Trial, rate: float) -> Attainment:
        """The run at ``rate`` as it ends."""
        from pdserve.planner.simulate.scout import ScoutRequests, scout  # compiles

        drawn = self._workload.draw(trial.num_requests, trial.seed, max_model_len=trial.model.max_model_len)
        requests = drawn.at_rate(rate)
        usual, longest = run_lengths(trial, requests)
        for length in (usual, longest):
            found = scout(
                trial.model,
                trial.layout,
                ScoutRequests.of(requests[:length]),
                slo=self.slo,
                max_in_flight=_MAX_IN_FLIGHT,
            )
            seen = measure([found.simulation()], self.slo, rate, num_looks=NUM_LOOKS if usual < longest else 1)
            low, high = seen.interval
            is_hopeless = abs(seen.share - self.slo.attainment) < (high - low) / 2 / sqrt(longest / usual)
            if seen.surely_meets(self.slo.attainment) or seen.surely_misses(self.slo.attainment) or is_hopeless:
                break
        return seen

    def _trial(self, num_requests: int, *, seed: int) -> Trial:
        case = self._case
        return Trial(model=case.model, layout=case.layout, slo=self.slo, num_requests=num_requests, seed=seed)


def row(case: Case, seeds: Sequence[int]) -> dict[str, Any]:
    """Stated rates over the goodput of ``case``, and the cost of a search."""
    runs = Scouted(case)
    goodput, residence_s = runs.goodput()
    searches = [runs.searched(goodput, residence_s, seed) for seed in seeds]
    stated = [each.rate / goodput for each in searches]
    return {
        "case": str(case),
        "goodput": round(goodput, 2),
        "stated": [round(each, 3) for each in (min(stated), median(stated), max(stated))],
        "num_low": sum(each < 1 / NEAR for each in stated),
        "num_high": sum(each > NEAR for each in stated),
        "num_searches": len(stated),
        "requests_per_search": round(fmean(sum(point.num_requests for point in each.points) for each in searches)),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=12, help="searches of each case")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases to run, from 1")
    arguments = parser.parse_args()
    terminal, rows = Console(stderr=True, width=200), []
    for number, case in enumerate(CASES, 1):
        if arguments.only is None or number in arguments.only:
            rows.append(row(case, range(arguments.seeds)))
            terminal.print(rows[-1])
    counts = {name: sum(each[name] for each in rows) for name in ("num_searches", "num_low", "num_high")}
    publish({**counts, "cases": rows}, arguments.json)


if __name__ == "__main__":
    main()
