"""One-line errors for infeasible questions: the best that is possible, and the remedy.

`pdserve.planner.search.search` raises the errors that these functions return.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.planner.layout import Layout
from pdserve.planner.search.estimates import Estimator
from pdserve.planner.search.goodput import LEAST_RUN, Trial
from pdserve.planner.search.plan import InfeasibleError, InfeasibleRateError, InfeasibleSloError, Question
from pdserve.planner.search.ranking import Entry
from pdserve.planner.wording import rate as rate_words
from pdserve.planner.wording import seconds, share


def slo_infeasible(question: Question, estimator: Estimator, layouts: Sequence[Layout]) -> InfeasibleSloError:
    """Even an idle cluster of any of ``layouts`` is too slow."""
    percent = 100 * question.slo.attainment
    ttft_s = min(estimator.idle_ttft_s(layout, percent) for layout in layouts)
    tpot_s = min(estimator.idle_tpot_s(layout, percent) for layout in layouts)
    best = f"TTFT {seconds(ttft_s)}" + (f" and TPOT {seconds(tpot_s)}" if tpot_s else "")
    return InfeasibleSloError(
        f"the SLO is out of reach: even an idle cluster does not meet {_slo_words(question)}, the best possible here "
        f"is {best}; loosen the SLO, shorten the prompts, or plan for faster devices"
    )


def nothing_met(question: Question, simulated: Sequence[Entry]) -> InfeasibleSloError:
    """No simulated layout met the SLO at any tried rate."""
    seen = [(entry, point) for entry in simulated if entry.goodput for point in entry.goodput.points]
    entry, point = max(seen, key=lambda each: each[1].share)
    surely = f", surely {share(point.interval.low)}," if point.meets(question.slo.attainment) else ""
    return InfeasibleSloError(
        f"the SLO is out of reach: no layout meets {_slo_words(question)} at any rate, the best was "
        f"{share(point.share)}{surely} at {rate_words(point.rate)}, by {entry.layout}; loosen the SLO, "
        "or plan for faster devices"
    )


def too_slow(question: Question, finalists: Sequence[Entry]) -> InfeasibleRateError:
    """The fleet does not serve the required rate."""
    best = max(finalists, key=lambda entry: entry.rate)
    return InfeasibleRateError(
        f"the fleet serves at most {rate_words(best.rate)} within the SLO, with {best.layout}, not the required "
        f"{rate_words(question.rate)}: add devices, or loosen the SLO"
    )


def too_few_requests(entry: Entry, trial: Trial, *, may_draw: bool) -> InfeasibleError:
    """The requests of ``trial`` all arrive too soon to find the goodput of a layout.

    Args:
        may_draw: the workload has more requests than ``trial``.
    """
    run_s, num_requests = LEAST_RUN * trial.run_s, trial.num_requests
    num_enough = max(2 * num_requests, -(-entry.estimate.rate * trial.run_s // 1000) * 1000)
    more = f"--requests {num_enough:.0f}" if may_draw else f"a trace of {num_enough:,.0f} requests"
    offered = rate_words(entry.rate)
    return InfeasibleError(
        f"{num_requests:,} requests are too few to find the highest rate of {entry.layout}: at {offered}, "
        f"which it serves, all arrive within {seconds(num_requests / entry.rate)}, and it takes {seconds(run_s)} to "
        f"reach a steady state; plan with {more} or for fewer devices, or name the rate that it must serve (--rate)"
    )


def _slo_words(question: Question) -> str:
    slo = question.slo
    return (
        f"TTFT {seconds(slo.ttft_seconds)} and TPOT {seconds(slo.tpot_seconds)} for {share(slo.attainment)} of these "
        "requests"
    )
