from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.planner.attainment import Attainment, Distribution, Interval, PoolUse
from pdserve.planner.bounds import BoundBook, Resource
from pdserve.planner.candidates import assemble, verdict_of
from pdserve.planner.demand import Demand
from pdserve.planner.goodput import Goodput
from pdserve.planner.layout import Layout
from pdserve.planner.plan import Candidate, Question, Supply
from tests.planner.stand_ins import H100, LLAMA_3_8B, SLO, PoissonWorkload, colocated, disaggregated

DEMAND = Demand.of(PoissonWorkload().draw(200, 0).requests, block_size=16, max_model_len=8192)


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
        PoolUse(role=each, busy_share=0.5, mean_batch_size=8.0, kv_share=kv_share, num_preemptions=num_preemptions)
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
) -> Candidate:
    book = BoundBook(LLAMA_3_8B, DEMAND, slo)
    role = WorkerRole.MIXED if layout.is_colocated else WorkerRole.DECODE
    seen = an_attainment(rate, ttft_share, tpot_share, role, kv_share, num_preemptions)
    goodput = Goodput(
        rate=rate,
        interval=Interval(rate * 0.98, rate * 1.02),
        target=0.9,
        num_devices=layout.num_devices,
        points=(seen,),
        num_requests=100,
    )
    return assemble(
        Question(model=LLAMA_3_8B, slo=slo, fleet=(Supply(hardware=H100),)),
        book,
        layout,
        book.bounds(layout),
        goodput,
        None,
        is_final=True,
        at_winners_rate=at_winners_rate,
        cliff_rate=None,
        sensitivity=(),
        winner=winner,
    )


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


def test_prompts_that_are_late_even_on_an_idle_cluster_are_told() -> None:
    assert "idle" not in a_candidate(disaggregated(), 10.0).reasons[0]
    hasty = a_candidate(disaggregated(), 10.0, slo=replace(SLO, ttft_seconds=0.03))
    assert "of the prompts would miss TTFT too" in hasty.reasons[0]


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
    verdict = verdict_of(candidates)
    assert verdict.text.startswith(text)
    assert verdict.is_clear is is_clear
    assert verdict.text.endswith("overlap.") is not is_clear
    assert verdict.gain == pytest.approx(apart_rate / together_rate - 1)
    assert verdict.serve_colocated == (together_rate > apart_rate)


def test_with_one_kind_only_the_verdict_says_so() -> None:
    verdict = verdict_of([a_candidate(colocated(2), 20.0)])
    assert verdict.text == "Only colocated layouts meet the SLO here; the best is 2 x M(TP1)."
    assert (verdict.gain, verdict.serve_colocated) == (None, True)


def test_unequal_sizes_are_compared_per_device() -> None:
    verdict = verdict_of([a_candidate(disaggregated(2, 2), 30.0), a_candidate(colocated(2), 20.0)])
    assert "33.3 % more per device" in verdict.text
    assert verdict.serve_colocated
