"""Sensitivity of a plan: the rate at which the winner saturates, and the effect of faster or slower steps.

`pdserve.planner.search.search` runs the simulations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pdserve.model.cost.hardware import slowed
from pdserve.planner.layout import Layout
from pdserve.planner.search.goodput import Goodput, Trial, find_goodput
from pdserve.planner.search.plan import Sensitivity
from pdserve.planner.search.process_pool import Job

_TIME_FACTORS = (0.9, 1.1)
_SATURATION = 1.1
"""Start rate for saturation, as a multiple of the goodput."""


class SensitivityAnalysis:
    """Analyses one winner. The effect of faster and slower steps is a ratio of goodputs by the first seed alone."""

    def __init__(self, trial: Trial, rate: float) -> None:
        """
        Args:
            trial: of the winner.
            rate: its goodput.
        """
        self._rate = rate
        halved = replace(trial, slo=replace(trial.slo, attainment=trial.slo.attainment / 2))
        trial = replace(trial, seeds=trial.seeds[:1])
        searches = [(halved, rate * _SATURATION), (trial, rate)]
        searches += [(replace(trial, layout=_slowed(trial.layout, factor)), rate / factor) for factor in _TIME_FACTORS]
        self.jobs: list[Job[Goodput]] = [
            partial(find_goodput, trial=each, start_rate=start_rate, step=1.1) for each, start_rate in searches
        ]
        """Simulations to run before `results`."""

    def results(self, goodputs: Sequence[Goodput]) -> tuple[float | None, tuple[Sensitivity, ...]]:
        """Rate at which the winner's attainment falls to half of its target or the cluster saturates, and its goodput
        with faster and slower steps; ``None`` and nothing if one run of the winner meets the target at no rate.

        Args:
            goodputs: results of `jobs`.
        """
        saturation, predicted, *slow = goodputs
        if not predicted.rate:
            return None, ()
        scale = self._rate / predicted.rate
        return max(self._rate, saturation.rate), tuple(
            Sensitivity(factor, scale * each.rate) for factor, each in zip(_TIME_FACTORS, slow, strict=True)
        )


def _slowed(layout: Layout, factor: float) -> Layout:
    """``layout`` with steps and transfers ``factor`` times as long."""
    slow: dict[str, Any] = {
        pool.role.value: replace(pool, hardware=slowed(pool.hardware, factor)) for pool in layout.pools
    }
    return replace(layout, **slow)
