from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest

pytest.importorskip("numba", reason="the scout needs the planner's extra")

from pdserve.bench.scout_vs_judge import Figures, agrees, cases, draw_case, is_chaotic
from pdserve.contracts.deployment import SloConfig
from pdserve.planner.simulate.simulation import RequestTimes

SLO = SloConfig(ttft_seconds=0.5, tpot_seconds=0.1)


def times_of(ttft_s: list[float], tpot_s: list[float]) -> RequestTimes:
    """Answers of eleven tokens."""
    first_s = np.array(ttft_s)
    zeros = np.zeros(len(ttft_s))
    return RequestTimes(
        arrived_s=zeros,
        started_s=zeros,
        first_token_s=first_s,
        second_token_s=first_s,
        last_token_s=first_s + 10 * np.array(tpot_s),
        num_prompt_tokens=np.full(len(ttft_s), 5),
        num_cached_tokens=np.zeros(len(ttft_s), np.int64),
        num_output_tokens=np.full(len(ttft_s), 11),
        is_rejected=np.isnan(first_s),
    )


def test_a_request_without_an_answer_misses_and_counts_as_infinite() -> None:
    figures = Figures.of(times_of([0.4] * 8 + [0.6] + [nan], [0.05] * 10), SLO)
    assert (figures.attainment, figures.ttft_p90, figures.tpot_p90) == pytest.approx((80.0, 600.0, 50.0))
    assert Figures.of(times_of([0.4] * 4 + [nan] * 6, [0.05] * 10), SLO).ttft_p90 == inf


@pytest.mark.parametrize(
    ("name", "value", "is_close"),
    [("attainment", 92, True), ("attainment", 93, False), ("ttft_p90", 104, True), ("ttft_p90", 106, False),
     ("tpot_p90", 19.1, True), ("tpot_p90", 18.9, False), ("tpot_p90", inf, False)],
)  # fmt: skip
def test_each_figure_has_its_limit(name: str, value: float, is_close: bool) -> None:
    judge = Figures(attainment=90.0, ttft_p90=100.0, tpot_p90=20.0)
    assert agrees(replace(judge, **{name: value}).disagreement(judge)) is is_close
    both = Figures(attainment=90.0, ttft_p90=inf, tpot_p90=20.0)
    assert agrees(both.disagreement(both)), "infinite in both"


def test_a_case_is_its_number_and_seed_and_can_be_run_alone() -> None:
    first, second = cases(2, 60, 7, only=None)
    (again,) = cases(1, 60, 7, only=second.number)
    assert (str(again), again.sample.conversations) == (str(second), second.sample.conversations)
    assert str(first) != str(second)
    assert str(draw_case(first.number, 8, 60)) != str(first)


def test_scout_and_judge_get_the_same_requests() -> None:
    (case,) = cases(1, 60, 7, only=None)
    scouted, judged = case.scouted().times, case.judged()
    for name in ("arrived_s", "num_prompt_tokens", "num_output_tokens"):
        np.testing.assert_allclose(getattr(scouted, name), getattr(judged, name))
    for later, own in ((case.judged(1e-5), judged), (case.scouted(1e-5).times, scouted)):
        assert later.started_s[0] == pytest.approx(own.started_s[0] + 1e-5, abs=1e-9)


def test_a_case_is_chaotic_if_either_differs_from_itself_a_little_later() -> None:
    (case,) = cases(1, 60, 7, only=None)
    calm = replace(case, rate=case.rate / 10)
    scouted, judged = (Figures.of(times, calm.slo) for times in (calm.scouted().times, calm.judged()))
    assert not is_chaotic(calm, scouted, judged)
    assert is_chaotic(calm, replace(scouted, ttft_p90=1.1 * scouted.ttft_p90), judged)
    assert is_chaotic(calm, scouted, replace(judged, attainment=judged.attainment - 3))
