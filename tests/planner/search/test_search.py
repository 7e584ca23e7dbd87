from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import pytest

from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.model.cost.hardware import hardware
from pdserve.planner.search.demand import Demand
from pdserve.planner.search.estimates import Estimator
from pdserve.planner.search.goodput import Runner, Trial
from pdserve.planner.search.plan import (
    Effort,
    InfeasibleError,
    InfeasibleRateError,
    InfeasibleSloError,
    Objective,
    Plan,
    Question,
    Space,
    Supply,
)
from pdserve.planner.search.search import find_plan, usual_run_s
from pdserve.planner.wording import share
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.requests import SimulatedRequest
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO, PoissonWorkload, UnitRateRequests

WORKLOAD = PoissonWorkload(1500, 8)
POLICIES = (DEFAULT_POLICY, "round-robin")
LITTLE = Effort(screen_requests=200, final_requests=120, num_screened=4, num_finalists=2, tolerance=0.1)
MORE = replace(LITTLE, final_requests=400)


def a_question(
    objective: Objective = Objective.RATE, rate: float = 0.0, slo: SloConfig = SLO, num_devices: int = 2
) -> Question:
    return Question(
        model=LLAMA_3_8B,
        slo=slo,
        fleet=(Supply(hardware=H100, devices_per_node=num_devices, dollars_per_hour=2.0),),
        objective=objective,
        rate=rate,
        space=Space(pipeline_parallel=(1,), mixed_batch_tokens=(512,)),
        effort=LITTLE,
    )


@cache
def a_search() -> tuple[Plan, list[tuple[float, str]]]:
    """A plan, and the progress of its search."""
    heard: list[tuple[float, str]] = []
    return find_plan(a_question(), WORKLOAD, num_processes=1, progress=lambda *news: heard.append(news)), heard


def a_plan() -> Plan:
    return a_search()[0]


def test_every_layout_is_ranked_and_none_is_dropped() -> None:
    plan = a_plan()
    assert sorted(str(candidate.layout) for candidate in plan.candidates) == [
        "1 x M(TP2)",
        "1 x P(TP1) + 1 x D(TP1)",
        "2 x M(TP1)",
    ]
    finals = [candidate for candidate in plan.candidates if candidate.goodput]
    assert plan.candidates[: len(finals)] == tuple(finals)
    assert [candidate.rate for candidate in finals] == sorted((candidate.rate for candidate in finals), reverse=True)
    assert plan.screening.num_layouts == 3
    assert plan.screening.num_simulated == len(finals) == 2
    assert plan.screening.num_screened + plan.screening.num_estimated == 1
    assert plan.screening.num_requests > 0


def test_the_winner_is_told_in_full() -> None:
    plan, best = a_plan(), a_plan().best
    assert best.goodput is not None
    assert best.goodput.at_rate is not None
    assert best.goodput.at_rate.num_requests == LITTLE.final_requests
    assert best.goodput.at_rate.meets(0.9)
    assert best.saturation_margin is not None
    assert best.saturation_margin >= 1
    faster, slower = best.sensitivity
    assert (faster.time_factor, slower.time_factor) == (0.9, 1.1)
    assert faster.rate > slower.rate
    assert best.dollars_per_hour == 4.0
    assert best.dollars_per_million_tokens(8) == pytest.approx(4.0 / 3600 / (best.rate * 8) * 1e6)
    assert plan.mean_output_tokens == pytest.approx(8, rel=0.1)
    for pool in best.pools:
        assert pool.weight_bytes_per_device + pool.kv_bytes_per_device < pool.memory_bytes_per_device
        assert 0 < pool.max_long_sequences < pool.num_kv_blocks
        assert 0 < pool.busy_share <= 1


def test_losers_say_why() -> None:
    plan = a_plan()
    runner_up = plan.candidates[1]
    assert runner_up.at_winners_rate is not None
    assert runner_up.at_winners_rate.rate == plan.best.rate
    assert plan.best.goodput is not None
    # What serves all that its steps can sustain has no objective that binds.
    assert "binds: at" in plan.best.reasons[0]
    assert f"it meets both objectives for {share(runner_up.at_winners_rate.share)}" in runner_up.reasons[1]


def test_no_more_is_simulated_than_a_trace_has() -> None:
    limited = find_plan(replace(a_question(), effort=replace(LITTLE, most_requests=110)), WORKLOAD, num_processes=1)
    runs = [
        point.num_requests
        for candidate in limited.candidates
        if candidate.goodput
        for point in candidate.goodput.points
    ]
    assert set(runs) == {110}


def test_a_large_fleet_has_as_many_requests_as_its_runs_take() -> None:
    assert Effort().requests_of_run(rate=10, run_s=100) == 20_000
    assert Effort().requests_of_run(rate=400, run_s=100) == 80_000
    assert Effort(final_requests=500).requests_of_run(rate=400, run_s=100) == 500
    assert Effort(most_requests=700).requests_of_run(rate=400, run_s=100) == 700


def test_a_run_is_as_many_conversations_long_as_residences() -> None:
    """Beyond the highest rate of agents all answers are in time for 8 conversations and more, and none later."""
    alone = SimulatedRequest(0.0, 10, 2)
    talk = replace(alone, follow_up=SimulatedRequest(100.0, 22, 2))
    assert usual_run_s([alone], 3.0, SloConfig(ttft_seconds=1.0)) == 20 * 3.0
    assert usual_run_s([alone], 3.0, SloConfig(ttft_seconds=5.0)) == 20 * 5.0
    assert usual_run_s([talk, alone], 3.0, SloConfig(ttft_seconds=1.0)) == pytest.approx(20 * (100 / 2 + 1.5 * 3.0))


def test_of_two_kinds_a_colocated_layout_takes_one_and_that_is_said() -> None:
    kinds = (hardware("h100"), replace(hardware("a100"), pipeline_depth=1))
    fleet = tuple(Supply(hardware=kind, devices_per_node=1) for kind in kinds)
    plan = find_plan(replace(a_question(), fleet=fleet), WORKLOAD, num_processes=1)
    assert {candidate.layout.num_devices for candidate in plan.candidates if candidate.layout.is_colocated} == {1}
    assert any("A colocated layout uses one" in note for note in plan.notes)
    assert any("KV crosses the network between workers on different hosts" in note for note in plan.notes)
    assert any("Assumes no guesses" in note for note in plan.notes), "workers of the second kind may guess"
    assert a_plan().notes == ()


def test_the_verdict_weighs_both_kinds() -> None:
    verdict = a_plan().verdict
    assert verdict.best_colocated is not None
    assert verdict.best_disaggregated is not None
    assert verdict.gain is not None
    ratio = verdict.best_disaggregated.rate / verdict.best_colocated.rate
    assert verdict.gain == pytest.approx(ratio - 1)
    assert verdict.serve_colocated == (ratio < 1)
    assert verdict.text.startswith("Serve colocated" if ratio < 1 else "Disaggregate")


def test_the_number_of_processes_changes_nothing() -> None:
    parallel = find_plan(a_question(), WORKLOAD, num_processes=2)
    assert parallel == a_plan()


def test_the_fewest_devices_for_a_rate() -> None:
    one = find_plan(a_question(Objective.FEWEST_DEVICES, rate=5.0), WORKLOAD, num_processes=1)
    assert one.best.layout.num_devices == 1
    assert one.best.rate >= 5.0
    two = find_plan(a_question(Objective.LEAST_COST, rate=a_plan().best.rate * 0.8), WORKLOAD, num_processes=1)
    assert two.best.layout.num_devices == 2


def test_a_rate_beyond_the_fleet_names_what_it_can_serve() -> None:
    with pytest.raises(InfeasibleRateError, match=r"the fleet serves at most .* add devices"):
        find_plan(a_question(Objective.FEWEST_DEVICES, rate=10 * a_plan().best.rate), WORKLOAD, num_processes=1)


def test_an_impossible_slo_tells_of_shortened_requests_and_no_tpot_of_single_tokens() -> None:
    slo = SloConfig(ttft_seconds=0.001, tpot_seconds=0.02)
    long = preset("longbench-synthetic")
    question = a_question(slo=slo)
    with pytest.raises(InfeasibleSloError) as error:
        find_plan(replace(question, model=replace(question.model, max_model_len=100)), long, num_processes=1)
    text = str(error.value)
    assert re.search(r"the best possible here is TTFT [\d.]+ ms; loosen", text)
    assert text.endswith("Shortened to 100 tokens: 1000 prompts shortened, 998 answers shortened, of 1000 requests.")


def test_an_impossible_slo_names_the_best_that_can_be_had() -> None:
    slo = SloConfig(ttft_seconds=0.001, tpot_seconds=0.02)
    with pytest.raises(InfeasibleSloError, match=r"idle cluster does not meet TTFT 1 ms .* the best possible"):
        find_plan(a_question(slo=slo), WORKLOAD, num_processes=1)


class OnlyShortRunsAreEasy(PoissonWorkload):
    """In runs of finalists, every third prompt is too long for any rate."""

    def draw(self, num_requests: int, seed: int, *, max_model_len: int = 0) -> UnitRateRequests:
        drawn = super().draw(num_requests, seed, max_model_len=max_model_len)
        if num_requests != LITTLE.final_requests:
            return drawn
        requests = [
            replace(each, num_prompt_tokens=8000) if number % 3 == 0 else each
            for number, each in enumerate(drawn.requests)
        ]
        return replace(drawn, requests=tuple(requests))


@pytest.mark.parametrize("objective", [Objective.RATE, Objective.FEWEST_DEVICES])
def test_an_slo_that_only_short_runs_meet_names_the_best_that_was_seen(objective: Objective) -> None:
    question = a_question(objective, rate=1.0, slo=SloConfig(ttft_seconds=0.1, tpot_seconds=0.02))
    question = replace(question, space=replace(question.space, tensor_parallel=(1,)))
    with pytest.raises(InfeasibleSloError, match=r"no layout meets TTFT 100 ms .* any rate, the best was \d\d"):
        find_plan(question, OnlyShortRunsAreEasy(1500, 8), num_processes=1)


def test_figures_are_of_the_policy_that_will_serve() -> None:
    """What was found is what the router's policy attains; another policy attains something else."""
    question = a_question()
    plans = [find_plan(replace(question, policy=each), WORKLOAD, num_processes=1) for each in POLICIES]
    for policy, plan in zip(POLICIES, plans, strict=True):
        assert plan.best.goodput is not None
        trial = Trial(model=LLAMA_3_8B, layout=plan.best.layout, slo=SLO, policy=policy, num_requests=120)
        assert Runner(WORKLOAD).attainment(trial, plan.best.rate) == plan.best.goodput.at_rate
    usual, other = plans
    assert usual.best.rate > 1.02 * other.best.rate
    assert not usual.notes
    assert other.notes == ("Planned for the router's policy round-robin.",)


@pytest.mark.parametrize(("most_requests", "more"), [(None, "--requests"), (120, "a trace of")])
def test_a_highest_rate_of_too_few_requests_is_refused_and_a_required_one_is_noted(
    most_requests: int | None, more: str
) -> None:
    """A TTFT objective of 5 s asks for runs of 37.5 s; 120 requests at what two devices serve take a tenth of that."""
    effort, slo = replace(LITTLE, most_requests=most_requests), SloConfig(ttft_seconds=5, tpot_seconds=0.1)
    too_few = r"120 requests are too few to find the highest rate of [12] x"
    with pytest.raises(InfeasibleError, match=rf"{too_few} .* takes 37.5 s to reach a steady state; plan with {more}"):
        find_plan(replace(a_question(slo=slo), effort=effort), WORKLOAD, num_processes=1)
    required = replace(a_question(Objective.FEWEST_DEVICES, 1.0, slo), effort=effort)
    plan = find_plan(required, WORKLOAD, num_processes=1)
    assert [re.search(too_few, note) is not None for note in plan.notes] == [True]
    with pytest.raises(InfeasibleError, match=too_few):
        find_plan(replace(required, rate=30.0), WORKLOAD, num_processes=1)
    assert a_plan().notes == ()


def test_estimates_are_corrected_by_what_was_simulated_once_only() -> None:
    required = a_question(Objective.FEWEST_DEVICES, 5.0, num_devices=4)
    question = replace(required, effort=replace(LITTLE, final_requests=120, num_screened=2))
    workload = PoissonWorkload(600, 200)
    plan = find_plan(question, workload, num_processes=1)
    demand = Demand.of(workload.draw(1000, 0).at_rate(1.0), block_size=16, max_model_len=question.model.max_model_len)
    estimator = Estimator(question.model, demand, question.slo)
    ratios = [
        (each.rate / estimator.estimate(each.layout).rate, each.is_estimated)
        for each in plan.candidates
        if not each.layout.is_colocated
    ]
    seen = [ratio for ratio, is_estimated in ratios if not is_estimated]
    estimated = [ratio for ratio, is_estimated in ratios if is_estimated]
    assert min(seen) > 2
    assert 0.6 * min(seen) < min(estimated) <= max(estimated) < 1.6 * max(seen)


def test_the_least_cost_needs_prices() -> None:
    question = a_question(Objective.LEAST_COST, rate=1.0)
    free = Supply(hardware=replace(H100, price_per_hour_usd=None))
    with pytest.raises(ValueError, match="h100-sxm has no known price: give its dollars per hour"):
        find_plan(replace(question, fleet=(free,)), WORKLOAD)


def test_where_handoffs_meet_no_objective_the_plan_is_colocated() -> None:
    """Answers of six tokens, over a network that takes longer for a prompt's KV than they may."""
    slow = replace(H100, network_bandwidth=1.25e9)
    question = replace(
        a_question(slo=SloConfig(ttft_seconds=0.5, tpot_seconds=0.03)),
        fleet=(Supply(hardware=slow, num_nodes=4, devices_per_node=1),),
        effort=replace(LITTLE, final_requests=240),
    )
    plan = find_plan(question, PoissonWorkload(4000, 6, 0.3), num_processes=1)
    assert plan.best.layout.is_colocated
    assert not plan.verdict.best_disaggregated
    failed = next(each for each in plan.candidates if each.goodput and not each.layout.is_colocated)
    assert failed.rate == 0
    cause = "at no rate that was simulated: its mean pull of KV takes longer than TPOT leaves a mean answer."
    assert plan.verdict.text.endswith(f"Of disaggregated ones, {failed.layout} meets it {cause}")


@dataclass(frozen=True)
class HarderAtLength(PoissonWorkload):
    """Long simulations have longer prompts than short ones."""

    def draw(self, num_requests: int, seed: int, *, max_model_len: int = 0) -> UnitRateRequests:
        drawn = super().draw(num_requests, seed, max_model_len=max_model_len)
        if num_requests == LITTLE.screen_requests:
            return drawn
        longer = (replace(each, num_prompt_tokens=round(1.4 * each.num_prompt_tokens)) for each in drawn.requests)
        return replace(drawn, requests=tuple(longer))


def test_where_all_that_seemed_to_serve_the_rate_do_not_more_devices_are_tried() -> None:
    question = replace(
        a_question(Objective.FEWEST_DEVICES, 26.0, SloConfig(ttft_seconds=1.0, tpot_seconds=0.1), num_devices=4),
        space=Space(
            pipeline_parallel=(1,),
            tensor_parallel=(1,),
            mixed_batch_tokens=(1024, 1536, 2048, 4096),
            may_disaggregate=False,
        ),
        effort=MORE,
    )
    heard: list[float] = []
    plan = find_plan(
        question, HarderAtLength(1500, 20), num_processes=1, progress=lambda fraction, _: heard.append(fraction)
    )
    assert str(plan.best.layout) == "2 x M(TP1)"
    assert heard == sorted(heard)


@pytest.mark.parametrize(("tpot_seconds", "is_short"), [(0.015, True), (0.2, False)])
def test_the_chunk_budget_of_colocated_workers_is_tuned(tpot_seconds: float, is_short: bool) -> None:
    space = Space(pipeline_parallel=(1,), tensor_parallel=(1,), may_disaggregate=False)
    slo = SloConfig(ttft_seconds=1.0, tpot_seconds=tpot_seconds)
    # Of a required rate: to find the highest, answers that may take so long need runs of many requests.
    required = a_question(Objective.FEWEST_DEVICES, 1.0, slo, num_devices=1)
    question = replace(required, space=space, effort=replace(LITTLE, tolerance=0.3))
    (only,) = find_plan(question, PoissonWorkload(1500, 40), num_processes=1).candidates
    assert only.layout.mixed is not None
    assert (only.layout.mixed.max_batch_tokens == 512) is is_short


def test_progress_rises_from_nothing_to_all() -> None:
    fractions = [fraction for fraction, _ in a_search()[1]]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
