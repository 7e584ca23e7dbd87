"""The scout against the judge, on random placements, workloads and rates; and the scout's speed.

    python -m pdserve.bench.scout_vs_judge [--cases 200] [--requests 3000] [--seed 0] [--only CASE] [--json FILE]

Each case draws a model, a GPU, a layout, its limits, a workload and an SLO in proportion to the latencies of an idle
cluster, then a rate up to a little above the one at which the scout meets both objectives for half of the requests.
A quarter of the workloads share system prompts, and a quarter are conversations. Both simulate the same requests. They
agree on a case if attainment differs by at most 2 points and the 90th percentiles of TTFT and TPOT
by at most 5 %; a request without an answer counts as infinite. Every disagreement is listed, with its cause: it is
*chaotic* if the judge or the scout does not agree with itself once every request reaches its worker 10 or 100 us later,
else the scout's own. Speeds are in seconds of CPU time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import process_time

import numpy as np

from pdserve.bench.models import dense
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate.scout import ScoutRequests, ScoutResult, scout
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import Overheads, simulate
from pdserve.planner.workload.arrivals import RandomGaps
from pdserve.planner.workload.conversations import Conversations, SystemPrompts, Turns
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.workload import Workload, WorkloadSample

MAX_POINTS, MAX_RATIO = 2.0, 0.05
_LATER_S = (1e-5, 1e-4)
_MAX_MODEL_LEN = 8192
_WORKLOADS = ("chat", "code", "summarisation", "sharegpt-synthetic", "humaneval-synthetic", "longbench-synthetic")
_SYSTEM_PROMPTS = SystemPrompts(4, 1024)
_TURNS = Turns(4.0, 2.0)
_GPUS = ("h100-sxm", "a100-80gb-sxm", "l40s")


_dense = partial(dense, max_model_len=_MAX_MODEL_LEN)
MODELS = (
    (_dense("8B", 32, 4096, 14336, 32, 128256), (1, 2)),
    (_dense("14B", 40, 5120, 17408, 40, 151936), (1, 2)),
    (_dense("32B", 64, 5120, 25600, 64, 151936), (2, 4)),
    (_dense("70B", 80, 8192, 28672, 64, 128256), (4, 8)),
)
"""Each with the tensor-parallel degrees to choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One placement under one load."""

    number: int
    model: PlannedModel
    layout: Layout
    workload: str
    sample: WorkloadSample
    slo: SloConfig
    rate: float

    def __str__(self) -> str:
        pools = ", ".join(
            f"{pool.hardware.name} {pool.max_batch_tokens}/{pool.max_batch_size}"
            + (f"/{pool.num_kv_blocks}" if pool.num_kv_blocks else "")
            for pool in self.layout.pools
        )
        objectives = f"{self.slo.ttft_seconds * 1e3:.0f}/{self.slo.tpot_seconds * 1e3:.1f} ms"
        return (
            f"{self.number:3} {self.model.name} {self.layout} ({pools}) {self.workload} {self.rate:.2f}/s {objectives}"
        )

    def requests(self) -> ScoutRequests:
        return ScoutRequests.of(self.sample.at_rate(self.rate))

    def scouted(self, later_s: float = 0.0) -> ScoutResult:
        """By the scout, if requests reach their workers ``later_s`` later than usual."""
        return scout(self.model, self.layout, self.requests(), slo=self.slo, overheads=_delayed(later_s))

    def judged(self, later_s: float = 0.0) -> RequestTimes:
        """Times by the judge, as in `scouted`."""
        requests = self.sample.at_rate(self.rate)
        return simulate(self.model, self.layout, requests, slo=self.slo, overheads=_delayed(later_s)).times


def _delayed(later_s: float) -> Overheads:
    return replace(Overheads(), arrival_s=Overheads().arrival_s + later_s)


def draw_case(number: int, seed: int, num_requests: int) -> Case | None:
    """Case ``number``; ``None`` if its model does not fit."""
    random = np.random.default_rng((seed, number))
    model, degrees = MODELS[random.integers(len(MODELS))]
    gpu = hardware(str(random.choice(_GPUS)))

    def pool(role: WorkerRole) -> Pool:
        return Pool(
            role=role,
            replicas=int(random.integers(1, 5)),
            hardware=gpu,
            tensor_parallel=int(random.choice(degrees)),
            pipeline_parallel=int(random.choice((1, 1, 1, 2))),
            max_batch_tokens=int(random.choice((512, 2048, 8192))),
            max_batch_size=int(random.choice((64, 256))),
        )

    if random.random() < 0.35:
        layout = Layout(mixed=pool(WorkerRole.MIXED))
    else:
        prefill, decode = pool(WorkerRole.PREFILL), pool(WorkerRole.DECODE)
        if random.random() < 0.25:  # KV of few sequences
            decode = replace(decode, num_kv_blocks=int(random.integers(1200, 6000)))
        hosts = ((0,),) * prefill.replicas, tuple((int(random.integers(2)),) for _ in range(decode.replicas))
        layout = Layout(prefill=prefill, decode=decode, hosts=hosts)
    try:
        if not all(pool.kv_blocks(model, pool.cost(model)) >= 1200 for pool in layout.pools):
            return None
    except ValueError:
        return None
    name = str(random.choice(_WORKLOADS))
    contents = preset(name).contents
    assert isinstance(contents, Conversations)
    system_prompts = _SYSTEM_PROMPTS if random.random() < 0.25 else None
    turns = _TURNS if random.random() < 0.25 else Turns()
    contents = Conversations(lengths=contents.lengths, system_prompts=system_prompts, turns=turns)
    arrivals = RandomGaps(float(random.choice((1.0, 1.0, 2.0))))
    workload = Workload(name=name, contents=contents, arrivals=arrivals)
    case = Case(
        number=number,
        model=model,
        layout=layout,
        workload=name
        + (f" after {system_prompts.num_tokens}" if system_prompts else "")
        + (f" in {turns.mean_turns:g} turns" if turns is _TURNS else "")
        + f" cv {arrivals.coefficient_of_variation:g}",
        sample=workload.draw(num_requests, number, max_model_len=_MAX_MODEL_LEN),
        slo=SloConfig(ttft_seconds=100, tpot_seconds=100),
        rate=0.05,
    )
    idle = case.scouted().times
    slo = SloConfig(
        ttft_seconds=float(np.nanpercentile(idle.ttft_s, 90) * random.uniform(1.5, 6)),
        tpot_seconds=float(np.nanpercentile(idle.tpot_s, 90) * random.uniform(1.2, 3)),
    )
    case = replace(case, slo=slo)
    while attainment(case.scouted().times, slo) > 0.5 and case.rate < 2000:
        case = replace(case, rate=case.rate * 1.3)
    return replace(case, rate=case.rate * float(random.uniform(0.3, 1.15)))


def attainment(times: RequestTimes, slo: SloConfig) -> float:
    return float(times.are_within(slo).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Percent, milliseconds and milliseconds."""

    attainment: float
    ttft_p90: float
    tpot_p90: float

    @classmethod
    def of(cls, times: RequestTimes, slo: SloConfig) -> Figures:
        ttft_s = np.nan_to_num(times.ttft_s, nan=np.inf)
        tpot_s = np.nan_to_num(times.tpot_s[times.num_output_tokens > 1], nan=np.inf)
        return cls(
            attainment=attainment(times, slo) * 100,
            ttft_p90=float(np.percentile(ttft_s, 90, method="lower") * 1e3),
            tpot_p90=float(np.percentile(tpot_s, 90, method="lower") * 1e3),
        )

    def disagreement(self, judge: Figures) -> tuple[float, float, float]:
        """Points of attainment, and relative differences of TTFT and TPOT."""
        return (
            self.attainment - judge.attainment,
            _ratio(self.ttft_p90, judge.ttft_p90) - 1,
            _ratio(self.tpot_p90, judge.tpot_p90) - 1,
        )


def _ratio(value: float, other: float) -> float:
    return 1.0 if value == other else value / other


def agrees(disagreement: tuple[float, float, float]) -> bool:
    points, ttft, tpot = disagreement
    return abs(points) <= MAX_POINTS and abs(ttft) <= MAX_RATIO and abs(tpot) <= MAX_RATIO


def is_chaotic(case: Case, scouted: Figures, judged: Figures) -> bool:
    """Whether the scout or the judge differs from itself by a delay that means nothing."""
    return not all(
        agrees(Figures.of(times, case.slo).disagreement(own))
        for later_s in _LATER_S
        for times, own in ((case.scouted(later_s).times, scouted), (case.judged(later_s), judged))
    )


def cases(num_cases: int, num_requests: int, seed: int, *, only: int | None) -> Iterator[Case]:
    number = num_drawn = 0
    while num_drawn < num_cases:
        case = None
        if only is None or number == only:
            case = draw_case(number, seed, num_requests)
        if case is not None:
            num_drawn += 1
            yield case
        number += 1


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the only case to run")
    arguments = parser.parse_args()
    num_cases = 1 if arguments.only is not None else arguments.cases
    records = []
    num_agreed, scout_s, judge_s = 0, 0.0, 0.0
    for case in cases(num_cases, arguments.requests, arguments.seed, only=arguments.only):
        began_s = process_time()
        judge = case.judged()
        judged_s = process_time()
        requests = case.requests()
        drawn_s = process_time()
        result = scout(case.model, case.layout, requests, slo=case.slo)
        scouted_s = process_time()
        scout_s, judge_s = scout_s + scouted_s - drawn_s, judge_s + judged_s - began_s
        ours, theirs = Figures.of(result.times, case.slo), Figures.of(judge, case.slo)
        difference = ours.disagreement(theirs)
        num_agreed += agrees(difference)
        cause = ""
        if not agrees(difference):
            cause = "chaotic" if is_chaotic(case, ours, theirs) else "scout"
        if not agrees(difference) or arguments.only is not None:
            print(
                f"{case}: attainment {ours.attainment:.1f} / {theirs.attainment:.1f} %, "
                f"TTFT p90 {ours.ttft_p90:.1f} / {theirs.ttft_p90:.1f} ms, "
                f"TPOT p90 {ours.tpot_p90:.2f} / {theirs.tpot_p90:.2f} ms, "
                f"{result.num_preemptions} preemptions {cause}",
                flush=True,
            )
        records.append(
            {
                "case": str(case),
                "difference": difference,
                "cause": cause,
                "requests_per_s": arguments.requests / (scouted_s - drawn_s),
            }
        )
    columns = np.abs([record["difference"] for record in records]).T
    print(f"{num_agreed} of {num_cases} cases agree within {MAX_POINTS:g} points and {MAX_RATIO:.0%}")
    for name, values in zip(("attainment (points)", "TTFT p90", "TPOT p90"), columns, strict=True):
        median, high, most = np.percentile(values, (50, 95, 100))
        print(f"  {name:20} median {median:.4f}  p95 {high:.4f}  most {most:.4f}")
    num_requests = num_cases * arguments.requests
    print(f"scout {num_requests / scout_s:,.0f} requests/s, judge {num_requests / judge_s:,.0f} requests/s")
    publish({"num_agreed": num_agreed, "num_cases": num_cases, "cases": records}, arguments.json, unshown=["cases"])


if __name__ == "__main__":
    main()
