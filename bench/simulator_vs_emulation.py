"""Accuracy of the simulator on a live cluster: the same requests, simulated and on a cluster of emulated GPUs.

    python -m pdserve.bench.simulator_vs_emulation [--prefill TENSOR PIPELINE] [--decode TENSOR PIPELINE]
                                                   [--setting NAME] [--shares 0.6 0.9]
                                                   [--time-scale 10] [--requests 240] [--json FILE]

`pdserve up --emulate` runs every part of a cluster except the arithmetic: steps and transfers last as long as the cost
model predicts, times the time scale, which makes the host's own work relatively small. An open-loop generator measures
at the client, at seven rates up to 0.9 of saturation and at two beyond it; `pdserve.planner.simulate.simulator` gets
the same requests and the same cost model. Up to 0.9, joint attainment must agree within 2 points, and p50 / p90 of TTFT
and TPOT within 5 %; beyond it only attainment. The goodput of both is interpolated between the rates; it is that of
``--requests`` from an empty cluster, above what is served without end. Saturation is the rate of a simulated closed
loop with more requests than slots.

The simulator runs as slowly as the cluster, because the constants of scheduling, such as the 20 s until a late prompt
is due, are not scaled, and its router has served what the other one has: it knows as much of lengths and errors.
Queues amplify small differences: figures are means of `NUM_SIMULATIONS`, whose requests arrive later by up to the
overhead of an arrival, and come with their standard deviation. Where some 90 % are served in time, p90 of TTFT is that
of a prompt in time or of a late one, by chance.

The time of HTTP, gRPC and step loops is measured once, on other requests at a lower rate, and becomes the simulator's
`Overheads`. A run fails if the router or the generator used more than 70 % of a core, if the generator was late, or if
the machine was more than half busy: emulated steps then end late, which the simulator does not model.

``--setting`` takes layout, workload and objectives from `pdserve.bench.policies`. Rates are then shares of the
setting's own, at which ``goodput``, the policy of all these clusters, serves about 90 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import psutil
from rich.console import Console

from pdserve.bench.cluster import RunningCluster, running_cluster
from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import SETTINGS, Setting, layout
from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import LLAMA_3_8B_CONFIG
from pdserve.contracts.codec import to_plain
from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.loadgen.load import MAX_CPU_SHARE, Measurement, measure_load
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.hardware import hardware
from pdserve.model.weights.random_checkpoint import write_tokenizer
from pdserve.planner.arrays import BoolArray, FloatArray
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import NO_OVERHEADS, Overheads, simulate
from pdserve.planner.workload.conversations import Conversations, Turns
from pdserve.planner.workload.lengths import LogNormalLengths
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.planner.workload.workload import Workload

GPU = "h100-sxm"
MODEL = PlannedModel(shape=ModelShape.from_hf_config(LLAMA_3_8B_CONFIG), name="Meta-Llama-3-8B", max_model_len=8192)
SHARES_BELOW = (0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
SHARES_BEYOND = (1.1, 1.3)
"""Shares of the rate at saturation."""
SLO = SloConfig(ttft_seconds=0.15, tpot_seconds=0.01)
"""In emulated seconds: nine tenths of the requests meet both at about 0.9 of saturation."""
LOGNORMAL = Workload(
    name="lognormal",
    contents=Conversations(
        lengths=LogNormalLengths(
            mean_prompt_tokens=650, mean_output_tokens=110, prompt_variation=0.7, output_variation=0.5
        )
    ),
)
AGENT = preset("agent").contents
assert isinstance(AGENT, Conversations)
SESSIONS = Setting(
    workload=Workload(name="sessions", contents=replace(AGENT, turns=Turns(mean_turns=4.0, mean_think_s=0.5))),
    layout=layout(1, 1),
    ttft_s=0.25,
    tpot_s=0.015,
    rate=40,
)
"""Agents' sessions on two workers: each turn waits for the answer before it, and half a second of tools."""
EMULATED = {
    setting.name: replace(setting, model=replace(setting.model, transport=MODEL.transport))
    for setting in (*SETTINGS, SESSIONS)
    if setting.model is LLAMA_3_8B
    and not setting.layout.hosts
    and not any(pool.num_kv_blocks for pool in setting.layout.pools)
}
"""Settings that a deployment file describes and one host can emulate, with the transport of `emulated_cluster`."""
MAX_MACHINE_SHARE = 0.5
"""Share of all cores. An emulated cluster hardly uses any."""
MAX_LATE_S = 0.003
"""Seconds of the emulated clock by which one request of a hundred may be sent or heard late."""
PROBE_SHARE = 0.4
"""Share of saturation: so few requests meet that each has its own delay, and so many that what router and loops do for
the others is in it."""
NUM_WARM, NUM_PROBES = 20, 150
NUM_SIMULATIONS = 5
PAUSE_S = 5.0
"""Between two measurements: the cluster is empty."""
Figures = Mapping[str, float]
"""``attainment``, the share of requests that met both objectives, and `PERCENTILES` in seconds. All requests count; one
that did not end meets nothing. TPOT is of answers of two tokens and more."""
PERCENTILES = ("ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "tpot_p90_s")
_MOST_POINTS, _MOST_ERROR = 2.0, 0.05
_NUM_HALVINGS = 5


def figures_of(times: RequestTimes, slo: SloConfig) -> Figures:
    def percentiles(seconds: FloatArray) -> list[float]:
        known = seconds[~np.isnan(seconds)]
        return np.percentile(known, (50, 90)).tolist() if known.size else [np.nan, np.nan]

    values = [*percentiles(times.ttft_s), *percentiles(times.tpot_s[times.num_output_tokens > 1])]
    return {"attainment": float(times.are_within(slo).mean()), **dict(zip(PERCENTILES, values, strict=True))}


def compared(measured: Figures, simulated: Figures) -> dict[str, Any]:
    """Both, percentage points by which the simulator's attainment is above, and its relative errors, which are above 0
    where it is slower."""
    return {
        "measured": {name: round(value, 6) for name, value in measured.items()},
        "simulated": {name: round(value, 6) for name, value in simulated.items()},
        "attainment_points": round(100 * (simulated["attainment"] - measured["attainment"]), 2),
        "relative_errors": {name: round(simulated[name] / measured[name] - 1, 4) for name in PERCENTILES},
    }


def failures(agreement: Mapping[str, Any], *, attainment_only: bool = False) -> list[str]:
    """Figures that differ by more than 2 points or 5 %, a line each."""
    found = []
    # Not "more than": NaN, for nothing measured, agrees with nothing.
    if not abs(agreement["attainment_points"]) <= _MOST_POINTS:
        found.append(f"attainment is {agreement['attainment_points']:+.1f} points off")
    for name, error in agreement["relative_errors"].items():
        if not attainment_only and not abs(error) <= _MOST_ERROR:
            found.append(f"{name.removesuffix('_s')} is {error:+.1%} off")
    return found


def saturation(model: PlannedModel, layout: Layout, workload: Workload, slo: SloConfig) -> float:
    """Completed requests per second of a closed loop with more requests than batch slots, after its start."""
    concurrency = 2 * sum(pool.replicas * pool.max_batch_size for pool in layout.pools if pool is not layout.prefill)
    requests = workload.draw(4 * concurrency, max_model_len=model.max_model_len).at_rate(1.0)
    times = simulate(model, layout, requests, slo=slo, overheads=NO_OVERHEADS, concurrency=concurrency).times
    ended_s = np.sort(times.last_token_s)
    first, last = len(ended_s) // 4, 3 * len(ended_s) // 4
    return float((last - first) / (ended_s[last] - ended_s[first]))


def overheads_between(
    measured: RequestTimes, simulated: RequestTimes, is_undisturbed: BoolArray | None = None
) -> Overheads:
    """Overheads that explain the difference of requests that met few others, the second simulated without any.

    The requests should have met few others. The client sees only sums: a sixth each of the excess TTFT is attributed to
    a message to the router and to the answer's way to the client, as in the defaults of `Overheads`.

    Args:
        is_undisturbed: requests whose TTFT is used; ``None`` uses all.
    """
    late_s = measured.ttft_s - simulated.ttft_s
    ttft_s = float(np.median(late_s if is_undisturbed is None else late_s[is_undisturbed]))
    stalls_s = [times.second_token_s - times.first_token_s for times in (measured, simulated)]
    pull_s = float(np.median(stalls_s[0] - stalls_s[1]))
    message_s = max(0.0, ttft_s / 6)
    return Overheads(
        arrival_s=4 * message_s, message_s=message_s, answer_s=message_s, pull_s=max(0.0, pull_s), turn_s=0.0
    )


def pipelined_overheads(measured: RequestTimes, simulated: Callable[[Overheads], RequestTimes]) -> Overheads:
    """Overheads of a cluster whose workers plan a step while the previous one runs, with the turn between two steps.

    There decode steps follow each other without a turn, so TPOT does not reveal it. But a prompt that arrives while the
    only step in flight runs is received when that step ends: it is later than others by a turn.

    Args:
        simulated: simulates the measured requests with given overheads.

    Raises:
        ValueError: none of the prompts waited for a step, or all did.
    """
    bare = simulated(NO_OVERHEADS)
    has_waited = bare.started_s > bare.arrived_s
    if has_waited.all() or not has_waited.any():
        raise ValueError("a turn shows only if some prompts wait for a step and others do not: choose another rate")
    overheads = overheads_between(measured, bare, ~has_waited)

    def late_s(turn_s: float) -> float:
        ttft_s = simulated(replace(overheads, turn_s=turn_s)).ttft_s
        return float(np.median((measured.ttft_s - ttft_s)[has_waited]))

    return replace(overheads, turn_s=found_turn(late_s))


def found_turn(late_s: Callable[[float], float]) -> float:
    """Seconds between two steps for which ``late_s`` is 0.

    A turn delays requests by more than itself, because they stay longer, meet more others and wait for several turns.
    """
    low_s, high_s = 0.0, late_s(0.0)
    if high_s <= 0:
        return 0.0
    for _ in range(_NUM_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if late_s(middle_s) > 0 else (low_s, middle_s)
    return (low_s + high_s) / 2


def one_of_each(prefill_degrees: Sequence[int], decode_degrees: Sequence[int]) -> Setting:
    """A prefill and a decode worker under `LOGNORMAL`, with the rate at saturation. Degrees are tensor- and
    pipeline-parallel."""
    layout = Layout.of(
        Pool(role=role, replicas=1, hardware=hardware(GPU), tensor_parallel=tensor, pipeline_parallel=pipeline)
        for role, (tensor, pipeline) in (
            (WorkerRole.PREFILL, prefill_degrees),
            (WorkerRole.DECODE, decode_degrees),
        )
    )
    return Setting(
        workload=LOGNORMAL,
        layout=layout,
        ttft_s=SLO.ttft_seconds,
        tpot_s=SLO.tpot_seconds,
        rate=saturation(MODEL, layout, LOGNORMAL, SLO),
        model=MODEL,
    )


@contextmanager
def emulated_cluster(
    model: PlannedModel, layout: Layout, slo: SloConfig, time_scale: float, *, max_replicas: int = 0
) -> Iterator[RunningCluster]:
    """The layout on emulated devices, ``time_scale`` times slower than real ones; objectives are in seconds of theirs.

    Emulation needs a config.json and a tokenizer, but no weights. Prompts are token ids, so the tokenizer is small.

    Args:
        max_replicas: of a pool, whose workers follow the load; 0 for numbers that stay.

    Raises:
        RuntimeError: it did not start.
    """
    with TemporaryDirectory() as work:
        folder = Path(work) / model.name
        write_tokenizer(folder, 512)
        config = {**LLAMA_3_8B_CONFIG, "max_position_embeddings": model.max_model_len}
        (folder / "config.json").write_text(json.dumps(config))
        deployment = {
            "model": {"path": str(folder), "dtype": model.precision.dtype, "max_model_len": model.max_model_len},
            "slo": to_plain(slowed_slo(slo, time_scale)),
            **{role.value: {"replicas": 0} for role in WorkerRole},
            **{
                pool.role.value: {
                    "replicas": pool.replicas,
                    "max_replicas": max_replicas,
                    "tensor_parallel": pool.tensor_parallel,
                    "pipeline_parallel": pool.pipeline_parallel,
                }
                for pool in layout.pools
            },
        }
        gpu = layout.decode_pool.hardware.name
        with running_cluster(deployment, "--emulate", gpu, "--time-scale", str(time_scale)) as cluster:
            yield cluster


class Observed(NamedTuple):
    """Requests that a cluster has served."""

    measured: Measurement
    shares: dict[str, float]
    """CPU time of ``generator`` and ``router``, as shares of a core, and of the ``machine``, as a share of all."""
    invalid: list[str]
    """Reasons why it does not count."""


def observe(
    cluster: RunningCluster, requests: Sequence[SimulatedRequest], *, vocab_size: int, time_scale: float
) -> Observed:
    """Send requests to an emulated cluster, at their times."""
    router, began_s = cluster.router(), time.monotonic()
    before_s = sum(router.cpu_times()[:2])
    psutil.cpu_percent()  # begins the interval of the next call
    measured = measure_load(cluster.url, requests, vocab_size=vocab_size, time_scale=time_scale)
    machine = psutil.cpu_percent() / 100
    of_router = (sum(router.cpu_times()[:2]) - before_s) / (time.monotonic() - began_s)
    shares = {"generator": measured.health.cpu_share, "router": of_router, "machine": machine}
    return Observed(
        measured,
        {name: round(share, 3) for name, share in shares.items()},
        invalid_reasons(measured, of_router, machine, time_scale),
    )


class Comparison:
    """One cluster and its simulation."""

    def __init__(self, cluster: RunningCluster, setting: Setting, time_scale: float) -> None:
        self._cluster = cluster
        self._setting = setting
        self._time_scale = time_scale
        self.overheads = NO_OVERHEADS
        self._served: list[SimulatedRequest] = []
        """All requests so far, in the cluster's time."""
        self._num_runs = 0
        self._begun_s, self._ended_s = 0.0, 0.0
        """The last measurement, in the same time."""

    def measure_overheads(self, probes: list[SimulatedRequest]) -> None:
        """Find the overheads that explain the difference between measured and simulated ``probes``."""
        self._observe(probes[:NUM_WARM])  # code and caches are warm after it
        self.overheads = pipelined_overheads(self._observe(probes).measured.times, self._simulate)

    def at_rate(self, rate: float, share: float, requests: list[SimulatedRequest]) -> dict[str, Any]:
        """Measure and simulate ``requests``, which arrive at ``rate``."""
        time.sleep(PAUSE_S)
        observed, slo = self._observe(requests), self._setting.slo
        simulated = [figures_of(self._simulate(self.overheads, seed), slo) for seed in range(NUM_SIMULATIONS)]
        agreement = compared(figures_of(observed.measured.times, slo), _over(np.mean, simulated))
        return {
            "rate": round(rate, 3),
            "share": share,
            "agreement": agreement,
            "deviation": {name: round(value, 6) for name, value in _over(np.std, simulated).items()},
            "shares": observed.shares,
            "failures": failures(agreement, attainment_only=share > SHARES_BELOW[-1]),
            "invalid": observed.invalid,
        }

    def _observe(self, requests: list[SimulatedRequest]) -> Observed:
        self._begun_s = self._ended_s + PAUSE_S
        vocab_size = self._setting.model.shape.vocab_size
        observed = observe(self._cluster, requests, vocab_size=vocab_size, time_scale=self._time_scale)
        # The generator's prompts share nothing with those of a run before.
        self._num_runs += 1
        served = [slowed_request(request, self._time_scale, self._begun_s) for request in requests]
        self._served += [_renamed(request, self._num_runs << 24) for request in served]
        self._ended_s = self._begun_s + self._time_scale * observed.measured.ended_s
        return observed

    def _simulate(self, overheads: Overheads, seed: int = 0) -> RequestTimes:
        """Times of the requests measured last, after all that were served before them; with a ``seed``, each arrives
        later by up to the overhead of an arrival."""
        setting, scale = self._setting, self._time_scale
        requests = self._served
        if seed:
            random = np.random.default_rng(seed)
            late_s = random.uniform(0, overheads.arrival_s * scale, len(requests)).tolist()
            moved = [
                replace(each, arrived_s=each.arrived_s + by_s) for each, by_s in zip(requests, late_s, strict=True)
            ]
            requests = sorted(moved, key=lambda each: each.arrived_s)
        times = simulate(
            setting.model,
            setting.layout.slowed(scale),
            requests,
            slo=slowed_slo(setting.slo, scale),
            overheads=Overheads(**{name: value * scale for name, value in asdict(overheads).items()}),
            policy=DEFAULT_POLICY,
        ).times
        return emulated_times(times, scale, self._begun_s)


def slowed_slo(slo: SloConfig, time_scale: float) -> SloConfig:
    return replace(slo, ttft_seconds=slo.ttft_seconds * time_scale, tpot_seconds=slo.tpot_seconds * time_scale)


def slowed_request(request: SimulatedRequest, time_scale: float, from_s: float = 0.0) -> SimulatedRequest:
    """The request, and the turns that follow it, as `measure_load` sends them in a run that begins at ``from_s``."""
    follow_up = request.follow_up and slowed_request(request.follow_up, time_scale)
    return replace(request, arrived_s=from_s + request.arrived_s * time_scale, follow_up=follow_up)


def _renamed(request: SimulatedRequest, by: int) -> SimulatedRequest:
    """The request with other contents."""
    return replace(request, segments=tuple(each._replace(content=each.content + by) for each in request.segments))


def emulated_times(times: RequestTimes, time_scale: float, from_s: float) -> RequestTimes:
    """Requests that arrived at ``from_s`` or later, in emulated seconds since then."""
    is_in = times.arrived_s >= from_s
    columns = {column.name: getattr(times, column.name)[is_in] for column in fields(times)}
    return RequestTimes(
        **{name: (each - from_s) / time_scale if name.endswith("_s") else each for name, each in columns.items()}
    )


def _over(statistic: Callable[[list[float]], Any], runs: Sequence[Figures]) -> Figures:
    return {name: float(statistic([run[name] for run in runs])) for name in runs[0]}


def invalid_reasons(
    measured: Measurement, router_cpu_share: float, machine_share: float, time_scale: float
) -> list[str]:
    """Reasons why a measurement is invalid, a line each."""
    reasons = measured.health.problems(MAX_LATE_S * time_scale)
    if router_cpu_share > MAX_CPU_SHARE:
        reasons.append(f"the router used {router_cpu_share:.0%} of a core: use a larger --time-scale")
    if machine_share > MAX_MACHINE_SHARE:
        reasons.append(f"the machine was {machine_share:.0%} busy: run it alone")
    if measured.errors:
        reasons.append(f"{measured.errors.total()} requests failed: {next(iter(measured.errors))}")
    return reasons


def compare(
    setting: Setting, arguments: argparse.Namespace, console: Console
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All rates on one cluster, and figures that belong to all of them."""
    workload, max_model_len = setting.workload, setting.model.max_model_len
    num_requests = arguments.requests * setting.layout.decode_pool.replicas
    sample = workload.draw(num_requests, arguments.seed, max_model_len=max_model_len)
    expected_s = arguments.time_scale * num_requests / setting.rate * sum(1 / share for share in arguments.shares)
    console.print(f"{setting.layout}: 1.00 x is {setting.rate:.1f} requests/s; about {expected_s / 60 + 2:.0f} minutes")
    results = []
    with emulated_cluster(setting.model, setting.layout, setting.slo, arguments.time_scale) as cluster:
        comparison = Comparison(cluster, setting, arguments.time_scale)
        probes = workload.draw(NUM_PROBES, arguments.seed + 1, max_model_len=max_model_len)
        # Later turns would arrive in another order in the simulation, and are not compared one by one.
        firsts = [replace(each, follow_up=None) for each in probes.at_rate(PROBE_SHARE * setting.rate)]
        comparison.measure_overheads(firsts)
        overheads_s = asdict(comparison.overheads)
        shown = ", ".join(f"{name.removesuffix('_s')} {value * 1e3:.2f}" for name, value in overheads_s.items())
        console.print(f"overheads, in ms of the emulated clock: {shown}", highlight=False, soft_wrap=True)
        for share in arguments.shares:
            rate = share * setting.rate
            results.append(comparison.at_rate(rate, share, sample.at_rate(rate)))
            console.print(results[-1])
    return results, overheads_s


def interpolated_goodput(results: Sequence[Mapping[str, Any]], source: str) -> float | None:
    """Rate per second at which ``source``, "measured" or "simulated", falls below the objectives' attainment; None if
    it does so between no two rates."""
    points = [(result["rate"], result["agreement"][source]["attainment"]) for result in results]
    for (rate, share), (next_rate, next_share) in reversed(list(pairwise(points))):
        if share >= SLO.attainment > next_share:
            return float(rate + (next_rate - rate) * (share - SLO.attainment) / (share - next_share))
    return None


def main() -> int:
    parser = script_parser(__doc__)
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            type=int,
            nargs=2,
            default=(1, 1),
            metavar=("TENSOR", "PIPELINE"),
            help=f"degrees of {role} workers",
        )
    parser.add_argument("--setting", choices=list(EMULATED), help="layout, workload and objectives of a setting")
    parser.add_argument("--time-scale", type=float, default=10.0, help="real seconds of an emulated one")
    parser.add_argument("--requests", type=int, default=240, help="at each rate, for each worker that decodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[*SHARES_BELOW, *SHARES_BEYOND],
        metavar="SHARE",
        help="rates, as shares of the one at saturation, or of the setting's",
    )
    arguments = parser.parse_args()
    setting = EMULATED[arguments.setting] if arguments.setting else one_of_each(arguments.prefill, arguments.decode)
    results, figures = compare(setting, arguments, Console(stderr=True))
    failures = [line for result in results for line in (*result["failures"], *result["invalid"])]
    document = {
        "model": setting.model.name,
        "layout": str(setting.layout),
        "gpu": GPU,
        "workload": setting.name,
        "time_scale": arguments.time_scale,
        "requests": arguments.requests * setting.layout.decode_pool.replicas,
        "seed": arguments.seed,
        "slo": {"ttft_seconds": setting.ttft_s, "tpot_seconds": setting.tpot_s},
        "rate": setting.rate,
        **{name: round(value, 6) for name, value in figures.items()},
        "goodput": {source: interpolated_goodput(results, source) for source in ("measured", "simulated")},
        "rates": results,
        "agrees": not failures,
    }
    publish(document, arguments.json)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
