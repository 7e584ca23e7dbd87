"""What is simulated is what is served, and overheads are found where they are known."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from pdserve.bench.calibration import found_turn, saturation
from pdserve.bench.cluster import RunningCluster
from pdserve.bench.simulator_vs_cpu import (
    KV_BYTES,
    SLO,
    WORKLOAD,
    Comparison,
    Run,
    corrections_of,
    deployment,
    foreign_cpu_s,
    found_saturation,
    late_between,
    measure_in_turn,
    served,
)
from pdserve.contracts.placement import WorkerRole
from pdserve.deploy.config import parse_deployment
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel
from pdserve.planner.simulate.simulated_worker import StepCorrections
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import NO_OVERHEADS, simulate
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.router.metrics import STEP_KINDS

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
DEVICES = {f"cpu-{cores}": replace(hardware("cpu", num_cores=cores), name=f"cpu-{cores}") for cores in (2, 1)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlannedModel, Layout]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return served(folder, "float32", DEVICES)


def a_run(cluster: tuple[PlannedModel, Layout], requests: list[SimulatedRequest]) -> Run:
    """As if a cluster had served them as profiled."""
    return Run(
        rate=1.0,
        requests=requests,
        times=simulate(*cluster, requests, slo=SLO, overheads=NO_OVERHEADS).times,
        ratios={},
        ratios_over_time=[],
        generator_cpu_share=0.1,
        foreign_cpu_share=0.0,
        problems=[],
    )


def test_the_deployment_is_the_layout_that_is_simulated(cluster: tuple[PlannedModel, Layout], tmp_path: Path) -> None:
    model, layout = cluster
    config = parse_deployment(json.loads(json.dumps(deployment(tmp_path, "float32", tmp_path / "hardware.yaml"))))
    assert (layout.prefill, layout.decode) != (None, None)
    for pool, phase in zip(layout.pools, (config.prefill, config.decode), strict=True):
        assert not phase.lend_cores
        assert (pool.replicas, pool.hardware.pipeline_depth) == (phase.replicas, 1)
        assert (pool.max_batch_tokens, pool.max_batch_size) == (phase.max_batch_tokens, phase.max_batch_size)
        kv_bytes = pool.num_kv_blocks * pool.cost(model).kv_bytes_per_token * model.block_size
        assert kv_bytes == pytest.approx(KV_BYTES, rel=0.001)
    assert (model.block_size, model.precision.dtype) == (config.model.block_size, config.model.dtype)
    assert (config.slo.ttft_seconds, config.slo.tpot_seconds) == (SLO.ttft_seconds, SLO.tpot_seconds)
    assert [pool.hardware.name for pool in layout.pools] == ["cpu-2", "cpu-1"]


def test_turns_are_found(cluster: tuple[PlannedModel, Layout]) -> None:
    model, layout = cluster
    probes = WORKLOAD.draw(200).at_rate(0.6 * saturation(model, layout, WORKLOAD, SLO))

    def simulated(turn_s: float) -> RequestTimes:
        return simulate(model, layout, probes, slo=SLO, overheads=replace(NO_OVERHEADS, turn_s=turn_s)).times

    slow, bare = simulated(0.002), simulated(0.0)
    assert late_between(slow, bare) > 0.003, "batches are larger where steps are longer"
    assert found_turn(lambda turn_s: late_between(slow, simulated(turn_s))) == pytest.approx(0.002, rel=0.1)
    assert found_turn(lambda turn_s: late_between(bare, simulated(turn_s))) == pytest.approx(0.0, abs=1e-4)


def test_runs_that_were_disturbed_do_not_count(cluster: tuple[PlannedModel, Layout]) -> None:
    comparison = Comparison(RunningCluster("", "", os.getpid(), 0.0), *cluster)
    requests = WORKLOAD.draw(20).at_rate(5.0)

    def run(slowness: float, *problems: str) -> Run:
        """As if a cluster had served them whose steps take so many times as long, which its workers have seen."""
        ratios = dict.fromkeys(itertools.product(WorkerRole, STEP_KINDS), slowness)
        bare = replace(a_run(cluster, requests), ratios=ratios, ratios_over_time=[(0.0, ratios)], problems=[*problems])
        return replace(bare, times=comparison.simulated(bare, NO_OVERHEADS))

    def result(*runs: Run, num_wanted: int = 2) -> dict[str, Any]:
        return comparison.result(0.5, runs, NO_OVERHEADS, num_wanted=num_wanted)

    quiet = result(run(1.0), run(3.0))
    assert (quiet["failures"], quiet["invalid"]) == ([], [])
    assert set(quiet["agreement"]["relative_errors"].values()) == {0.0}
    assert quiet["as_profiled"]["relative_errors"]["tpot_p90_s"] < -0.5
    assert quiet["num_requests"] == 40
    disturbed = result(run(1.0), run(3.0, "the machine was busy"))
    assert disturbed["invalid"] == ["only 1 of 2 runs count: the machine was busy"]
    assert disturbed["num_requests"] == 20
    assert disturbed["as_profiled"]["relative_errors"]["tpot_p90_s"] == 0.0


def test_cores_that_become_slower_are_simulated_so(cluster: tuple[PlannedModel, Layout]) -> None:
    comparison = Comparison(RunningCluster("", "", os.getpid(), 0.0), *cluster)
    steps = list(itertools.product(WorkerRole, STEP_KINDS))
    requests = WORKLOAD.draw(40).at_rate(4.0)
    changing = [(0.0, dict.fromkeys(steps, 1.0)), (5.0, dict.fromkeys(steps, 3.0))]
    run = replace(a_run(cluster, requests), ratios=dict.fromkeys(steps, 2.0), ratios_over_time=changing)
    as_profiled, corrected = (comparison.simulated(run, NO_OVERHEADS, is_corrected=each) for each in (False, True))
    slower = corrected.tpot_s / as_profiled.tpot_s
    is_early, is_late = as_profiled.last_token_s < 5.0, as_profiled.arrived_s > 5.0
    assert slower[is_early] == pytest.approx(1.0)
    assert (slower[is_late] > 2.5).all()
    assert is_early.any()
    assert is_late.any()


def test_steps_of_a_kind_that_were_never_made_are_as_slow_as_the_others() -> None:
    prefilling, decoding = (WorkerRole.PREFILL, "prefill"), (WorkerRole.DECODE, "decode")
    both = (WorkerRole.DECODE, "prefill")
    assert corrections_of(
        [(0.0, {prefilling: 2.0, decoding: 3.0}), (1.0, {prefilling: 1.5, both: 4.0, decoding: 5.0})]
    ) == {
        WorkerRole.PREFILL: [StepCorrections(2.0, 2.0, 0.0), StepCorrections(1.5, 1.5, 1.0)],
        WorkerRole.DECODE: [StepCorrections(3.0, 3.0, 0.0), StepCorrections(4.0, 5.0, 1.0)],
    }


def test_loads_below_saturation_are_kept_up_with(cluster: tuple[PlannedModel, Layout]) -> None:
    model, layout = cluster
    rate = saturation(model, layout, WORKLOAD, SLO)
    times = simulate(model, layout, WORKLOAD.draw(300).at_rate(0.7 * rate), slo=SLO).times
    residence_s = times.last_token_s - times.arrived_s
    assert np.median(residence_s[-50:]) < 3 * np.median(residence_s[:100])


def test_what_others_compute_is_told_from_what_is_ours() -> None:
    before_s, began_s = foreign_cpu_s(os.getpid()), time.monotonic()
    own_before_s = time.process_time()
    while time.process_time() - own_before_s < 0.3:
        pass
    ours_s = time.process_time() - own_before_s
    foreign_s = foreign_cpu_s(os.getpid()) - before_s
    all_cores_s = (os.cpu_count() or 1) * (time.monotonic() - began_s)
    assert -0.2 < foreign_s < all_cores_s - ours_s + 0.2


def test_what_children_compute_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = psutil.cpu_times()
    monkeypatch.setattr(psutil, "cpu_times", lambda: spent)  # as if the whole machine had stood still meanwhile
    before_s, own_before_s = foreign_cpu_s(os.getpid()), time.process_time()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            watched = psutil.Process(child.pid)
            while watched.cpu_times().user < 0.5:
                time.sleep(0.01)
            after_s = foreign_cpu_s(os.getpid())
            ours_s = time.process_time() - own_before_s + sum(watched.cpu_times()[:2])
        finally:
            child.kill()
    assert before_s - after_s == pytest.approx(ours_s, abs=0.2)


def test_saturation_is_told_at_the_speed_of_the_cores(cluster: tuple[PlannedModel, Layout]) -> None:
    """The second of two runs tells it, with requests that the first did not have."""

    rates, seeds = [], []

    class Measured(Comparison):
        def measure(self, rate: float, num_requests: int, seed: int) -> Run:
            rates.append(rate)
            seeds.append(seed)
            ratio = 3.0 if len(seeds) == 1 else 2.0
            return replace(measured, ratios=dict.fromkeys(itertools.product(WorkerRole, STEP_KINDS), ratio))

    measured = a_run(cluster, WORKLOAD.draw(5).at_rate(1.0))
    comparison = Measured(RunningCluster("", "", os.getpid(), 0.0), *cluster)
    as_profiled = comparison.saturation({})
    assert found_saturation(comparison, 7) == pytest.approx(as_profiled / 2, rel=0.02)
    assert seeds == [7, 8]
    assert rates == pytest.approx([0.4 * as_profiled, 0.4 * as_profiled / 3], rel=0.02)


def test_loads_are_shares_of_what_the_cores_can_do_just_before(cluster: tuple[PlannedModel, Layout]) -> None:
    rates = []

    class Measured(Comparison):
        def measure(self, rate: float, num_requests: int, seed: int) -> Run:
            rates.append(rate)
            ratio = {1: 2.0, 3: 4.0}.get(len(rates), 9.0)  # of the two probes; what runs tell is not asked
            return replace(measured, rate=rate, ratios=dict.fromkeys(itertools.product(WorkerRole, STEP_KINDS), ratio))

    measured = a_run(cluster, WORKLOAD.draw(5).at_rate(1.0))
    comparison = Measured(RunningCluster("", "", os.getpid(), 0.0), *cluster)
    as_profiled = comparison.saturation({})
    arguments = Namespace(seed=0, rounds=1, requests=5, loads="0.3,0.7")
    probes, runs = measure_in_turn(comparison, as_profiled, arguments, Console(quiet=True))
    expected = [0.4, 0.3 / 2, 0.4 / 2, 0.7 / 4]
    assert rates == pytest.approx([share * as_profiled for share in expected], rel=0.02)
    assert [len(probes), len(runs[0.3]), len(runs[0.7])] == [2, 1, 1]
