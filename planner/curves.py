"""Attainment of a plan's leading candidates at rates around their goodput, for the curves of its report.

The search tries few rates and stops most of them early; a curve needs runs that reach their end. These runs are as
long as the ones that found the goodput, because shorter ones overstate it, and reuse their results as points.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.planner.attainment import Attainment
from pdserve.planner.goodput import Trial, Workload
from pdserve.planner.plan import Candidate, Question
from pdserve.planner.process_pool import AttainJob, ProcessPool

_SHARES_OF_GOODPUT = (0.5, 0.8, 0.92, 1.1, 1.3)


def attainment_curves(
    question: Question, candidates: Sequence[Candidate], workload: Workload, *, num_processes: int
) -> list[list[Attainment]]:
    """Attainment of each candidate from well below its goodput to well above, in order of rate.

    Args:
        candidates: simulated ones. Each runs once per rate, in addition to the existing results near its goodput.
    """
    trials = [_trial(question, candidate) for candidate in candidates]
    jobs = [
        AttainJob(trial, (candidate.rate or _judged_by(candidate)[0].rate) * share)
        for trial, candidate in zip(trials, candidates, strict=True)
        for share in _SHARES_OF_GOODPUT
    ]
    with ProcessPool(workload, num_processes) as pool:
        seen = pool.attainments(jobs, lambda num_done: None)
    length = len(_SHARES_OF_GOODPUT)
    return [
        sorted([*seen[row * length : (row + 1) * length], *_judged_by(candidate)], key=lambda point: point.rate)
        for row, candidate in enumerate(candidates)
    ]


def _judged_by(candidate: Candidate) -> list[Attainment]:
    """Results with the most seeds, which enclose the goodput; at least one."""
    goodput = candidate.goodput
    assert goodput is not None, "only simulated candidates have curves"
    at_rate = goodput.at_rate
    if at_rate is None:
        return [goodput.points[0]]
    return [point for point in goodput.points if not point.is_partial and point.num_runs == at_rate.num_runs]


def _trial(question: Question, candidate: Candidate) -> Trial:
    effort = question.effort
    judged = _judged_by(candidate)[0]
    return Trial(
        model=question.model,
        layout=candidate.layout,
        slo=question.slo,
        num_requests=judged.num_requests // judged.num_runs,
        seeds=effort.seeds[:1],
        is_finite=effort.is_finite,
    )
