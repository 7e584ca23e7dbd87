"""Attainment of a plan's leading candidates at rates around their goodput, for the curves of its report.

The search tries few rates, near the goodput. These runs are as long as the ones that found it, because shorter ones
overstate it, and its results are points of the curves, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pdserve.planner.search.goodput import Runner, Trial, Workload
from pdserve.planner.search.plan import Candidate, Question
from pdserve.planner.search.process_pool import Job, ProcessPool
from pdserve.planner.simulate.attainment import Attainment

_SHARES_OF_GOODPUT = (0.5, 0.8, 0.92, 1.1, 1.3)


def attainment_curves(
    question: Question, candidates: Sequence[Candidate], workload: Workload, *, num_processes: int
) -> list[list[Attainment]]:
    """Attainment of each candidate from well below its goodput to well above, in order of rate.

    Args:
        candidates: simulated ones. Each runs once per rate, in addition to the existing results near its goodput.
    """
    jobs: list[Job[Attainment]] = [
        partial(Runner.attainment, trial=_trial(question, candidate), rate=_middle(candidate) * share)
        for candidate in candidates
        for share in _SHARES_OF_GOODPUT
    ]
    with ProcessPool(workload, num_processes) as pool:
        seen = pool.run(jobs)
    length = len(_SHARES_OF_GOODPUT)
    return [
        sorted([*seen[row * length : (row + 1) * length], *_precise(candidate)], key=lambda point: point.rate)
        for row, candidate in enumerate(candidates)
    ]


def _points(candidate: Candidate) -> Sequence[Attainment]:
    assert candidate.goodput is not None, "only simulated candidates have curves"
    return candidate.goodput.points


def _middle(candidate: Candidate) -> float:
    """The goodput; the lowest simulated rate if it is 0."""
    return candidate.rate or _points(candidate)[0].rate


def _precise(candidate: Candidate) -> list[Attainment]:
    """Results with the most seeds."""
    points = _points(candidate)
    most = max(point.num_runs for point in points)
    return [point for point in points if point.num_runs == most]


def _trial(question: Question, candidate: Candidate) -> Trial:
    point = _points(candidate)[0]
    return Trial(
        model=question.model,
        layout=candidate.layout,
        slo=question.slo,
        num_requests=point.num_requests // point.num_runs,
        seeds=question.effort.seeds[:1],
        is_scouted=candidate.goodput is not None and candidate.goodput.is_scouted,
    )
