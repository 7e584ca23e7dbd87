"""Whether runs that end early decide as long ones do: wrong decisions about the goodput, by layout and traffic.

    python -m pdserve.bench.plan_looks [--seeds 8] [--json FILE]

The search ends a run at a rate as soon as its attainment surely meets or surely misses the target
(`pdserve.planner.search.goodput.LOOKS`). Here this is done with the scout, whose queues are those of the simulator
under ``least-time`` and which is fast enough for thousands of runs: at each look the run ends with its last answer, as
in the search. The truth at a rate are long runs on other seeds. A decision is wrong if it is the opposite of the truth,
at a rate more than a fifteenth from the goodput: a run of 15 residences cannot show less, and the goodput is then wrong
by less. Decisions nearer to it are counted apart, and so is what is left undecided.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console

from pdserve.bench.models import LLAMA_3_8B, LLAMA_3_70B
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.goodput import Runner, Trial, highest_rate, run_lengths
from pdserve.planner.search.plan import LEAST_FINAL_REQUESTS
from pdserve.planner.search.search import usual_run_s
from pdserve.planner.simulate.attainment import NUM_LOOKS, Attainment, measure
from pdserve.planner.workload.presets import preset

SHARES = (0.7, 0.85, 0.92, 0.97, 1.0, 1.03, 1.08, 1.15, 1.3, 1.6)
"""Rates, in goodputs."""
_RESOLUTION = 1 + 1 / 15
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
        self._drawn: dict[int, Any] = {}

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

    def decided(self, rate: float, residence_s: float, seed: int) -> tuple[Attainment, bool]:
        """The run at ``rate`` as it ends, and whether it is sure."""
        from pdserve.planner.simulate.scout import ScoutRequests, scout  # compiles

        trial = self._trial(LEAST_FINAL_REQUESTS, seed=seed)
        if seed not in self._drawn:
            drawn = self._workload.draw(trial.num_requests, seed, max_model_len=trial.model.max_model_len)
            self._drawn[seed] = drawn
        requests = self._drawn[seed].at_rate(rate)
        trial = replace(trial, run_s=usual_run_s(requests[:1000], residence_s, self.slo))
        half, usual, longest = run_lengths(trial, requests)
        for length in (half, usual, longest):
            found = scout(
                trial.model,
                trial.layout,
                ScoutRequests.of(requests[:length]),
                slo=self.slo,
                max_in_flight=_MAX_IN_FLIGHT,
            )
            seen = measure([found.simulation()], self.slo, rate, num_looks=NUM_LOOKS, is_short=length < usual)
            if seen.surely_meets(self.slo.attainment) or seen.surely_misses(self.slo.attainment):
                return seen, True
        return seen, False

    def _trial(self, num_requests: int, *, seed: int) -> Trial:
        case = self._case
        return Trial(model=case.model, layout=case.layout, slo=self.slo, num_requests=num_requests, seed=seed)


def decisions(case: Case, num_seeds: int) -> dict[str, Any]:
    """Counts of the decisions at rates about the goodput of ``case``, and their cost."""
    runs = Scouted(case)
    goodput, residence_s = runs.goodput()
    counts: Counter[str] = Counter()
    wrong_at: Counter[float] = Counter()
    num_requests = 0
    for share in SHARES:
        for seed in range(num_seeds):
            seen, is_sure = runs.decided(share * goodput, residence_s, seed)
            num_requests += seen.num_requests
            is_near = 1 / _RESOLUTION < share < _RESOLUTION
            is_wrong = is_sure and seen.surely_meets(runs.slo.attainment) == (share > 1)
            outcome = "undecided" if not is_sure else "wrong" if is_wrong and share != 1 else "right"
            counts[f"{outcome}{'_near' if is_near else ''}"] += 1
            if outcome == "wrong":
                wrong_at[share] += 1
    return {
        "case": str(case),
        "goodput": round(goodput, 2),
        **{f"num_{outcome}": count for outcome, count in sorted(counts.items())},
        "wrong_at": dict(wrong_at),
        "requests_per_run": round(num_requests / (len(SHARES) * num_seeds)),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="runs at each rate")
    arguments = parser.parse_args()
    terminal, rows = Console(stderr=True), []
    for case in CASES:
        rows.append(decisions(case, arguments.seeds))
        terminal.print(rows[-1])
    num_far = sum(each.get(f"num_{outcome}", 0) for each in rows for outcome in ("right", "wrong", "undecided"))
    num_wrong = sum(each.get("num_wrong", 0) for each in rows)
    publish(
        {"num_far": num_far, "num_wrong": num_wrong, "wrong_share": num_wrong / num_far, "cases": rows}, arguments.json
    )


if __name__ == "__main__":
    main()
