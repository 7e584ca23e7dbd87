from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.layout import Layout
from pdserve.planner.report.plan_rows import binds
from pdserve.planner.search.candidates import assemble, verdict_of
from pdserve.planner.search.demand import Demand
from pdserve.planner.search.estimates import Estimator, Resource
from pdserve.planner.search.goodput import Goodput
from pdserve.planner.search.plan import Candidate, Objective, Question, Supply
from pdserve.planner.search.ranking import Entry
from pdserve.planner.simulate.attainment import Attainment, Distribution, Interval, PoolUse
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO, PoissonWorkload, a_pool, colocated, disaggregated

DEMAND = Demand.of(PoissonWorkload().draw(200, 0).requests, block_size=16, max_model_len=8192)

QUESTION = Question(model=LLAMA_3_8B, slo=SLO, fleet=(Supply(hardware=H100),))


def an_attainment(
    rate: float,
    ttft_share: float,
    tpot_share: float,
    role: WorkerRole,
    kv_share: float = 0.3,
    num_preemptions: int = 0,
) -> Attainment:
    nothing = Distribution(())
    share = min(ttft_share, tpot_share)
    pools = [
        PoolUse(
            role=each,
            busy_share=0.5,
            mean_batch_size=8.0,
            kv_share=kv_share,
            num_preemptions=num_preemptions,
            network_share=0.4 if each is WorkerRole.DECODE else 0.0,
        )
        for each in (role, WorkerRole.PREFILL)
    ]
    return Attainment(
        rate=rate,
        share=share,
        interval=Interval(share - 0.01, share + 0.01),
        ttft_share=ttft_share,
        tpot_share=tpot_share,
        ttft=nothing,
        tpot=nothing,
        itl=nothing,
        interactivity=80.0,
        num_requests=100,
        num_counted=60,
        num_rejected=0,
        warm_up_s=1.0,
        mean_residence_s=1.0,
        output_tokens_per_s=100.0,
        pools=tuple(pools),
    )


def a_candidate(
    layout: Layout,
    rate: float,
    ttft_share: float = 0.91,
    tpot_share: float = 0.99,
    *,
    slo: SloConfig = SLO,
    winner: Candidate | None = None,
    at_winners_rate: Attainment | None = None,
    kv_share: float = 0.3,
    num_preemptions: int = 0,
    question: Question | None = None,
) -> Candidate:
    estimator = Estimator(LLAMA_3_8B, DEMAND, slo)
    role = WorkerRole.MIXED if layout.is_colocated else WorkerRole.DECODE
    seen = an_attainment(rate, ttft_share, tpot_share, role, kv_share, num_preemptions)
    goodput = Goodput(
        rate=rate,
        interval=Interval(rate * 0.98, rate * 1.02),
        target=0.9,
        num_devices=layout.num_devices,
        points=(seen,),
    )
    estimate = estimator.estimate(layout)
    entry = Entry(layout, estimate, 3.0 * layout.num_devices, estimate.rate, goodput=goodput)
    return assemble(question or replace(QUESTION, slo=slo), estimator, entry, winner, at_winners_rate=at_winners_rate)


@pytest.mark.parametrize(
    ("ttft_share", "tpot_share", "kv_share", "num_preemptions", "expected"),
    [
        (0.91, 0.99, 0.3, 0, Resource.PREFILL_COMPUTE),
        (0.99, 0.91, 0.3, 0, Resource.DECODE_BANDWIDTH),
        (0.91, 0.99, 0.95, 0, Resource.KV_MEMORY),
        (0.91, 0.99, 0.3, 3, Resource.KV_MEMORY),
    ],
)
def test_what_binds_is_told_by_what_was_seen(
    ttft_share: float, tpot_share: float, kv_share: float, num_preemptions: int, expected: Resource
) -> None:
    candidate = a_candidate(
        disaggregated(), 10.0, ttft_share, tpot_share, kv_share=kv_share, num_preemptions=num_preemptions
    )
    assert candidate.resource is expected
    objective = "TTFT" if ttft_share < tpot_share else "TPOT"
    assert candidate.reasons[0].startswith(f"{objective} binds: at 10.0 requests/s")


def test_what_binds_is_told_with_its_objective() -> None:
    assert binds(a_candidate(disaggregated(), 10.0)) == "TTFT: prefill compute"


def test_prompts_that_are_late_even_on_an_idle_cluster_are_told() -> None:
    assert "idle" not in a_candidate(disaggregated(), 10.0).reasons[0]
    hasty = a_candidate(disaggregated(), 10.0, slo=replace(SLO, ttft_seconds=0.03))
    assert "of the prompts miss TTFT" in hasty.reasons[0]


def test_hosts_are_told_where_kv_moves_between_them() -> None:
    apart = replace(disaggregated(2, 1), hosts=(((0,), (1,)), ((0,),)))
    where = (
        "On 2 hosts, by devices: 1 with 1 prefill and 1 decode, 1 with 1 prefill; 40 % of the pulls cross the network."
    )
    assert a_candidate(apart, 10.0).reasons[1:] == (where,)
    assert a_candidate(disaggregated(2, 1), 10.0).reasons[1:] == ()
    assert a_candidate(replace(colocated(2), hosts=(((0,), (1,)),)), 10.0).reasons[1:] == ()


def test_a_loser_says_which_objective_it_misses_at_the_winners_rate() -> None:
    winner = a_candidate(colocated(2), 20.0)
    seen = an_attainment(20.0, 0.6, 0.98, WorkerRole.DECODE)
    loser = a_candidate(disaggregated(), 10.0, winner=winner, at_winners_rate=seen)
    assert loser.reasons[1] == (
        "At 20.0 requests/s it meets both objectives for 60 %: TTFT is missed by 40 %, TPOT by 2 %."
    )
    close = a_candidate(disaggregated(), 19.5, winner=winner, at_winners_rate=seen)
    assert close.reasons[1].endswith("Its confidence interval overlaps the winner's.")


@pytest.mark.parametrize(
    ("apart_rate", "together_rate", "text", "is_clear"),
    [
        (
            30.0,
            20.0,
            "Disaggregate: 1 x P(TP1) + 1 x D(TP1) serves 30.0 requests/s within the SLO, 50 % more",
            True,
        ),
        (
            20.0,
            25.0,
            "Serve colocated: 2 x M(TP1) serves 25.0 requests/s within the SLO, 25 % more",
            True,
        ),
        (
            20.0,
            20.4,
            "Serve colocated: 2 x M(TP1) serves 20.4 requests/s within the SLO, 2 % more",
            False,
        ),
    ],
)
def test_the_verdict_is_one_sentence(apart_rate: float, together_rate: float, text: str, is_clear: bool) -> None:
    candidates = [a_candidate(disaggregated(), apart_rate), a_candidate(colocated(2), together_rate)]
    verdict = verdict_of(QUESTION, candidates)
    assert verdict.text.startswith(text)
    assert verdict.is_clear is is_clear
    assert verdict.text.endswith("overlap.") is not is_clear
    assert verdict.gain == pytest.approx(apart_rate / together_rate - 1)
    assert verdict.serve_colocated == (together_rate > apart_rate)


def test_with_one_kind_only_the_verdict_says_so() -> None:
    verdict = verdict_of(QUESTION, [a_candidate(colocated(2), 20.0)])
    assert verdict.text == "Only colocated layouts fit and meet the SLO here; the best is 2 x M(TP1)."
    assert (verdict.gain, verdict.serve_colocated) == (None, True)


def test_a_rate_next_to_nothing_is_told_with_its_cause_and_not_as_a_percentage() -> None:
    candidates = [a_candidate(colocated(2), 20.0), a_candidate(disaggregated(), 0.25)]
    slow = replace(candidates[1], estimate=replace(candidates[1].estimate, is_pull_too_long=True))
    start = (
        "Serve colocated: 2 x M(TP1) serves 20.0 requests/s within the SLO; the best disaggregated layout, "
        "1 x P(TP1) + 1 x D(TP1), reaches 0.25 requests/s"
    )
    assert verdict_of(QUESTION, candidates).text == f"{start}."
    slow_text = verdict_of(QUESTION, [candidates[0], slow]).text
    assert slow_text == f"{start}: its mean pull of KV takes longer than TPOT leaves a mean answer."


def test_a_kind_that_meets_the_slo_at_no_simulated_rate_is_named() -> None:
    failed = a_candidate(disaggregated(), 0.0)
    assert failed.reasons[0] == "No rate that was simulated meets both objectives."
    text = verdict_of(QUESTION, [a_candidate(colocated(2), 20.0), failed]).text
    assert text.endswith(" Of disaggregated ones, 1 x P(TP1) + 1 x D(TP1) meets it at no rate that was simulated.")


@pytest.mark.parametrize(("network_bandwidth", "is_too_long"), [(50e9, False), (1e7, True)])
def test_pulls_that_take_longer_than_tpot_leaves_are_known(network_bandwidth: float, is_too_long: bool) -> None:
    slow = replace(H100, network_bandwidth=network_bandwidth)
    prefill, decode = (replace(a_pool(role), hardware=slow) for role in (WorkerRole.PREFILL, WorkerRole.DECODE))
    layout = Layout(prefill=prefill, decode=decode, hosts=(((0,),), ((1,),)))
    assert Estimator(LLAMA_3_8B, DEMAND, SLO).estimate(layout).is_pull_too_long is is_too_long


@pytest.mark.parametrize(
    ("objective", "text", "gain"),
    [
        (
            Objective.RATE,
            "Disaggregate: 2 x P(TP1) + 2 x D(TP1) serves 30.0 requests/s within the SLO, 50 % more than the best "
            "colocated layout, 2 x M(TP1), with 4 devices instead of 2.",
            0.5,
        ),
        (
            Objective.RATE_PER_DEVICE,
            "Serve colocated: 2 x M(TP1) serves 20.0 requests/s within the SLO, 33.3 % more per device than the best "
            "disaggregated layout, 2 x P(TP1) + 2 x D(TP1).",
            -0.25,
        ),
        (
            Objective.FEWEST_DEVICES,
            "Serve colocated: 2 x M(TP1) serves 20.0 requests/s within the SLO with 2 devices; the best disaggregated "
            "layout, 2 x P(TP1) + 2 x D(TP1), takes 4.",
            -0.5,
        ),
        (
            Objective.LEAST_COST,
            "Serve colocated: 2 x M(TP1) serves 20.0 requests/s within the SLO for $6.00 an hour; the best "
            "disaggregated layout, 2 x P(TP1) + 2 x D(TP1), costs $12.00.",
            -0.5,
        ),
    ],
)
def test_unequal_sizes_are_compared_by_what_was_asked(objective: Objective, text: str, gain: float) -> None:
    question = replace(QUESTION, objective=objective, rate=15.0)
    verdict = verdict_of(question, [a_candidate(disaggregated(2, 2), 30.0), a_candidate(colocated(2), 20.0)])
    assert verdict.text == text
    assert verdict.gain == pytest.approx(gain)
    assert verdict.is_clear
    assert verdict.serve_colocated == text.startswith("Serve colocated")


def test_a_layout_that_does_not_serve_the_rate_is_not_the_cheaper_one() -> None:
    question = replace(QUESTION, objective=Objective.FEWEST_DEVICES, rate=25.0)
    candidates = [a_candidate(disaggregated(2, 2), 25.2), a_candidate(colocated(2), 20.0)]
    assert verdict_of(question, candidates).text.startswith("Disaggregate: 2 x P(TP1) + 2 x D(TP1)")
    # Of those that do, the cheaper one may be unsure to.
    unsure = verdict_of(replace(question, rate=19.8), candidates)
    assert unsure.text.endswith("the former's confidence interval reaches below the rate that was asked.")
    assert not unsure.is_clear


def test_a_loser_that_serves_the_rate_says_what_it_takes() -> None:
    question = replace(QUESTION, objective=Objective.FEWEST_DEVICES, rate=15.0)
    winner = a_candidate(colocated(2), 20.0, question=question)
    loser = a_candidate(disaggregated(2, 2), 30.0, question=question, winner=winner)
    assert loser.reasons[-1] == "It takes 4 devices, the winner 2."
    question = replace(question, objective=Objective.LEAST_COST)
    loser = a_candidate(disaggregated(2, 2), 30.0, question=question, winner=winner)
    assert loser.reasons[-1] == "It costs $12.00 an hour, the winner $6.00."
    slow = a_candidate(disaggregated(2, 2), 10.0, question=question, winner=winner)
    assert "costs" not in slow.reasons[-1]
    equal = a_candidate(disaggregated(), 18.0, question=question, winner=winner)
    assert "costs" not in equal.reasons[-1]
