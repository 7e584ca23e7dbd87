"""Searches of a rate: bracket the highest one that meets a target, and interpolate where a figure falls to it.

Pure: `pdserve.planner.search.goodput` simulates at the rates, `pdserve.loadgen.sweep` measures at them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from itertools import pairwise
from math import exp, inf, log, sqrt
from typing import TypeVar

from pdserve.planner.simulate.attainment import Attainment

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Result = TypeVar("Result")
_ROUNDING = 1e-9
_LEAST_SHARE = 1 / 200
"""Share of the first rate below which the result counts as 0; a search up ends at its inverse."""


def bracketing(
    start_rate: float, step: float, tolerance: float, *, low: float = 0.0, high: float = inf, most: float = inf
) -> Generator[float, bool, float]:
    """Ask of one rate after the other whether it meets the target; return the highest that does, below one that does
    not and is at most ``tolerance`` times as high, or 0 if no rate does. The steps to bracket the result grow from
    ``step``, then the bracket is halved.

    Args:
        low, high: rates that are known to meet and to miss the target.
        most: the search ends at the first rate above it that meets the target.
    """
    assert start_rate > 0
    rate = start_rate
    while not low or high / low > tolerance * (1 + _ROUNDING):
        if (yield rate):
            low = rate
        else:
            high = rate
        if low > min(most, start_rate / _LEAST_SHARE) and high == inf:
            return low
        if high < start_rate * _LEAST_SHARE and not low:
            return 0.0
        if low and high < inf:
            rate = sqrt(low * high)
        else:
            rate = low * step if low else high / step
            step = step**1.5
    return low


def highest_rate(meets: Callable[[float], bool], start_rate: float, step: float, tolerance: float) -> float:
    """The result of `bracketing`, whose questions ``meets`` answers."""
    return carried_out(bracketing(start_rate, step, tolerance), meets)


def carried_out(asking: Generator[Question, Answer, Result], answer: Callable[[Question], Answer]) -> Result:
    """The result of ``asking``, whose questions ``answer`` answers one after the other."""
    try:
        question = next(asking)
        while True:
            question = asking.send(answer(question))
    except StopIteration as stop:
        found: Result = stop.value
        return found


def fall_rate(
    points: Iterable[Attainment],
    rate: float,
    target: float,
    figure: Callable[[Attainment], float] = lambda seen: seen.interval.high,
    tolerance: float = inf,
) -> float:
    """Rate at which ``figure``, by default the upper confidence limit, falls to ``target``: between two simulated
    rates in proportion, beyond the highest one along the line through the last two. If the cluster is saturated at the
    higher one, that, or the middle if the other one is not within ``tolerance``.
    """
    in_order = sorted((point for point in points if point.rate >= rate), key=lambda point: point.rate)
    if len(in_order) < 2 or figure(in_order[0]) <= target:
        return in_order[0].rate if in_order else rate
    pairs = list(pairwise(in_order))
    below, above = next((pair for pair in pairs if figure(pair[1]) < target or pair[1].is_saturated), pairs[-1])
    high, low = figure(below), figure(above)
    if above.is_saturated:
        return above.rate if above.rate <= below.rate * tolerance else sqrt(below.rate * above.rate)
    if high <= low or high <= target:
        return above.rate
    steps = (high - target) / (high - low)
    return below.rate * exp(min(steps, 3.0) * log(above.rate / below.rate))
