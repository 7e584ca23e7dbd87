from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.contracts.deployment import POLICIES, SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.shape import ModelShape
from pdserve.planner.layout import Layout, PlannedModel
from pdserve.planner.simulate import simulated_worker
from pdserve.planner.simulate.simulation import Simulation
from pdserve.planner.simulate.simulator import NO_OVERHEADS, Overheads, simulate
from pdserve.planner.simulate.steady_steps import NO_STEADY_STEPS
from pdserve.planner.workload.requests import Segment, SimulatedRequest
from tests.planner.stand_ins import H100, LLAMA_3_8B, a_pool, colocated, disaggregated

SLO = SloConfig(ttft_seconds=0.25, tpot_seconds=0.02)
ALL_HANDED_OFF = SloConfig(ttft_seconds=0.25, tpot_seconds=1e-4)
"""No decode worker may compute a prompt."""


def poisson(rate: float, num_requests: int, *, seed: int = 0, num_output_tokens: int = 100) -> list[SimulatedRequest]:
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, num_requests))
    lengths = random.integers(300, 1500, num_requests)
    return [
        SimulatedRequest(float(arrived_s), int(length), num_output_tokens)
        for arrived_s, length in zip(arrivals, lengths, strict=True)
    ]


def assert_all_are_answered(simulation: Simulation, num_requests: int) -> None:
    times = simulation.times
    assert len(times.arrived_s) == num_requests
    assert not times.is_rejected.any()
    assert (times.arrived_s < times.first_token_s).all()
    assert (times.first_token_s <= times.last_token_s).all()
    has_more = times.num_output_tokens > 1
    assert (times.first_token_s < times.second_token_s)[has_more].all()
    assert (times.second_token_s <= times.last_token_s)[has_more].all()


def decoded(simulation: Simulation) -> int:
    return sum(worker.num_decode_tokens for worker in simulation.workers)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "layout", [disaggregated(2, 3), colocated(2), replace(disaggregated(), mixed=a_pool(WorkerRole.MIXED))], ids=str
)
def test_every_policy_answers_in_full(layout: Layout, policy: str) -> None:
    assert_all_are_answered(simulate(LLAMA_3_8B, layout, poisson(40, 100), slo=SLO, policy=policy), 100)


def test_the_policy_decides() -> None:
    """In turn, some prompts wait for a long one on the worker where it is; by predicted time, they avoid it."""
    requests = [SimulatedRequest(n / 20, 50 if n % 3 else 8000, 1) for n in range(30)]
    in_turn, by_time = (
        simulate(LLAMA_3_8B, disaggregated(2, 1), requests, slo=ALL_HANDED_OFF, policy=policy).times.ttft_s.mean()
        for policy in ("round-robin", "least-time")
    )
    assert by_time < 0.9 * in_turn


@pytest.mark.parametrize("layout", [disaggregated(), disaggregated(2, 3), colocated(), colocated(2)], ids=str)
def test_every_request_is_answered_in_full(layout: Layout) -> None:
    requests = poisson(8, 200)
    simulation = simulate(LLAMA_3_8B, layout, requests, slo=SLO)
    assert_all_are_answered(simulation, 200)
    assert decoded(simulation) == 200 * 99
    assert sum(worker.num_prefill_tokens for worker in simulation.workers) == sum(
        request.num_prompt_tokens for request in requests
    )
    assert simulation.gap_weights.sum() == decoded(simulation)


def test_the_same_arguments_give_the_same_result_to_the_bit() -> None:
    first, second = (simulate(LLAMA_3_8B, disaggregated(2, 2), poisson(20, 200), slo=SLO) for _ in range(2))
    np.testing.assert_array_equal(first.times.last_token_s, second.times.last_token_s)
    assert first.workers == second.workers


def test_an_unloaded_request_takes_what_the_cost_model_says() -> None:
    """A prompt that no decode worker would compute: one prefill step, a transfer, and decode steps one by one."""
    cost = a_pool(WorkerRole.PREFILL).cost(LLAMA_3_8B)
    simulation = simulate(
        LLAMA_3_8B, disaggregated(), [SimulatedRequest(1.0, 2000, 11)], slo=SLO, overheads=NO_OVERHEADS
    )
    times = simulation.times
    assert times.ttft_s == pytest.approx([cost.prefill_s(2000)])
    decode_s = sum(cost.decode_s(1, 2000 + n) for n in range(10))
    transfer_s = cost.transfer_s(2000, same_host=True)
    assert times.last_token_s - times.first_token_s == pytest.approx([transfer_s + decode_s], rel=1e-6)
    assert times.second_token_s - times.first_token_s == pytest.approx([transfer_s + cost.decode_s(1, 2000)], rel=1e-6)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 4), (4, 1)])
def test_kv_moves_as_fast_as_the_side_of_fewer_ranks(prefill_ranks: int, decode_ranks: int) -> None:
    prefill = replace(a_pool(WorkerRole.PREFILL), tensor_parallel=prefill_ranks)
    decode = replace(a_pool(WorkerRole.DECODE), tensor_parallel=decode_ranks)
    layout = Layout(prefill=prefill, decode=decode, hosts=(((0,),), ((1,),)))
    # Whole blocks in one chunk, of which none travels before the last token.
    requests = [SimulatedRequest(0.0, 2000, 2)]
    times = simulate(LLAMA_3_8B, layout, requests, slo=ALL_HANDED_OFF, overheads=NO_OVERHEADS).times
    moved_s = a_pool(WorkerRole.DECODE).cost(LLAMA_3_8B).transfer_s(2000, same_host=False)
    stall_s = float(times.second_token_s[0] - times.first_token_s[0])
    assert moved_s < stall_s < moved_s + decode.cost(LLAMA_3_8B).decode_s(1, 2000) * 1.01


def on_hosts(prefill: Sequence[int], decode: Sequence[int]) -> Layout:
    """Workers of one device on hosts of these numbers."""
    hosts = tuple(tuple((host,) for host in pool) for pool in (prefill, decode))
    return replace(disaggregated(len(prefill), len(decode)), hosts=hosts)


@pytest.mark.parametrize("same_host", [True, False])
def test_a_pull_takes_what_the_link_between_its_workers_does(same_host: bool) -> None:
    cost = a_pool(WorkerRole.DECODE).cost(LLAMA_3_8B)
    layout = on_hosts([0, 2], [1, 0 if same_host else 1])
    requests = [SimulatedRequest(0.0, 2000, 2)]
    simulation = simulate(LLAMA_3_8B, layout, requests, slo=ALL_HANDED_OFF, overheads=NO_OVERHEADS)
    stall_s = float(simulation.times.second_token_s[0] - simulation.times.first_token_s[0])
    expected_s = cost.transfer_s(2000, same_host=same_host) + cost.decode_s(1, 2000)
    assert stall_s == pytest.approx(expected_s, rel=1e-9)
    # The one on the host of the prompt's worker is preferred; of those that are equally far, the first.
    pulls = {use.worker_id: (use.num_pulls, use.num_network_pulls) for use in simulation.workers if use.num_pulls}
    assert pulls == ({"decode-1": (1, 0)} if same_host else {"decode-0": (1, 1)})


def test_pulls_over_both_kinds_of_links_share_a_workers_wire() -> None:
    cost = a_pool(WorkerRole.DECODE).cost(LLAMA_3_8B)
    requests = [SimulatedRequest(0.0, 2000, 2), SimulatedRequest(0.0, 2000, 2)]
    simulation = simulate(LLAMA_3_8B, on_hosts([0, 1], [0]), requests, slo=ALL_HANDED_OFF, overheads=NO_OVERHEADS)
    near_s, far_s = (cost.transfer_s(2000, same_host=same_host) for same_host in (True, False))
    decode_s = cost.decode_s(1, 2000)
    assert decode_s < far_s, "the first has been decoded when the second comes"
    stalls_s = simulation.times.second_token_s - simulation.times.first_token_s
    assert stalls_s == pytest.approx([near_s + decode_s, near_s + far_s + decode_s], rel=1e-9)
    assert [use.num_network_pulls for use in simulation.workers] == [0, 0, 1]


def test_micro_batches_share_their_workers_wire() -> None:
    pools = [a_pool(role, 1, 1, 2) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)]
    slow = replace(H100, network_bandwidth=H100.network_bandwidth / 100)
    prefill, decode = (replace(pool, hardware=slow) for pool in pools)
    layout = Layout(prefill=prefill, decode=decode, hosts=(((0,),), ((1,),)))
    requests = [SimulatedRequest(0.0, 2000, 2) for _ in range(2)]
    moved_s = decode.cost(LLAMA_3_8B).transfer_s(2000, same_host=False)
    judge = simulate(LLAMA_3_8B, layout, requests, slo=ALL_HANDED_OFF, overheads=NO_OVERHEADS).times
    stalls_s = judge.second_token_s - judge.first_token_s
    assert stalls_s[1] > 1.5 * moved_s > 1.2 * stalls_s[0]


def test_pulls_stay_within_hosts_as_far_as_the_load_is_even() -> None:
    one_by_one = [SimulatedRequest(float(n), 1000, 100) for n in range(20)]
    for requests, most_far in ((one_by_one, 0), (poisson(40, 150), 74)):
        simulation = simulate(LLAMA_3_8B, on_hosts([0, 1], [0, 1]), requests, slo=ALL_HANDED_OFF)
        assert_all_are_answered(simulation, len(requests))
        assert sum(use.num_pulls for use in simulation.workers) == len(requests)
        assert sum(use.num_network_pulls for use in simulation.workers) <= most_far


def test_overheads_add_up() -> None:
    requests = [SimulatedRequest(1.0, 2000, 11)]
    overheads = Overheads(arrival_s=0.1, message_s=0.02, answer_s=0.003, pull_s=0.5)
    bare, burdened = (
        simulate(LLAMA_3_8B, disaggregated(), requests, slo=SLO, overheads=each).times
        for each in (NO_OVERHEADS, overheads)
    )
    assert burdened.ttft_s - bare.ttft_s == pytest.approx([0.123])
    stalls = [times.second_token_s - times.first_token_s for times in (bare, burdened)]
    assert stalls[1] - stalls[0] == pytest.approx([0.5 - 0.02], abs=0.03)


def synchronous(layout: Layout) -> Layout:
    """The same with workers that plan a step when the one before has ended."""
    prefill, decode, mixed = (
        replace(pool, hardware=replace(pool.hardware, pipeline_depth=1)) if pool else None
        for pool in (layout.prefill, layout.decode, layout.mixed)
    )
    return replace(layout, prefill=prefill, decode=decode, mixed=mixed)


def test_a_synchronous_loop_turns_between_any_two_steps() -> None:
    cost = a_pool(WorkerRole.PREFILL).cost(LLAMA_3_8B)
    requests = [SimulatedRequest(1.0, 2000, 11)]
    overheads = replace(NO_OVERHEADS, turn_s=0.001)
    times = simulate(LLAMA_3_8B, synchronous(disaggregated()), requests, slo=SLO, overheads=overheads).times
    assert times.ttft_s == pytest.approx([cost.prefill_s(2000)])
    decode_s = sum(cost.decode_s(1, 2000 + n) for n in range(10)) + 9 * 0.001
    transfer_s = cost.transfer_s(2000, same_host=True)
    assert times.last_token_s - times.first_token_s == pytest.approx([transfer_s + decode_s], rel=1e-6)


@pytest.mark.parametrize("is_synchronous", [False, True])
def test_a_prompt_that_found_a_step_in_flight_waits_for_a_turn_after_it(is_synchronous: bool) -> None:
    layout = synchronous(disaggregated()) if is_synchronous else disaggregated()
    requests = [SimulatedRequest(1.0, 1500, 1), SimulatedRequest(1.001, 1000, 1), SimulatedRequest(2.0, 1500, 1)]
    overheads = replace(NO_OVERHEADS, turn_s=0.002)
    times = simulate(LLAMA_3_8B, layout, requests, slo=ALL_HANDED_OFF, overheads=overheads).times
    cost = a_pool(WorkerRole.PREFILL).cost(LLAMA_3_8B)
    waited_s = cost.prefill_s(1500) - 0.001
    assert times.ttft_s == pytest.approx(
        [cost.prefill_s(1500), waited_s + 0.002 + cost.prefill_s(1000), cost.prefill_s(1500)]
    )


def test_a_prompt_that_arrives_during_a_turn_is_planned_ahead() -> None:
    cost = a_pool(WorkerRole.PREFILL).cost(LLAMA_3_8B)
    turn_s, turn_begins_s = 0.002, 1.0 + cost.prefill_s(1500)
    arrivals = [1.0, 1.001, turn_begins_s + turn_s / 2]
    requests = [SimulatedRequest(at, length, 1) for at, length in zip(arrivals, [1500, 1000, 500], strict=True)]
    overheads = replace(NO_OVERHEADS, turn_s=turn_s)
    times = simulate(LLAMA_3_8B, disaggregated(), requests, slo=ALL_HANDED_OFF, overheads=overheads).times
    second_ends_s = turn_begins_s + turn_s + cost.prefill_s(1000)
    assert times.first_token_s[1:] == pytest.approx([second_ends_s, second_ends_s + cost.prefill_s(500)])


def test_turns_are_hidden_where_the_next_step_is_submitted_ahead() -> None:
    requests = [SimulatedRequest(1.0, 7000, 40), SimulatedRequest(1.0, 7000, 40)]
    bare, burdened = (
        simulate(LLAMA_3_8B, disaggregated(), requests, slo=SLO, overheads=replace(NO_OVERHEADS, turn_s=turn_s)).times
        for turn_s in (0.0, 0.002)
    )
    assert burdened.ttft_s == pytest.approx(bare.ttft_s)
    assert (burdened.last_token_s - bare.last_token_s).max() <= 2 * 0.002 + 1e-9


def test_a_synchronous_loop_hears_of_a_prompt_one_step_earlier() -> None:
    """The second prompt arrives in the first of two steps of the first one, and there is room for it in the second."""
    requests = [SimulatedRequest(1.0, 3500, 1), SimulatedRequest(1.001, 500, 1)]
    synchronously, ahead = (
        simulate(LLAMA_3_8B, layout, requests, slo=SLO, overheads=NO_OVERHEADS).times.first_token_s
        for layout in (synchronous(colocated()), colocated())
    )
    cost = a_pool(WorkerRole.MIXED).cost(LLAMA_3_8B)
    together_s = 1.0 + cost.prefill_s(2048) + cost.step_s([(1452, 2048), (500, 0)])
    assert synchronously == pytest.approx([together_s, together_s])
    apart_s = 1.0 + cost.prefill_s(2048) + cost.prefill_s(1452, 2048)
    assert ahead == pytest.approx([apart_s, apart_s + cost.prefill_s(500)])


LAYOUTS = [
    disaggregated(),
    disaggregated(2, 2),
    disaggregated(num_kv_blocks=500),
    colocated(),
    colocated(num_kv_blocks=500),
    synchronous(disaggregated()),
    synchronous(colocated(num_kv_blocks=500)),
]


@settings(max_examples=20)
@given(
    layout=st.sampled_from(LAYOUTS),
    rate=st.sampled_from([2, 8, 30]),
    seed=st.integers(0, 1000),
    num_output_tokens=st.sampled_from([1, 2, 3, 60, 300]),
    max_tokens=st.sampled_from([0, 1000]),
    is_sharing=st.booleans(),
    num_windows=st.sampled_from([0, 24]),
)
@example(  # of two decode workers, the router must see the steps that have ended
    layout=disaggregated(2, 2),
    rate=30,
    seed=4,
    num_output_tokens=3,
    max_tokens=0,
    is_sharing=False,
    num_windows=0,
)
@example(  # the router must see the blocks that a decode worker takes while steps are not planned
    layout=disaggregated(num_kv_blocks=500),
    rate=30,
    seed=0,
    num_output_tokens=60,
    max_tokens=0,
    is_sharing=False,
    num_windows=0,
)
@example(  # it must see the step that is planned while one runs, when the last one ended, and the least limit of all
    layout=disaggregated(),
    rate=30,
    seed=110,
    num_output_tokens=60,
    max_tokens=0,
    is_sharing=True,
    num_windows=0,
)
@example(
    layout=disaggregated(num_kv_blocks=500),
    rate=30,
    seed=0,
    num_output_tokens=60,
    max_tokens=1000,
    is_sharing=False,
    num_windows=24,
)
def test_fast_forwarding_is_the_same_as_planning_every_step(
    layout: Layout,
    rate: int,
    seed: int,
    num_output_tokens: int,
    max_tokens: int,
    is_sharing: bool,
    num_windows: int,
) -> None:
    model = replace(
        LLAMA_3_8B, shape=replace(LLAMA_3_8B.shape, windows=(900,) * num_windows + (0,) * (32 - num_windows))
    )
    requests = [
        request.limited(max_tokens) for request in poisson(rate, 40, seed=seed, num_output_tokens=num_output_tokens)
    ]
    if is_sharing:
        requests = [
            replace(r, segments=(Segment(n % 3, 250), Segment(n + 10, r.num_prompt_tokens - 250)))
            for n, r in enumerate(requests)
        ]

    def run() -> Simulation:
        return simulate(model, layout, requests, slo=SLO)

    forwarded = run()
    with patch.object(simulated_worker, "steady_steps", return_value=NO_STEADY_STEPS):
        planned = run()
    for name in ("started_s", "first_token_s", "second_token_s", "last_token_s", "num_cached_tokens"):
        one, other = getattr(forwarded.times, name), getattr(planned.times, name)
        np.testing.assert_allclose(one, other, rtol=1e-9, err_msg=name)
    for one, other in zip(forwarded.workers, planned.workers, strict=True):
        assert one == replace(other, busy_s=one.busy_s, held_block_s=one.held_block_s)
        assert one.busy_s == pytest.approx(other.busy_s)
        assert one.held_block_s == pytest.approx(other.held_block_s, rel=0.02, abs=1.0)


def test_scarce_blocks_preempt_and_lose_nothing() -> None:
    requests = poisson(30, 150, num_output_tokens=400)
    for layout in (disaggregated(num_kv_blocks=400), colocated(num_kv_blocks=400)):
        simulation = simulate(LLAMA_3_8B, layout, requests, slo=SLO)
        assert_all_are_answered(simulation, 150)
        assert sum(worker.num_preemptions for worker in simulation.workers) > 0


@pytest.mark.parametrize("layout", [disaggregated(num_kv_blocks=600), colocated(num_kv_blocks=600)], ids=str)
def test_schedulers_reserve_for_answers_that_may_go_on(layout: Layout) -> None:
    requests = [SimulatedRequest(n / 30, 100, 500) for n in range(100)]
    known, unknown = (
        simulate(LLAMA_3_8B, layout, [request.limited(limit) for request in requests], slo=SLO) for limit in (0, 5000)
    )
    assert_all_are_answered(unknown, 100)
    assert unknown.times.last_token_s.mean() > 1.05 * known.times.last_token_s.mean()


def test_with_blocks_for_all_a_limit_changes_little() -> None:
    """An answer that ends before it has a row more, which counts as no token."""
    known, unknown = (
        simulate(
            LLAMA_3_8B,
            disaggregated(2, 2),
            [each.limited(limit) for each in poisson(20, 100)],
            slo=SLO,
            policy="least-time",
        )
        for limit in (0, 4000)
    )
    assert unknown.gap_weights.sum() == decoded(unknown) == 100 * 99
    np.testing.assert_allclose(unknown.times.last_token_s, known.times.last_token_s, atol=0.02)


@pytest.mark.parametrize("policy", ["least-time", "goodput"])
def test_no_gap_is_longer_than_objectives_allow(policy: str) -> None:
    free, bounded = (
        simulate(LLAMA_3_8B, colocated(2), poisson(20, 150), slo=replace(SLO, max_gap_seconds=max_gap_s), policy=policy)
        for max_gap_s in (0.0, 0.03)
    )
    assert_all_are_answered(bounded, 150)
    assert bounded.gap_s.max() <= 0.03 < free.gap_s.max()


def test_a_limit_beyond_the_models_is_the_models() -> None:
    (request,) = poisson(1, 1)
    for limit in (4000, 10**6):
        assert_all_are_answered(simulate(LLAMA_3_8B, disaggregated(), [request.limited(limit)], slo=SLO), 1)


def test_a_full_router_rejects() -> None:
    requests = [SimulatedRequest(1.0 + n / 1000, 500, 50) for n in range(20)]
    times = simulate(LLAMA_3_8B, disaggregated(), requests, slo=SLO, max_in_flight=5).times
    assert times.is_rejected.sum() == 15
    assert np.isfinite(times.last_token_s).sum() == 5


def test_a_session_of_a_closed_loop_keeps_its_pace() -> None:
    session = SimulatedRequest(9.0, 100, 5, (), SimulatedRequest(2.0, 200, 5))
    times = simulate(LLAMA_3_8B, disaggregated(), [session] * 2, slo=SLO, concurrency=1, overheads=NO_OVERHEADS).times
    first, second, third, _ = times.arrived_s
    assert (first, second, third) == (0.0, times.last_token_s[0] + 2.0, times.last_token_s[1])


def test_a_closed_loop_keeps_its_concurrency() -> None:
    requests = poisson(1, 100)
    times = simulate(LLAMA_3_8B, disaggregated(), requests, slo=SLO, concurrency=4, overheads=NO_OVERHEADS).times
    assert len(times.arrived_s) == 100
    in_flight = [int(((times.arrived_s <= at) & (times.last_token_s > at)).sum()) for at in times.arrived_s[10:-4]]
    assert set(in_flight) == {4}


def test_a_prompt_avoids_a_worker_that_computes_another() -> None:
    """Tokens of a step in flight are work that is left, though nothing of them waits."""
    requests = [SimulatedRequest(1.0, 2000, 1), SimulatedRequest(1.01, 2000, 1)]
    first, second = simulate(LLAMA_3_8B, disaggregated(2, 1), requests, slo=SLO).times.ttft_s
    assert second == pytest.approx(first)


def test_each_role_is_predicted_by_a_cost_model_of_its_own() -> None:
    slow = replace(H100, name="slow", memory_bandwidth=H100.memory_bandwidth / 4)
    layout = disaggregated()
    assert layout.decode is not None
    mixed_kinds = replace(layout, decode=replace(layout.decode, hardware=slow))
    fast, slower = (simulate(LLAMA_3_8B, each, poisson(2, 30), slo=SLO).times for each in (layout, mixed_kinds))
    assert np.median(slower.tpot_s) > 2.5 * np.median(fast.tpot_s)
    assert np.median(slower.ttft_s) == pytest.approx(np.median(fast.ttft_s), rel=0.2)


def test_lanes_of_a_pipeline_work_side_by_side() -> None:
    """Two stages take two prompts in little more than the time of one, and one prompt as long as without."""
    alone, together = ([SimulatedRequest(1.0, 2000, 1) for _ in range(num_requests)] for num_requests in (1, 2))
    layout = disaggregated()
    assert layout.prefill is not None
    staged = replace(layout, prefill=replace(layout.prefill, pipeline_parallel=2, max_batch_tokens=2000))
    ttft_s = {
        (str(each), len(requests)): simulate(
            LLAMA_3_8B, each, requests, slo=ALL_HANDED_OFF, overheads=NO_OVERHEADS
        ).times.ttft_s
        for each in (replace(layout, prefill=replace(layout.prefill, max_batch_tokens=2000)), staged)
        for requests in (alone, together)
    }
    whole, halves = sorted({name for name, _ in ttft_s}, key=len)
    assert ttft_s[whole, 2].max() == pytest.approx(2 * ttft_s[whole, 1].max(), rel=0.01)
    assert ttft_s[halves, 2].max() == pytest.approx(1.5 * ttft_s[halves, 1].max(), rel=0.01)


def a_conversation(content: int, num_turns: int) -> SimulatedRequest:
    """Messages of 200 tokens after a system prompt of 600, answered by 50 each."""
    request: SimulatedRequest | None = None
    for turn in reversed(range(num_turns)):
        num_before = 600 + 250 * turn
        message = Segment(1000 * content + turn, 200)
        request = SimulatedRequest(
            3.0 if turn else content * 0.7,
            num_before + 200,
            50,
            (message,) if turn else (Segment(0, 600), message),
            request,
        )
    assert request is not None
    return request


@pytest.mark.parametrize("layout", [disaggregated(), colocated()], ids=str)
def test_conversations_find_their_earlier_turns(layout: Layout) -> None:
    times = simulate(LLAMA_3_8B, layout, [a_conversation(n, 4) for n in range(5)], slo=SLO).times
    assert len(times.arrived_s) == 20
    assert np.isfinite(times.last_token_s).all()
    by_length = {length: times.num_cached_tokens[times.num_prompt_tokens == length] for length in (800, 1050, 1550)}
    assert sorted(by_length[800]) == [0, 592, 592, 592, 592]
    assert (by_length[1050] >= 784).all()
    # What was computed on the decode worker is found there, the answer included.
    assert (by_length[1550] >= 1024).all()


def test_kv_is_held_from_the_first_chunk_and_grows_with_the_answer() -> None:
    requests = [SimulatedRequest(float(at_s), 800, 400) for at_s in range(10)]
    simulation = simulate(LLAMA_3_8B, colocated(), requests, slo=SLO)
    times, (worker,) = simulation.times, simulation.workers
    prefill_s = (times.first_token_s - times.started_s) * 800
    decode_s = (times.last_token_s - times.first_token_s) * (800 + 400 / 2)
    assert worker.held_block_s == pytest.approx((prefill_s + decode_s).sum() / 16, rel=0.03)


def test_kv_that_several_share_is_held_once() -> None:
    shared = [SimulatedRequest(at / 100, 1700, 100, (Segment(0, 1600), Segment(at, 100))) for at in range(1, 31)]
    alone = [replace(each, segments=(Segment(50 + at, 1700),)) for at, each in enumerate(shared)]
    held_block_s = [
        simulate(LLAMA_3_8B, colocated(), requests, slo=SLO).workers[0].held_block_s for requests in (shared, alone)
    ]
    assert held_block_s[0] < 0.25 * held_block_s[1]


def test_segments_of_equal_content_share_and_others_do_not() -> None:
    first, same, other = (
        SimulatedRequest(at, 500, 5, (Segment(content, 400), Segment(100 + at, 100)))
        for at, content in ((1, 7), (2, 7), (3, 8))
    )
    times = simulate(LLAMA_3_8B, disaggregated(), [first, same, other], slo=SLO).times
    assert list(times.num_cached_tokens) == [0, 400, 0]


def test_weights_that_leave_no_memory_are_refused() -> None:
    shape = LLAMA_3_8B.shape
    huge = PlannedModel(
        shape=ModelShape(**{name: getattr(shape, name) for name in shape.__slots__} | {"num_layers": 400})
    )
    with pytest.raises(ValueError, match="no memory for KV on h100-sxm"):
        simulate(huge, disaggregated(), poisson(1, 1), slo=SLO)


@settings(max_examples=25)
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 3000), st.integers(1, 60)), min_size=1, max_size=25),
    num_prefill=st.integers(0, 2),
    num_decode=st.integers(1, 2),
    num_kv_blocks=st.sampled_from([0, 260]),
    num_hosts=st.integers(1, 3),
)
def test_nothing_is_lost(
    arrivals: Sequence[tuple[float, int, int]], num_prefill: int, num_decode: int, num_kv_blocks: int, num_hosts: int
) -> None:
    requests = [SimulatedRequest(*arrival) for arrival in sorted(arrivals)]
    layout = (
        disaggregated(num_prefill, num_decode, num_kv_blocks) if num_prefill else colocated(num_decode, num_kv_blocks)
    )
    hosts = tuple(tuple((replica % num_hosts,) for replica in range(pool.replicas)) for pool in layout.pools)
    layout = replace(layout, hosts=hosts)
    simulation = simulate(LLAMA_3_8B, layout, requests, slo=SLO)
    assert_all_are_answered(simulation, len(requests))
    num_expected = sum(request.num_output_tokens - 1 for request in requests)
    if not sum(worker.num_preemptions for worker in simulation.workers):
        assert decoded(simulation) == num_expected
