from __future__ import annotations

import fcntl
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba", reason="the scout needs the planner's extra")

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.arrays import FloatArray
from pdserve.planner.layout import Layout
from pdserve.planner.simulate import scout as scout_module
from pdserve.planner.simulate.scout import ScoutRequests, ScoutResult, scout, step_table
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import NO_OVERHEADS, simulate
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.requests import Segment, SimulatedRequest
from tests.patience import HANG_S
from tests.planner.stand_ins import H100, LLAMA_3_8B, a_pool, colocated, disaggregated

SLO = SloConfig(ttft_seconds=0.25, tpot_seconds=0.02)
ALL_HANDED_OFF = SloConfig(ttft_seconds=0.25, tpot_seconds=1e-4)
"""No decode worker may compute a prompt."""


by_least_time = partial(simulate, policy="least-time")
"""The policy that the scout models."""


def requests_of(name: str, rate: float, num_requests: int, seed: int = 0) -> list[SimulatedRequest]:
    return preset(name).draw(num_requests, seed, max_model_len=8192).at_rate(rate)


def poisson(rate: float, num_requests: int, num_prompt: int, num_output: int) -> ScoutRequests:
    arrived_s = np.cumsum(np.random.default_rng(0).exponential(1 / rate, num_requests))
    return ScoutRequests.of([SimulatedRequest(at_s, num_prompt, num_output) for at_s in arrived_s.tolist()])


def assert_each_ends_once(result: ScoutResult) -> None:
    times = result.times
    is_answered = ~np.isnan(times.last_token_s)
    np.testing.assert_array_equal(is_answered, ~times.is_rejected)
    answered = [column[is_answered] for column in (times.arrived_s, times.started_s, times.first_token_s)]
    assert (answered[0] < answered[1]).all()
    assert (answered[1] <= answered[2]).all()
    assert (answered[2] <= times.last_token_s[is_answered]).all()
    assert result.num_decoded == int((times.num_output_tokens - 1)[is_answered].sum())


def share(times: RequestTimes, slo: SloConfig) -> float:
    met = (times.ttft_s <= slo.ttft_seconds) & (times.tpot_s <= slo.tpot_seconds) & ~times.is_rejected
    return float(met.mean())


def p90(values: FloatArray) -> float:
    return float(np.nanpercentile(values, 90))


@pytest.mark.parametrize(
    ("layout", "name", "rate"),
    [
        (disaggregated(), "chat", 14.0),
        (disaggregated(2, 1), "code", 14.0),
        (disaggregated(2, 3), "summarisation", 12.0),
        (colocated(), "chat", 8.0),
        (colocated(2), "sharegpt-synthetic", 30.0),
        (Layout(mixed=replace(a_pool(WorkerRole.MIXED), pipeline_parallel=2)), "chat", 10.0),
    ],
    ids=str,
)
def test_the_judge_agrees(layout: Layout, name: str, rate: float) -> None:
    requests = requests_of(name, rate, 600)
    ours = scout(LLAMA_3_8B, layout, ScoutRequests.of(requests), slo=SLO).times
    judge = by_least_time(LLAMA_3_8B, layout, requests, slo=SLO).times
    assert share(ours, SLO) == pytest.approx(share(judge, SLO), abs=0.02)
    assert p90(ours.ttft_s) == pytest.approx(p90(judge.ttft_s), rel=0.05)
    assert p90(ours.tpot_s) == pytest.approx(p90(judge.tpot_s), rel=0.05)


@pytest.mark.parametrize("window", [0, 100])
def test_one_request_takes_what_the_judge_says(window: int) -> None:
    model = replace(LLAMA_3_8B, shape=replace(LLAMA_3_8B.shape, windows=(0, window) * 16))
    for num_prompt, num_output in ((2000, 11), (1, 1), (3000, 1), (17, 300)):
        requests = [SimulatedRequest(1.0, num_prompt, num_output)]
        for layout in (disaggregated(), colocated()):
            ours = scout(model, layout, ScoutRequests.of(requests), slo=ALL_HANDED_OFF).times
            judge = by_least_time(model, layout, requests, slo=ALL_HANDED_OFF).times
            assert ours.first_token_s == pytest.approx(judge.first_token_s, rel=1e-5)
            assert ours.last_token_s == pytest.approx(judge.last_token_s, rel=1e-5)


def test_micro_batches_share_their_workers_wire() -> None:
    slow = replace(H100, network_bandwidth=H100.network_bandwidth / 100)
    roles = (WorkerRole.PREFILL, WorkerRole.DECODE)
    prefill, decode = (replace(a_pool(role, 1, 1, 2), hardware=slow) for role in roles)
    layout = Layout(prefill=prefill, decode=decode, hosts=(((0,),), ((1,),)))
    requests = [SimulatedRequest(0.0, 2000, 2) for _ in range(2)]
    ours = scout(LLAMA_3_8B, layout, ScoutRequests.of(requests), slo=ALL_HANDED_OFF).times
    judge = by_least_time(LLAMA_3_8B, layout, requests, slo=ALL_HANDED_OFF).times
    assert ours.last_token_s == pytest.approx(judge.last_token_s, rel=0.01)


def test_prefill_alone_is_an_m_d_1_queue() -> None:
    """Equal prompts that fill a step, of one token of answer: the mean wait is ``load / (2 (1 - load))`` service times
    (Pollaczek and Khinchine)."""
    pool = replace(a_pool(WorkerRole.MIXED), max_batch_tokens=2048, max_batch_size=1)
    service_s = pool.cost(LLAMA_3_8B).prefill_s(2048)
    for load in (0.3, 0.6, 0.8):
        requests = poisson(load / service_s, 100_000, 2048, 1)
        result = scout(LLAMA_3_8B, Layout(mixed=pool), requests, slo=SLO, overheads=NO_OVERHEADS, max_in_flight=4096)
        waited = float((result.times.ttft_s - service_s).mean()) / service_s
        assert waited == pytest.approx(load / (2 * (1 - load)), rel=0.05)


@pytest.mark.parametrize("layout", [disaggregated(), disaggregated(3, 2), colocated(3)], ids=str)
@pytest.mark.parametrize("rate", [2.0, 40.0, 400.0])
def test_every_request_ends_once(layout: Layout, rate: float) -> None:
    result = scout(LLAMA_3_8B, layout, ScoutRequests.of(requests_of("chat", rate, 3000)), slo=SLO)
    assert_each_ends_once(result)


@pytest.mark.parametrize("role", [WorkerRole.DECODE, WorkerRole.MIXED])
def test_sequences_that_outgrow_the_blocks_are_preempted_and_end(role: WorkerRole) -> None:
    pool = replace(a_pool(role), num_kv_blocks=600)
    layout = Layout(mixed=pool) if role is WorkerRole.MIXED else replace(disaggregated(), decode=pool)
    requests = [SimulatedRequest(n / 50, 100 + n % 7, 800) for n in range(200)]
    result = scout(LLAMA_3_8B, layout, ScoutRequests.of(requests), slo=SLO)
    assert result.num_preemptions > 0
    assert_each_ends_once(result)
    judge = by_least_time(LLAMA_3_8B, layout, requests, slo=SLO).times
    assert result.times.last_token_s.max() == pytest.approx(judge.last_token_s.max(), rel=0.05)
    assert p90(result.times.tpot_s) == pytest.approx(p90(judge.tpot_s), rel=0.1)


def test_a_sequence_starts_with_a_block_more_than_its_prompt() -> None:
    """So that a decode worker of 20 blocks that decodes after 145 tokens has no room for a prompt of 159. One that
    decodes after 60 and 60 has, though its steps are longer."""
    layout = replace(disaggregated(), decode=a_pool(WorkerRole.DECODE, 2, num_kv_blocks=20))
    rows = [(0.0, 145, 100), (0.02, 60, 40), (0.04, 60, 40), (0.075, 159, 10)]
    requests = [SimulatedRequest(*row) for row in rows]
    ours = scout(LLAMA_3_8B, layout, ScoutRequests.of(requests), slo=ALL_HANDED_OFF).times
    judge = by_least_time(LLAMA_3_8B, layout, requests, slo=ALL_HANDED_OFF).times
    np.testing.assert_allclose(ours.last_token_s, judge.last_token_s, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("num_stages", "window"), [(1, 0), (1, 500), (2, 0)])
def test_times_are_the_judges_where_blocks_are_short(num_stages: int, window: int) -> None:
    """One-token answers among them, whose reservations the router cancels."""
    layout = replace(disaggregated(), decode=a_pool(WorkerRole.DECODE, 1, 1, num_stages, 600 * num_stages))
    requests = requests_of("sharegpt-synthetic", 10.0 * num_stages, 400)
    model = replace(LLAMA_3_8B, shape=replace(LLAMA_3_8B.shape, windows=(0, window) * 16))
    ours = scout(model, layout, ScoutRequests.of(requests), slo=SLO).times
    judge = by_least_time(model, layout, requests, slo=SLO).times
    assert (ours.num_output_tokens == 1).any()
    np.testing.assert_allclose(ours.first_token_s, judge.first_token_s, rtol=0, atol=1e-9)
    np.testing.assert_allclose(ours.last_token_s, judge.last_token_s, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", [disaggregated(num_kv_blocks=700), colocated(num_kv_blocks=700)], ids=str)
def test_the_judge_agrees_on_answers_that_end_before_their_limit(layout: Layout) -> None:
    """KV is scarce, so that what is reserved for them counts."""
    requests = [request.limited(4000) for request in requests_of("chat", 14.0, 400)]
    ours = scout(LLAMA_3_8B, layout, ScoutRequests.of(requests), slo=SLO).times
    judge = by_least_time(LLAMA_3_8B, layout, requests, slo=SLO).times
    assert share(ours, SLO) == pytest.approx(share(judge, SLO), abs=0.02)
    assert p90(ours.ttft_s) == pytest.approx(p90(judge.ttft_s), rel=0.05)
    assert p90(ours.tpot_s) == pytest.approx(p90(judge.tpot_s), rel=0.05)


def test_what_can_never_run_or_finds_the_router_full_is_rejected() -> None:
    long, rest = SimulatedRequest(0.0, 8000, 500), [SimulatedRequest(0.1, 500, 50) for _ in range(20)]
    times = scout(LLAMA_3_8B, disaggregated(), ScoutRequests.of([long, *rest]), slo=SLO, max_in_flight=8).times
    assert times.is_rejected.tolist() == [True] + [False] * 8 + [True] * 12


def with_blocks(layout: Layout, num_kv_blocks: int) -> Layout:
    pools = {name: getattr(layout, name) for name in ("mixed", "prefill", "decode")}
    return replace(
        layout, **{name: pool and replace(pool, num_kv_blocks=num_kv_blocks) for name, pool in pools.items()}
    )


@pytest.mark.parametrize(
    ("layout", "num_seeds"),
    [
        (colocated(2), 1),
        (disaggregated(2, 2), 1),
        # Conversations take up to 512 blocks each: cached ones are evicted.
        (with_blocks(colocated(2), 3000), 1),
        # Which prefill worker the first turns go to decides: draws differ by a tenth in both.
        (with_blocks(disaggregated(2, 1), 3000), 6),
    ],
    ids=("colocated", "apart", "colocated-evicting", "apart-evicting"),
)
def test_the_judge_agrees_on_conversations_and_what_is_cached(layout: Layout, num_seeds: int) -> None:
    slo = SloConfig(ttft_seconds=0.6, tpot_seconds=0.05)
    found = []
    for seed in range(num_seeds):
        requests = requests_of("agent", 9.0, 1000, seed)
        ours = scout(LLAMA_3_8B, layout, ScoutRequests.of(requests), slo=slo)
        judge = by_least_time(LLAMA_3_8B, layout, requests, slo=slo).times
        assert_each_ends_once(ours)
        found.append(
            [
                (share(times, slo), p90(times.ttft_s), p90(times.tpot_s), times.num_cached_tokens.mean())
                for times in (ours.times, judge)
            ]
        )
    (met, ttft_s, tpot_s, num_cached), expected = np.mean(found, axis=0)
    assert met == pytest.approx(expected[0], abs=0.02)
    assert ttft_s == pytest.approx(expected[1], rel=0.05)
    assert tpot_s == pytest.approx(expected[2], rel=0.05)
    assert num_cached == pytest.approx(expected[3], rel=0.03)


@pytest.mark.parametrize("layout", [colocated(), disaggregated()], ids=str)
def test_one_conversation_takes_what_the_judge_says(layout: Layout) -> None:
    last = SimulatedRequest(3.0, 1430, 30)
    first = SimulatedRequest(1.0, 1000, 50, (), SimulatedRequest(2.0, 1200, 100, (), last))
    ours = scout(LLAMA_3_8B, layout, ScoutRequests.of([first]), slo=SLO).times
    judge = by_least_time(LLAMA_3_8B, layout, [first], slo=SLO).times
    assert len(ours.arrived_s) == 3
    for name in ("arrived_s", "first_token_s", "last_token_s"):
        assert getattr(ours, name) == pytest.approx(getattr(judge, name), rel=1e-5)
    assert ours.num_cached_tokens.tolist() == judge.num_cached_tokens.tolist()
    assert ours.num_cached_tokens[1] > 900


def test_the_turn_after_a_rejected_one_never_arrives() -> None:
    first = SimulatedRequest(1.0, 1000, 50, (), SimulatedRequest(2.0, 9000, 1, (), SimulatedRequest(2.0, 9002, 1)))
    times = scout(LLAMA_3_8B, colocated(), ScoutRequests.of([first]), slo=SLO).times
    assert times.is_rejected.tolist() == [False, True]


def test_prompts_that_begin_alike_share_blocks() -> None:
    few_blocks = replace(disaggregated(), decode=replace(a_pool(WorkerRole.DECODE), num_kv_blocks=800))
    alone = [SimulatedRequest(number / 10, 1524, 200) for number in range(200)]
    alike = [replace(each, segments=(Segment(0, 1024), Segment(number + 1, 500))) for number, each in enumerate(alone)]
    apart, shared = (
        scout(LLAMA_3_8B, few_blocks, ScoutRequests.of(requests), slo=SLO).times for requests in (alone, alike)
    )
    assert shared.num_cached_tokens[1:].tolist() == [1024] * 199
    assert shared.tpot_s.mean() < 0.9 * apart.tpot_s.mean()
    assert shared.ttft_s.mean() < 0.8 * apart.ttft_s.mean()


@pytest.mark.parametrize("role", [WorkerRole.PREFILL, WorkerRole.MIXED])
def test_a_shared_prefix_is_found_once_the_steps_that_write_it_have_ended(role: WorkerRole) -> None:
    small_steps, is_apart = replace(a_pool(role), max_batch_tokens=512), role is WorkerRole.PREFILL
    layout = replace(disaggregated(), prefill=small_steps) if is_apart else Layout(mixed=small_steps)
    requests = [
        SimulatedRequest(number / 50, 2148, 20, (Segment(0, 2048), Segment(number + 1, 100))) for number in range(12)
    ]
    slo = ALL_HANDED_OFF if is_apart else SLO
    ours = scout(LLAMA_3_8B, layout, ScoutRequests.of(requests), slo=slo).times
    judge = by_least_time(LLAMA_3_8B, layout, requests, slo=slo).times
    assert ours.num_cached_tokens.tolist() == judge.num_cached_tokens.tolist()
    assert len(set(ours.num_cached_tokens.tolist())) > 2, "some find a part of it"
    assert ours.first_token_s == pytest.approx(judge.first_token_s, rel=1e-3)


def test_the_same_arguments_give_the_same_result_to_the_bit() -> None:
    requests = ScoutRequests.of(requests_of("chat", 30.0, 2000))
    first, second = (scout(LLAMA_3_8B, disaggregated(2, 2), requests, slo=SLO).times for _ in range(2))
    np.testing.assert_array_equal(first.last_token_s, second.last_token_s)
    np.testing.assert_array_equal(first.first_token_s, second.first_token_s)


@pytest.mark.parametrize("num_experts", [0, 8])
def test_a_table_holds_the_cost_models_terms(num_experts: int) -> None:
    """Exactly: where choices depend on small differences, an interpolated table would lead to other ones."""
    shape = replace(LLAMA_3_8B.shape, num_experts=num_experts, experts_per_token=num_experts // 4)
    cost = a_pool(WorkerRole.DECODE, 1, 2).cost(replace(LLAMA_3_8B, shape=shape))
    table = step_table(cost, 8192)
    for num_new in (2, 100, 511, 2048, 5000, 8191):
        attention_s = max(num_new * (num_new + 1) / 2 * table[2, num_new], num_new * cost.decode_token_s)
        prefill_s = table[0, num_new] + table[1, 1] + attention_s
        assert prefill_s == pytest.approx(cost.prefill_s(num_new), rel=1e-14)
        decode_s = table[0, num_new] + table[1, num_new] + 2 * num_new * cost.decode_token_s
        assert decode_s == pytest.approx(cost.decode_s(num_new, num_new), rel=1e-14)


def test_a_run_beyond_capacity_is_saturated() -> None:
    calm, late, drowned = (
        scout(LLAMA_3_8B, disaggregated(), ScoutRequests.of(requests_of("chat", rate, 10_000)), slo=SLO)
        for rate in (10.0, 50.0, 80.0)
    )
    assert not calm.times.is_saturated
    assert late.times.is_saturated
    assert drowned.times.is_saturated


def test_a_model_that_does_not_fit_is_refused() -> None:
    huge = replace(LLAMA_3_8B, shape=replace(LLAMA_3_8B.shape, num_layers=400))
    with pytest.raises(ValueError, match="leave no memory for KV"):
        scout(huge, colocated(), poisson(1.0, 10, 100, 10), slo=SLO)


def test_one_process_compiles_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = SimpleNamespace(signatures=(), stats=SimpleNamespace(cache_path=str(tmp_path)))
    monkeypatch.setattr("pdserve.planner.simulate.scout_kernel.run", compiled)
    entered = threading.Event()

    def compile() -> None:
        with scout_module._one_compiler():
            entered.set()

    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    waiting = threading.Thread(target=compile)
    waiting.start()
    assert not entered.wait(0.3)
    os.close(other)  # as at the end of its process
    assert entered.wait(HANG_S)
    waiting.join()
    with scout_module._one_compiler():  # of one that is stopped, not for ever
        monkeypatch.setattr(scout_module, "MAX_WAIT_S", 0.0)
        compile()
