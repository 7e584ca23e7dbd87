"""Attainment of a plan's contenders at rates around their goodput, for the curves of its report.

The search tries few rates, and stops most of them early; a curve wants rates that are run to their end.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.planner.attainment import Attainment
from pdserve.planner.crew import AttainJob, Crew
from pdserve.planner.goodput import Trial, Workload
from pdserve.planner.plan import Candidate, Question

_SHARES_OF_GOODPUT = (0.4, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3)
_MAX_REQUESTS = 600
"""Of each run: a curve may be a little rougher than a goodput."""


def attainment_curves(
    question: Question, candidates: Sequence[Candidate], workload: Workload, *, num_processes: int
) -> list[list[Attainment]]:
    """What each candidate makes of rates from well below its goodput to well above; one run each, on one seed."""
    trials = [_trial(question, candidate) for candidate in candidates]
    jobs = [
        AttainJob(trial, candidate.rate * share)
        for trial, candidate in zip(trials, candidates, strict=True)
        for share in _SHARES_OF_GOODPUT
    ]
    with Crew(workload, num_processes) as crew:
        seen = crew.attainments(jobs, lambda num_done: None)
    length = len(_SHARES_OF_GOODPUT)
    return [seen[start : start + length] for start in range(0, len(seen), length)]


def _trial(question: Question, candidate: Candidate) -> Trial:
    effort = question.effort
    return Trial(
        model=question.model,
        layout=candidate.layout,
        slo=question.slo,
        num_requests=min(effort.final_requests, _MAX_REQUESTS),
        seeds=effort.seeds[:1],
        is_finite=effort.is_finite,
    )
