"""Sensitivity of a plan: the rate at which the winner saturates, and the effect of faster or slower steps.

`pdserve.planner.search.search` runs the simulations.
"""

from __future__ import annotations

from dataclasses import replace

from pdserve.planner.search.goodput import Goodput, Search, Trial, answered, search_fall
from pdserve.planner.search.plan import Sensitivity
from pdserve.planner.search.rates import bracketing

TIME_FACTORS = (0.9, 1.1)
_TOLERANCE = 1.05
_MOST_SATURATION_RUNS = 10


def search_saturation(trial: Trial, goodput: Goodput) -> Search[float]:
    """Rate at which the winner attains half of its target, or has no steady state.

    Args:
        trial: that found its ``goodput``, which is above 0.
    """
    trial = replace(trial, slo=replace(trial.slo, attainment=goodput.target / 2))
    points = {point.rate: point for point in goodput.points}
    return (
        yield from search_fall(trial, goodput.rate, points, lambda seen: seen.share, _TOLERANCE, _MOST_SATURATION_RUNS)
    )


def search_sensitivity(trial: Trial, goodput: Goodput, factor: float) -> Search[Sensitivity]:
    """Goodput of the winner if steps and transfers take ``factor`` times as long.

    As the objectives stay, it changes by more than their time, if little: in proportion to that, the known goodput is a
    bound of it, which takes no run, and the other bound is near.
    """
    slow = replace(trial, layout=trial.layout.slowed(factor))
    bound = goodput.rate / factor
    beyond = bound * _TOLERANCE
    if factor < 1:
        rates = bracketing(beyond, _TOLERANCE, _TOLERANCE, low=bound)
    else:
        rates = bracketing(bound, _TOLERANCE, _TOLERANCE, high=beyond)
    rate = yield from answered(rates, slow, goodput.is_met, {})
    return Sensitivity(factor, rate)
