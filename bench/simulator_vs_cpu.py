"""Does the simulator say what a real model does? Profiles this machine, serves a small model, and simulates the same.

    python -m pdserve.bench.simulator_vs_cpu [--profile FILE] [--budget 240] [--requests 400]
                                             [--loads 0.3,0.5,0.7] [--json FILE]

`pdserve profile` measures the cores that a prefill and a decode worker get by default, and writes a hardware file,
which `--profile` takes up again. A cluster of one of each then serves the tiny shape of `pdserve.bench.shapes`, and an
open loop sends Poisson arrivals at three shares of the simulated saturation. `pdserve.planner.simulator` gets the same
requests and the hardware file. p50 and p90 of TTFT and TPOT must agree within 10 %.

Workers keep their cores to themselves (`lend_cores: false`): what a step takes must not depend on what the other worker
does, of which neither profile nor simulator know. The generator runs on the cores of no worker. What HTTP, gRPC and the
step loops take is measured once, at a light load, and is the simulator's `Overheads`. A load during which other
programs used more than a tenth of the machine does not count.

The speed of shared cores changes from one minute to the next, which no profile can know. So the simulator is given what
the router has, too: by how much steps took longer than predicted, as the workers saw it during the load. What it says
without that correction is kept beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from pdserve.bench.agreement import Agreement, ComparedLoad, Figures, Limits
from pdserve.bench.calibration import overheads_between, saturation
from pdserve.bench.cluster import RunningCluster, running_cluster
from pdserve.bench.load import Measurement, measure_load
from pdserve.bench.shapes import SHAPES
from pdserve.bench.step_times import StepTimeRatios, watched_step_times
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.model.cost import CostModel
from pdserve.model.hardware import Hardware
from pdserve.model.random_checkpoint import write_random_checkpoint
from pdserve.model.shape import ModelShape
from pdserve.model.slowed_hardware import slowed
from pdserve.planner.conversations import Conversations
from pdserve.planner.hardware_file import read_hardware_file
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.lengths import LogNormalLengths
from pdserve.planner.requests import SimulatedRequest
from pdserve.planner.simulation import RequestTimes
from pdserve.planner.simulator import NO_OVERHEADS, simulate
from pdserve.planner.workload import Workload

LIMITS = Limits(relative=0.1)
SLO = SloConfig(ttft_seconds=0.5, tpot_seconds=0.05)
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
MAX_FOREIGN_SHARE = 0.1
"""Of all cores together, by programs other than the cluster and the generator."""
PROBE_SHARE = 0.15
"""Of saturation: so few requests meet that what each lacks is its own, and so many that cores and caches stay awake,
as they do not between requests that find an idle cluster."""
NUM_PROBES = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult(ComparedLoad):
    """One load; its agreement is that with step times corrected by `step_time_ratios`."""

    as_profiled: Agreement
    """Without the correction."""
    step_time_ratios: dict[str, float]
    """Of each role, during this load."""
    generator_cpu_share: float
    foreign_cpu_share: float
    """Of all cores together, what was neither the cluster nor the generator."""


class Comparison:
    """A running cluster and its simulation."""

    def __init__(self, cluster: RunningCluster, model: PlannedModel, layout: Layout) -> None:
        self._cluster = cluster
        self._model = model
        self._layout = layout
        self.overheads = NO_OVERHEADS

    def measure_overheads(self, seed: int) -> None:
        """What a request costs beside steps and transfers, at a light load."""
        drawn = WORKLOAD.draw(NUM_PROBES, seed, max_model_len=self._model.max_model_len)
        probes = drawn.at_rate(PROBE_SHARE * self.saturation())
        self._measure(probes)  # code and caches are warm after it
        with watched_step_times(self._cluster.admin_url) as ratios:
            measured = self._measure(probes).times
        turn_s = turn_between(measured, self._simulate(probes, ratios))
        self.overheads = replace(NO_OVERHEADS, turn_s=turn_s)
        self.overheads = replace(overheads_between(measured, self._simulate(probes, ratios)), turn_s=turn_s)

    def saturation(self) -> float:
        return saturation(self._model, self._layout, WORKLOAD, SLO, self.overheads)

    def at_rate(self, rate: float, share: float, requests: list[SimulatedRequest]) -> LoadResult:
        """Measure and simulate ``requests``, which arrive at ``rate``."""
        before_s, began_s = foreign_cpu_s(self._cluster.pid), time.monotonic()
        with watched_step_times(self._cluster.admin_url) as ratios:
            measured = self._measure(requests)
        foreign_s = foreign_cpu_s(self._cluster.pid) - before_s
        foreign_share = max(0.0, foreign_s) / (time.monotonic() - began_s) / (os.cpu_count() or 1)
        corrected, as_profiled = (
            Agreement(
                measured=Figures.of(measured.times, SLO), simulated=Figures.of(self._simulate(requests, each), SLO)
            )
            for each in (ratios, {})
        )
        invalid = measured.health.problems()
        if measured.errors:
            invalid.append(f"{measured.errors.total()} requests failed: {next(iter(measured.errors))}")
        if foreign_share > MAX_FOREIGN_SHARE:
            invalid.append(f"other programs used {foreign_share:.0%} of the machine: run it alone")
        return LoadResult(
            rate=rate,
            share_of_saturation=share,
            agreement=corrected,
            as_profiled=as_profiled,
            step_time_ratios={role.value: round(ratio, 3) for role, ratio in ratios.items()},
            generator_cpu_share=measured.health.cpu_share,
            foreign_cpu_share=round(foreign_share, 3),
            failures=corrected.failures(replace(LIMITS, attainment_points=100.0)),
            invalid=invalid,
        )

    def _measure(self, requests: list[SimulatedRequest]) -> Measurement:
        return measure_load(self._cluster.url, requests, vocab_size=self._model.shape.vocab_size, temperature=1.0)

    def _simulate(self, requests: list[SimulatedRequest], ratios: StepTimeRatios) -> RequestTimes:
        def cost_of(pool: Pool) -> CostModel:
            return replace(pool, hardware=slowed(pool.hardware, ratios.get(pool.role, 1.0))).cost(self._model)

        return simulate(self._model, self._layout, requests, slo=SLO, overheads=self.overheads, cost_of=cost_of).times


def foreign_cpu_s(cluster_pid: int) -> float:
    """CPU seconds that this machine has spent so far on all but this process and the cluster."""
    spent = psutil.cpu_times()
    own_s = 0.0
    cluster = psutil.Process(cluster_pid)
    for process in {psutil.Process(), cluster, *cluster.children(recursive=True)}:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has just ended
        own_s += times.user + times.system
    return float(sum(spent) - spent.idle - spent.iowait) - own_s


def turn_between(measured: RequestTimes, simulated: RequestTimes) -> float:
    """Seconds by which steps that follow each other are further apart than simulated without overheads."""
    num_gaps = measured.num_output_tokens - 2
    late_s = (measured.last_token_s - measured.second_token_s) - (simulated.last_token_s - simulated.second_token_s)
    return max(0.0, float(np.median(late_s[num_gaps > 0] / num_gaps[num_gaps > 0])))


def served(folder: Path, dtype: str, devices: dict[str, Hardware]) -> tuple[PlannedModel, Layout]:
    """What the simulator is told of the cluster: prefill has the most cores of a worker, decode the fewest."""
    config = json.loads((folder / "config.json").read_text())
    model = PlannedModel(
        shape=ModelShape.from_hf_config(config),
        name=folder.name,
        dtype=dtype,
        max_model_len=config["max_position_embeddings"],
    )
    ordered = sorted(devices.values(), key=num_cores)

    def pool(role: WorkerRole, device: Hardware) -> Pool:
        bare = Pool(role=role, replicas=1, hardware=device, max_batch_size=MAX_BATCH_SIZE)
        return replace(bare, num_kv_blocks=KV_BYTES // (bare.cost(model).kv_bytes_per_token * model.block_size))

    return model, Layout(prefill=pool(WorkerRole.PREFILL, ordered[-1]), decode=pool(WorkerRole.DECODE, ordered[0]))


def num_cores(device: Hardware) -> int:
    """Of a device that `pdserve profile` has named."""
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
def beside_workers(layout: Layout) -> Iterator[None]:
    """This process runs on the cores of no worker, where there are any."""
    usable = os.sched_getaffinity(0)
    num_taken = sum(num_cores(pool.hardware) for pool in layout.pools)
    os.sched_setaffinity(0, set(sorted(usable)[num_taken:]) or usable)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def compare(arguments: argparse.Namespace, console: Console) -> tuple[list[LoadResult], dict[str, Any]]:
    """All loads on one cluster, and figures that belong to all of them."""
    with TemporaryDirectory() as work:
        folder = Path(work) / "tiny"
        write_random_checkpoint(folder, **SHAPES["tiny"])
        profile = arguments.profile.resolve() if arguments.profile else Path(work) / "hardware.yaml"
        if not profile.exists():
            write_profile(folder, arguments.dtype, arguments.budget, profile)
        devices = read_hardware_file(profile)
        model, layout = served(folder, arguments.dtype, devices)
        with running_cluster(deployment(folder, arguments.dtype, profile)) as cluster, beside_workers(layout):
            comparison = Comparison(cluster, model, layout)
            comparison.measure_overheads(arguments.seed + 1)
            overheads_s = asdict(comparison.overheads)
            console.print("overheads, ms:", {name: round(value * 1e3, 3) for name, value in overheads_s.items()})
            saturation_rate = comparison.saturation()
            sample = WORKLOAD.draw(arguments.requests, arguments.seed, max_model_len=model.max_model_len)
            results = []
            for share in map(float, arguments.loads.split(",")):
                rate = share * saturation_rate
                results.append(comparison.at_rate(rate, share, sample.at_rate(rate)))
                console.print(_line(results[-1]), highlight=False)
    return results, {
        "saturation_rate": round(saturation_rate, 3),
        "overheads_s": {name: round(value, 6) for name, value in overheads_s.items()},
        "profile_errors": {name: dict(device.measured.errors) for name, device in devices.items() if device.measured},
    }


def _line(result: LoadResult) -> str:
    agreement = result.agreement
    parts = [
        f"{name.removesuffix('_s')} {getattr(agreement.measured, name) * 1e3:.1f} ms measured, "
        f"{getattr(agreement.simulated, name) * 1e3:.1f} simulated ({error:+.1%})"
        for name, error in agreement.relative_errors.items()
    ]
    profiled = ", ".join(f"{error:+.0%}" for error in result.as_profiled.relative_errors.values())
    problems = "".join(f"\n  [red]{problem}[/]" for problem in (*result.failures, *result.invalid))
    return (
        f"{result.share_of_saturation:.2f} of saturation, {result.rate:.1f}/s: {'; '.join(parts)}; "
        f"uncorrected {profiled}; step times {result.step_time_ratios}{problems}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="hardware file; measured first, and kept here, if it is not there")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds of the profile")
    parser.add_argument("--requests", type=int, default=400, help="at each load")
    parser.add_argument("--loads", default="0.3,0.5,0.7", help="shares of the rate at saturation")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args(arguments)
    results, figures = compare(given, Console(stderr=True))
    failures = [line for result in results for line in (*result.failures, *result.invalid)]
    document = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "shape": "tiny",
        "dtype": given.dtype,
        "requests": given.requests,
        "seed": given.seed,
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))},
        **figures,
        "loads": [
            {**asdict(result), "agreement": result.agreement.as_dict(), "as_profiled": result.as_profiled.as_dict()}
            for result in results
        ],
        "agrees": not failures,
    }
    text = json.dumps(document, indent=1)
    if given.json:
        given.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
