from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import Hardware
from pdserve.planner.arrays import FloatArray
from pdserve.planner.layout import Layout
from pdserve.planner.search.demand import Demand
from pdserve.planner.search.estimates import Estimator, Resource, even_pulls_per_s, fits, mean_wait_s
from pdserve.planner.search.goodput import Runner, Trial
from pdserve.planner.simulate.simulator import NO_OVERHEADS, simulate
from pdserve.planner.workload.requests import Segment, SimulatedRequest
from tests.planner.stand_ins import (
    H100,
    LLAMA_3_8B,
    SLO,
    PoissonWorkload,
    a_pool,
    colocated,
    disaggregated,
)


def a_demand(workload: PoissonWorkload, num_requests: int = 400) -> Demand:
    requests = workload.draw(num_requests, 0).at_rate(1.0)
    return Demand.of(requests, block_size=16, max_model_len=LLAMA_3_8B.max_model_len)


def estimator_of(workload: PoissonWorkload, slo: SloConfig = SLO) -> Estimator:
    return Estimator(LLAMA_3_8B, a_demand(workload), slo)


SLOW_LINK = replace(H100, network_bandwidth=5e8)


def far_apart(prefill: Hardware, decode: Hardware, num_decode: int = 1) -> Layout:
    return Layout(
        prefill=replace(a_pool(WorkerRole.PREFILL), hardware=prefill),
        decode=replace(a_pool(WorkerRole.DECODE, num_decode), hardware=decode),
        hosts=(((0,),), ((1,),) * num_decode),
    )


def half_apart(device: Hardware) -> Layout:
    """Two pairs, of which one has to pull over the network."""
    layout = disaggregated(2, 2)
    prefill, decode = (replace(pool, hardware=device) for pool in layout.pools)
    return Layout(prefill=prefill, decode=decode, hosts=(((0,), (1,)), ((0,), (0,))))


@dataclass(frozen=True)
class Case:
    layout: Layout
    workload: PoissonWorkload
    slo: SloConfig = SLO


PATIENT = SloConfig(ttft_seconds=1.0, tpot_seconds=0.05)
SLOW = replace(H100, network_bandwidth=5e9)
TIGHT = SloConfig(ttft_seconds=0.2, tpot_seconds=0.01)
FEW_BLOCKS = replace(a_pool(WorkerRole.DECODE), num_kv_blocks=600)
WORDY = PoissonWorkload(1500, 120)
CASES = [
    Case(disaggregated(1, 1), PoissonWorkload()),
    Case(disaggregated(2, 1), WORDY),
    Case(disaggregated(1, 2), PoissonWorkload(1500, 30, 0.8), TIGHT),
    Case(colocated(1), WORDY),
    Case(colocated(2), PoissonWorkload(1500, 30, 0.8), TIGHT),
    Case(Layout(mixed=replace(a_pool(WorkerRole.MIXED), max_batch_tokens=512)), PoissonWorkload()),
    Case(Layout(prefill=a_pool(WorkerRole.PREFILL), decode=FEW_BLOCKS), PoissonWorkload()),
    Case(
        Layout(prefill=a_pool(WorkerRole.PREFILL, 1, 2), decode=a_pool(WorkerRole.DECODE, 1, 1, 2)), PoissonWorkload()
    ),
    Case(far_apart(SLOW, SLOW), PoissonWorkload(1500, 30), PATIENT),
    Case(half_apart(SLOW), PoissonWorkload(1500, 30), PATIENT),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}-{case.workload.prompt_tokens}")
def test_the_estimate_is_near_what_simulations_show(case: Case) -> None:
    estimate = estimator_of(case.workload, case.slo).estimate(case.layout)
    trial = Trial(model=LLAMA_3_8B, layout=case.layout, slo=case.slo, num_requests=500, policy="least-time")
    slow, fast = (Runner(case.workload).attainment(trial, factor * estimate.rate) for factor in (1 / 3, 3.0))
    assert slow.meets(case.slo.attainment)
    assert not fast.meets(case.slo.attainment)


@pytest.mark.parametrize("ttft_s", [0.08, 0.1, 0.15, 0.3])
@pytest.mark.parametrize("num_workers", [2, 4])
def test_the_estimate_of_colocated_workers_knows_of_prompts_that_wait(ttft_s: float, num_workers: int) -> None:
    """An idle worker computes nine of ten of these prompts within 0.06 s."""
    workload, slo = PoissonWorkload(1500, 60), SloConfig(ttft_seconds=ttft_s, tpot_seconds=0.05, attainment=0.9)
    layout = colocated(num_workers)
    estimate = estimator_of(workload, slo).estimate(layout)
    trial = Trial(model=LLAMA_3_8B, layout=layout, slo=slo, num_requests=5000)
    runner = Runner(workload)
    # The curve of attainment is flat where the objective is tight.
    assert runner.scouted(trial, estimate.rate / 1.25).share >= 0.87
    assert runner.scouted(trial, estimate.rate * 1.25).share <= 0.9


def test_waiting_times_are_those_of_one_server_with_constant_service() -> None:
    """M/D/1: prompts of one length on a worker that takes one after the other."""
    prefill = replace(a_pool(WorkerRole.PREFILL), max_batch_tokens=2000)
    layout = Layout(prefill=prefill, decode=a_pool(WorkerRole.DECODE))
    service_s = prefill.cost(LLAMA_3_8B).prefill_s(2000)
    # An objective for TPOT that no step meets keeps prompts off the decode worker.
    slo = SloConfig(ttft_seconds=1000.0, tpot_seconds=1e-9)
    requests = PoissonWorkload(2000, 1, 0.0).draw(500, 0).at_rate(0.8 / service_s)
    times = simulate(LLAMA_3_8B, layout, requests, slo=slo, overheads=NO_OVERHEADS).times
    expected_s = times.arrived_s + lindley_waits_s(times.arrived_s, service_s) + service_s
    np.testing.assert_allclose(np.sort(times.first_token_s), expected_s, atol=1e-9)


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_the_formula_for_waiting_is_what_a_queue_of_its_kind_does(utilisation: float) -> None:
    arrived_s = np.cumsum(np.random.default_rng(0).exponential(1 / utilisation, 200_000))
    mean_s = float(np.mean(lindley_waits_s(arrived_s, 1.0)))
    assert mean_wait_s(utilisation, np.array([1.0])) == pytest.approx(mean_s, rel=0.03)
    assert mean_wait_s(1.01, np.array([1.0])) == float("inf")


def lindley_waits_s(arrived_s: FloatArray, service_s: float) -> list[float]:
    """Waits before one server, from Lindley's recursion."""
    waits_s = [0.0]
    for gap_s in np.diff(arrived_s).tolist():
        waits_s.append(max(0.0, waits_s[-1] + service_s - gap_s))
    return waits_s


def test_sequences_that_decode_follow_littles_law() -> None:
    workload = PoissonWorkload(300, 100)
    requests = workload.draw(1500, 0).at_rate(30.0)
    simulation = simulate(LLAMA_3_8B, disaggregated(), requests, slo=SLO, overheads=NO_OVERHEADS)
    times = simulation.times
    (decode,) = [worker for worker in simulation.workers if worker.role is WorkerRole.DECODE]
    rate = len(requests) / simulation.ended_s
    residence_s = float((times.last_token_s - times.first_token_s).mean())
    batch = decode.num_decode_tokens / decode.num_steps * decode.busy_s / simulation.ended_s
    assert batch == pytest.approx(rate * residence_s, rel=0.03)


def test_what_binds_is_named() -> None:
    def resource(workload: PoissonWorkload, layout: Layout, slo: SloConfig = SLO) -> Resource:
        return estimator_of(workload, slo).estimate(layout).resource

    assert resource(PoissonWorkload(4000, 5), disaggregated(1, 3)) is Resource.PREFILL_COMPUTE
    assert resource(PoissonWorkload(500, 400), disaggregated(), TIGHT) is Resource.DECODE_BANDWIDTH
    patient = SloConfig(ttft_seconds=5.0, tpot_seconds=1.0)
    few_blocks = Layout(prefill=a_pool(WorkerRole.PREFILL), decode=FEW_BLOCKS)
    assert resource(PoissonWorkload(500, 400), few_blocks, patient) is Resource.KV_MEMORY
    small_batch = Layout(
        prefill=a_pool(WorkerRole.PREFILL), decode=replace(a_pool(WorkerRole.DECODE), max_batch_size=4)
    )
    assert resource(PoissonWorkload(100, 400), small_batch, patient) is Resource.BATCH_LIMIT
    far = far_apart(SLOW_LINK, SLOW_LINK, num_decode=3)
    assert resource(PoissonWorkload(4000, 5), far, TIGHT) is Resource.LINK


@pytest.mark.parametrize("hardware", [(SLOW_LINK, H100), (H100, SLOW_LINK)])
def test_a_link_is_as_fast_as_its_slower_end(hardware: tuple[Hardware, Hardware]) -> None:
    estimate = estimator_of(PoissonWorkload(4000, 5), TIGHT).estimate(far_apart(*hardware, num_decode=3))
    assert estimate.resource is Resource.LINK


def test_what_a_prefix_cache_holds_need_not_cross_the_link() -> None:
    # Fast enough for what is new of each prompt, too slow for the whole.
    medium = replace(H100, network_bandwidth=2e10)
    system = Segment(0, 3600)
    requests = [SimulatedRequest(float(n), 4000, 5, (system, Segment(n + 1, 400))) for n in range(100)]
    demand = Demand.of(requests, block_size=16, max_model_len=8192)
    estimator = Estimator(LLAMA_3_8B, demand, TIGHT)
    assert estimator.estimate(far_apart(medium, medium)).rate == estimator.estimate(far_apart(H100, H100)).rate


def test_answers_of_one_token_have_no_tpot_to_miss() -> None:
    hasty = SloConfig(ttft_seconds=1.0, tpot_seconds=0.001)
    workload = PoissonWorkload(2000, 1, 0.0)
    estimate = estimator_of(workload, hasty).estimate(colocated())
    patient = estimator_of(workload, replace(hasty, tpot_seconds=10.0)).estimate(colocated())
    assert estimate.is_feasible
    assert estimate.rate == patient.rate
    # Enough longer ones to miss the target, and no rate meets it.
    requests = [SimulatedRequest(float(n), 2000, 1 if n % 5 else 20) for n in range(100)]
    demand = Demand.of(requests, block_size=16, max_model_len=8192)
    assert demand.one_token_share == 0.8
    assert not Estimator(LLAMA_3_8B, demand, hasty).estimate(colocated()).is_feasible
    lenient = replace(hasty, attainment=0.75)
    assert Estimator(LLAMA_3_8B, demand, lenient).estimate(colocated()).is_feasible


def test_objectives_out_of_reach_are_told() -> None:
    workload = PoissonWorkload()
    assert estimator_of(workload).estimate(disaggregated()).is_feasible
    for slo in (SloConfig(ttft_seconds=0.005, tpot_seconds=1.0), SloConfig(ttft_seconds=5.0, tpot_seconds=0.001)):
        assert not estimator_of(workload, slo).estimate(disaggregated()).is_feasible


def test_a_worker_must_hold_one_sequence_of_full_length() -> None:
    pool = a_pool(WorkerRole.DECODE)
    assert fits(pool, LLAMA_3_8B)
    assert fits(replace(pool, num_kv_blocks=513), LLAMA_3_8B)
    assert not fits(replace(pool, num_kv_blocks=512), LLAMA_3_8B)
    # Each lane of a pipeline has its part of the blocks.
    assert not fits(replace(pool, num_kv_blocks=1025, pipeline_parallel=2), LLAMA_3_8B)


def test_demand_counts_what_a_cache_would_hold_once() -> None:
    system = Segment(7, 160)
    turn = SimulatedRequest(5.0, 300, 10, (Segment(3, 80),))
    requests = [
        SimulatedRequest(0.0, 200, 20, (system, Segment(1, 40)), turn),
        SimulatedRequest(1.0, 200, 20, (system, Segment(2, 40))),
        SimulatedRequest(2.0, 100, 30),
    ]
    demand = Demand.of(requests, block_size=16, max_model_len=8192)
    assert demand.num_cached_tokens.tolist() == [0, 208, 160, 0]
    assert demand.num_new_tokens.tolist() == [200, 92, 40, 100]
    assert demand.mean_gaps == (19 + 9 + 19 + 29) / 4
    assert demand.mean_decode_context == pytest.approx(
        (19 * 209.5 + 9 * 304.5 + 19 * 209.5 + 29 * 114.5) / (19 + 9 + 19 + 29)
    )


def test_requests_that_are_too_long_count_as_missed() -> None:
    requests = [SimulatedRequest(float(n), 9000 if n % 5 == 0 else 100, 20) for n in range(20)]
    demand = Demand.of(requests, block_size=16, max_model_len=8192)
    assert demand.served_share == 0.8
    assert not Estimator(LLAMA_3_8B, demand, SLO).estimate(disaggregated()).is_feasible
    with pytest.raises(ValueError, match="longer than max_model_len 100: raise it"):
        Demand.of(requests, block_size=16, max_model_len=100)


def on_hosts(prefill: tuple[int, ...], decode: tuple[int, ...]) -> Layout:
    hosts = tuple(tuple((host,) for host in pool) for pool in (prefill, decode))
    return replace(disaggregated(len(prefill), len(decode)), hosts=hosts)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ((0, 0), (0, 0), 2.0),
        ((0, 0, 0), (0,), 1.0),
        ((0, 0), (1, 2), 0.5),
        # Each pair may stay within its host; of all four pairs of workers, two do.
        ((0, 1), (1, 0), 2 / 2.5),
        # One of the two has to go far.
        ((0, 1), (0, 0), 2 / 2.5),
        ((0, 1, 1), (0, 0, 2), 3 / (2 / 9 + 4 * 7 / 9)),
        # The one decode worker need not take from the others.
        ((0, 1, 2), (0,), 1 / 3),
    ],
)
def test_links_carry_near_pulls_in_1_s_and_far_ones_in_4_s(
    prefill: tuple[int, ...], decode: tuple[int, ...], expected: float
) -> None:
    layout = on_hosts(prefill, decode)
    assert even_pulls_per_s(layout, near_s=1.0, far_s=4.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("one", "other", "expected"), [((0, 1), (0, 1), 1.0), ((0, 1), (1, 0), 0.25), ((0,), (1,), 0.25)]
)
def test_micro_batches_share_a_link_and_pipelines_over_the_same_hosts_meet_stage_by_stage(
    one: tuple[int, ...], other: tuple[int, ...], expected: float
) -> None:
    prefill, decode = (a_pool(role, 1, 1, 4) for role in (WorkerRole.PREFILL, WorkerRole.DECODE))
    layout = Layout(prefill=prefill, decode=decode, hosts=((one,), (other,)))
    assert even_pulls_per_s(layout, near_s=1.0, far_s=4.0) == expected
