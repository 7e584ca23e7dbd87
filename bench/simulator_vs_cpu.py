"""Accuracy of the simulator on a real model: profiles this machine, serves a small model, and simulates the same.

    python -m pdserve.bench.simulator_vs_cpu [--profile FILE] [--budget 240] [--rounds 4] [--requests 60]
                                             [--loads 0.3,0.5,0.7] [--json FILE]

`pdserve profile` measures the cores that a prefill and a decode worker get by default, and writes a hardware file,
which `--profile` reuses. A cluster of one worker each then serves the small shape of `pdserve.bench.shapes`. An open
loop sends Poisson arrivals at three shares of saturation, in turn, for several rounds. Saturation is the rate of a
simulated closed loop at the speed that the cores have just before. `pdserve.planner.simulate.simulator` gets the same
requests and the hardware file. p50 and p90 of TTFT and TPOT, over all rounds, must agree within 10 %.

Workers keep their cores to themselves (`lend_cores: false`), because neither profile nor simulator models the influence
of one worker on another's steps. The generator and the reader of the router's metrics get the machine's last core, and
the cluster gets the rest: on a shared core, each token of one would wait for the other's, more so at higher load. The
time of HTTP, gRPC and the step loops is measured on other requests before each run; their sum gives the simulator's
`Overheads`.

The speed of shared cores changes within seconds, which no profile can capture: hence the rounds of a few seconds each.
For each round the simulator gets the corrections that the router learns meanwhile: twice a second, by how much steps
with prompts, and other steps, exceeded their prediction. Results without the correction are kept too. A run does not
count if the generator was late, or if other programs or the machine's host used more than a twentieth of the machine;
it is repeated, in at most as many further rounds. Cores are kept awake, because the host would take idle ones away
(`pdserve.bench.awake_cores`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich.console import Console

from pdserve.bench.agreement import Agreement, figures_of, joined
from pdserve.bench.awake_cores import awake_cores
from pdserve.bench.calibration import found_turn, overheads_between, saturation
from pdserve.bench.cluster import RunningCluster, running_cluster
from pdserve.bench.load import LEAD_S, measure_load
from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import SHAPES
from pdserve.bench.step_times import StepTimeRatios, watched_step_times
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.contracts.precision import Precision
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.hardware import Hardware
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.planner.hardware_file import read_hardware_file
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate.simulated_worker import StepCorrections
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import NO_OVERHEADS, Overheads, simulate
from pdserve.planner.workload.conversations import Conversations
from pdserve.planner.workload.lengths import LogNormalLengths
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.planner.workload.workload import Workload

MAX_ERROR = 0.1
"""Largest relative error of a percentile."""
SLO = SloConfig(ttft_seconds=2.0, tpot_seconds=0.2)
SHAPE = "small"
"""Its steps are long compared to the time of the router and the step loops."""
MAX_BATCH_SIZE = 64
KV_BYTES = 2**28
WORKLOAD = Workload(
    name="lognormal",
    contents=Conversations(
        lengths=LogNormalLengths(
            mean_prompt_tokens=300, mean_output_tokens=60, prompt_variation=0.6, output_variation=0.4
        )
    ),
)
COUNTED_LATE_S = 0.05
"""Steps are counted when they end: about half the length of a prompt's after what has made them long."""
MIN_CLUSTER_CORES = 3
MAX_FOREIGN_SHARE = 0.05
"""Share of all cores used by other programs than cluster and generator, or stolen by the machine's host."""
PROBE_SHARE = 0.4
"""Share of saturation: so few requests meet that each has its own delay, and so many that what router and loops do for
the others is in it."""
NUM_PROBES = 40
"""Before each run, and twice before the first for the rate at saturation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Requests that were measured, and what is known of the meantime."""

    rate: float
    requests: list[SimulatedRequest]
    times: RequestTimes
    ratios: StepTimeRatios
    ratios_over_time: Sequence[tuple[float, StepTimeRatios]]
    """Since when, on the clock of `times`."""
    generator_cpu_share: float
    foreign_cpu_share: float
    """Share of all cores used by neither the cluster nor the generator."""
    problems: list[str]
    """Why it does not count."""


class Comparison:
    """A running cluster and its simulation."""

    def __init__(self, cluster: RunningCluster, model: PlannedModel, layout: Layout) -> None:
        self._cluster = cluster
        self._model = model
        self._layout = layout

    def saturation(self, ratios: StepTimeRatios) -> float:
        """Requests per second, where steps take so many times as long as profiled."""
        return saturation(self._model, self._layout, WORKLOAD, SLO, corrections_of([(0.0, ratios)]))

    def measure(self, rate: float, num_requests: int, seed: int) -> Run:
        """Requests that no other seed has, at ``rate``."""
        requests = WORKLOAD.draw(num_requests, seed, max_model_len=self._model.max_model_len).at_rate(rate)
        before_s, began_s = foreign_cpu_s(self._cluster.pid), time.monotonic()
        with watched_step_times(self._cluster.admin_url) as step_times:
            started_s = time.monotonic() + LEAD_S
            measured = measure_load(
                self._cluster.url, requests, vocab_size=self._model.shape.vocab_size, temperature=1.0
            )
        foreign_s = foreign_cpu_s(self._cluster.pid) - before_s
        foreign_share = max(0.0, foreign_s) / (time.monotonic() - began_s) / (os.cpu_count() or 1)
        problems = measured.health.problems()
        if measured.errors:
            problems.append(f"{measured.errors.total()} requests failed: {next(iter(measured.errors))}")
        if foreign_share > MAX_FOREIGN_SHARE:
            problems.append(f"other programs used {foreign_share:.0%} of the machine: run it alone")
        return Run(
            rate=rate,
            requests=requests,
            times=measured.times,
            ratios=step_times.ratios(),
            ratios_over_time=[
                (from_s - COUNTED_LATE_S - started_s, ratios) for from_s, ratios in step_times.ratios_over_time()
            ],
            generator_cpu_share=measured.health.cpu_share,
            foreign_cpu_share=round(foreign_share, 3),
            problems=problems,
        )

    def overheads(self, probes: Sequence[Run]) -> Overheads:
        """Overheads of a request, without steps and transfers."""
        measured = joined([run.times for run in probes])

        def simulated(turn_s: float) -> RequestTimes:
            return joined([self.simulated(run, replace(NO_OVERHEADS, turn_s=turn_s)) for run in probes])

        turn_s = found_turn(lambda turn_s: late_between(measured, simulated(turn_s)))
        return replace(overheads_between(measured, simulated(turn_s)), turn_s=turn_s)

    def result(self, share: float, runs: Sequence[Run], overheads: Overheads, *, num_wanted: int) -> dict[str, Any]:
        """Compare the valid runs of one load, of which there must be ``num_wanted``, with their simulation: with steps
        as much longer than profiled as they were just then, and as profiled."""
        compared = valid_of(runs) or runs
        not_counted = [problem for run in runs for problem in run.problems]
        too_few = [f"only {len(valid_of(runs))} of {len(runs)} runs count: {', '.join(not_counted)}"]
        measured = figures_of(joined([run.times for run in compared]), SLO)
        corrected, as_profiled = (
            Agreement(
                measured=measured,
                simulated=figures_of(
                    joined([self.simulated(run, overheads, is_corrected=each) for run in compared]), SLO
                ),
            )
            for each in (True, False)
        )
        rates = [round(run.rate, 3) for run in compared]
        return {
            "rate": mean(rates),
            "rates": rates,
            "share_of_saturation": share,
            "agreement": corrected.as_dict(),
            "as_profiled": as_profiled.as_dict(),
            "num_requests": sum(len(run.requests) for run in compared),
            "step_time_ratios": [_named(run.ratios) for run in compared],
            "generator_cpu_shares": [round(run.generator_cpu_share, 3) for run in compared],
            "foreign_cpu_shares": [run.foreign_cpu_share for run in compared],
            "not_counted": not_counted,
            "failures": corrected.failures(relative=MAX_ERROR, attainment_points=100.0),
            "invalid": too_few if len(valid_of(runs)) < num_wanted else [],
        }

    def simulated(self, run: Run, overheads: Overheads, *, is_corrected: bool = True) -> RequestTimes:
        """The same requests; ``is_corrected`` with steps as much longer than profiled as they were just then."""
        corrections = corrections_of(run.ratios_over_time) if is_corrected else None
        return simulate(
            self._model, self._layout, run.requests, slo=SLO, overheads=overheads, corrections=corrections
        ).times


def corrections_of(
    ratios_over_time: Sequence[tuple[float, StepTimeRatios]],
) -> dict[WorkerRole, list[StepCorrections]]:
    """Steps of a kind that a role never made take as much longer as its others."""
    corrections: dict[WorkerRole, list[StepCorrections]] = {}
    for from_s, ratios in ratios_over_time:
        for role, others in {role: ratio for (role, _), ratio in ratios.items()}.items():
            prefill, decode = (ratios.get((role, kind), others) for kind in ("prefill", "decode"))
            corrections.setdefault(role, []).append(StepCorrections(prefill, decode, from_s))
    return corrections


def valid_of(runs: Iterable[Run]) -> list[Run]:
    """Runs that count."""
    return [run for run in runs if not run.problems]


def foreign_cpu_s(cluster_pid: int) -> float:
    """CPU seconds that this machine has spent so far on all but this process, its children and the cluster."""
    spent = psutil.cpu_times()
    own_s = 0.0
    roots = psutil.Process(), psutil.Process(cluster_pid)
    for process in {*roots, *(child for root in roots for child in root.children(recursive=True))}:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has just ended
        own_s += times.user + times.system
    return float(sum(spent) - spent.idle - spent.iowait) - own_s


def late_between(measured: RequestTimes, simulated: RequestTimes) -> float:
    """Seconds by which steps that follow each other are further apart than simulated, on average."""
    num_gaps = measured.num_output_tokens - 2
    late_s = (measured.last_token_s - measured.second_token_s) - (simulated.last_token_s - simulated.second_token_s)
    # The mean, as corrections are means: where the machine was slow for a moment, the median request has not seen it.
    return float(late_s[num_gaps > 0].sum() / num_gaps[num_gaps > 0].sum())


def served(folder: Path, dtype: str, devices: dict[str, Hardware]) -> tuple[PlannedModel, Layout]:
    """Model and layout for the simulator: prefill has the most cores of a worker, decode the fewest."""
    config = json.loads((folder / "config.json").read_text())
    model = PlannedModel(
        shape=ModelShape.from_hf_config(config),
        name=folder.name,
        precision=Precision(dtype=dtype),
        max_model_len=config["max_position_embeddings"],
    )
    ordered = sorted(devices.values(), key=num_cores)

    def pool(role: WorkerRole, device: Hardware) -> Pool:
        bare = Pool(role=role, replicas=1, hardware=device, max_batch_size=MAX_BATCH_SIZE)
        return replace(bare, num_kv_blocks=KV_BYTES // (bare.cost(model).kv_bytes_per_token * model.block_size))

    return model, Layout(prefill=pool(WorkerRole.PREFILL, ordered[-1]), decode=pool(WorkerRole.DECODE, ordered[0]))


def num_cores(device: Hardware) -> int:
    """Cores of a device that `pdserve profile` has named."""
    return int(device.name.removeprefix("cpu-"))


def write_profile(folder: Path, dtype: str, budget_s: float, file: Path) -> None:
    """`pdserve profile` as a user would run it.

    Raises:
        RuntimeError: it failed.
    """
    command = [str(Path(sys.executable).with_name("pdserve")), "profile", "--model", str(folder), "--dtype", dtype]
    done = subprocess.run([*command, "--budget", str(budget_s), "--output", str(file)], stdout=sys.stderr, check=False)
    if done.returncode:
        raise RuntimeError(f"`pdserve profile` ended with {done.returncode}")


def deployment(folder: Path, dtype: str, profile: Path) -> dict[str, Any]:
    phase = {"lend_cores": False, "kv_memory": f"{KV_BYTES}B", "max_batch_size": MAX_BATCH_SIZE}
    return {
        "model": {"path": str(folder), "dtype": dtype, "profile": str(profile)},
        "slo": {"ttft_seconds": SLO.ttft_seconds, "tpot_seconds": SLO.tpot_seconds},
        "prefill": phase,
        "decode": {**phase, "swap_memory": 0},
    }


@contextmanager
def confined_to(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and what it starts, runs on ``cores``."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def compare(arguments: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All loads on one cluster, and figures that belong to all of them."""
    *cluster_cores, own_core = sorted(os.sched_getaffinity(0))
    if len(cluster_cores) < MIN_CLUSTER_CORES:
        raise SystemExit(f"this takes {MIN_CLUSTER_CORES + 1} cores: one of each worker, the router and the generator")
    with TemporaryDirectory() as work, awake_cores(), confined_to(cluster_cores):
        folder = Path(work) / SHAPE
        write_random_checkpoint(folder, **SHAPES[SHAPE])
        profile = arguments.profile.resolve() if arguments.profile else Path(work) / "hardware.yaml"
        if not profile.exists():
            write_profile(folder, arguments.dtype, arguments.budget, profile)
        devices = read_hardware_file(profile)
        model, layout = served(folder, arguments.dtype, devices)
        with running_cluster(deployment(folder, arguments.dtype, profile)) as cluster, confined_to([own_core]):
            comparison = Comparison(cluster, model, layout)
            saturation_rate = found_saturation(comparison, arguments.seed)
            probes, runs = measure_in_turn(comparison, saturation_rate, arguments, console)
            overheads = comparison.overheads(valid_of(probes) or probes)
            results = [
                comparison.result(share, of_share, overheads, num_wanted=arguments.rounds)
                for share, of_share in runs.items()
            ]
    for result in results:
        console.print(_line(result), highlight=False)
    return results, {
        "first_saturation_rate": round(saturation_rate, 3),
        "overheads_s": {name: round(value, 6) for name, value in asdict(overheads).items()},
        "profile_errors": {name: dict(device.measured.errors) for name, device in devices.items() if device.measured},
    }


def found_saturation(comparison: Comparison, seed: int) -> float:
    """Requests per second, at the speed that the cores have now."""
    rate = comparison.saturation({})
    for each in (seed, seed + 1):  # code and caches are warm after the first
        rate = comparison.saturation(comparison.measure(PROBE_SHARE * rate, NUM_PROBES, each).ratios)
    return rate


def measure_in_turn(
    comparison: Comparison, saturation_rate: float, arguments: argparse.Namespace, console: Console
) -> tuple[list[Run], dict[float, list[Run]]]:
    """Probes, and the runs of each share of saturation, which the probe before each run tells anew.

    Args:
        saturation_rate: as of now.
    """
    seeds = count(arguments.seed + 2)
    probes: list[Run] = []
    runs: dict[float, list[Run]] = {share: [] for share in map(float, arguments.loads.split(","))}
    for number in range(2 * arguments.rounds):
        for share, of_share in runs.items():
            if len(valid_of(of_share)) == arguments.rounds:
                continue
            probes.append(probe := comparison.measure(PROBE_SHARE * saturation_rate, NUM_PROBES, next(seeds)))
            saturation_rate = comparison.saturation(probe.ratios)
            run = comparison.measure(share * saturation_rate, arguments.requests, next(seeds))
            of_share.append(run)
            ratios = ", ".join(f"{steps} x {ratio:.2f}" for steps, ratio in _named(run.ratios).items())
            said = f"round {number + 1}, {share:.2f} of saturation, {run.rate:.1f}/s: {ratios}"
            console.print("; ".join((said, *run.problems)), highlight=False)
    return probes, runs


def _named(ratios: StepTimeRatios) -> dict[str, float]:
    return {f"{role.value} worker's {kind} steps": round(ratio, 3) for (role, kind), ratio in ratios.items()}


def _line(result: dict[str, Any]) -> str:
    agreement = result["agreement"]
    parts = [
        f"{name.removesuffix('_s')} {1e3 * agreement['measured'][name]:.1f} ms measured, "
        f"{1e3 * agreement['simulated'][name]:.1f} simulated ({error:+.1%})"
        for name, error in agreement["relative_errors"].items()
    ]
    profiled = ", ".join(f"{error:+.0%}" for error in result["as_profiled"]["relative_errors"].values())
    problems = "".join(f"\n  [red]{problem}[/]" for problem in (*result["failures"], *result["invalid"]))
    return (
        f"{result['share_of_saturation']:.2f} of saturation, {result['rate']:.1f}/s: {'; '.join(parts)}; "
        f"uncorrected {profiled}{problems}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--profile", type=Path, help="hardware file; measured first, and kept here, if it is not there")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of the profile")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=60, help="at each load, in each round")
    parser.add_argument("--loads", default="0.3,0.5,0.7", help="shares of the rate at saturation")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    results, figures = compare(given, Console(stderr=True))
    failures = [line for result in results for line in (*result["failures"], *result["invalid"])]
    document = {
        "shape": SHAPE,
        "dtype": given.dtype,
        "rounds": given.rounds,
        "requests": given.requests,
        "seed": given.seed,
        **figures,
        "loads": results,
        "agrees": not failures,
    }
    publish(document, given.json)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
