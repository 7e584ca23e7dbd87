"""Ratio of measured to predicted step times in a running cluster, over a period and within it.

The router's metrics count both, for each worker and kind of step; this module compares their growth between two reads.
It compares sums, because requests wait mostly for a few long steps, while most steps are short.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pdserve.contracts import metrics
from pdserve.contracts.placement import WorkerRole

LOOK_EVERY_S = 0.5
_USUAL_S = 0.01
"""Predicted seconds of steps that took as long as usual, which are counted beside those between two looks: where there
were few, or none, they say little of how fast the cores were."""

Steps = tuple[WorkerRole, str]
"""Steps of one role and kind (`pdserve.router.metrics.STEP_KINDS`)."""
StepTimeRatios = dict[Steps, float]
"""Observed over predicted time of the steps that were made."""

_OBSERVED, _PREDICTED = f"{metrics.STEP_SECONDS.name}_sum", f"{metrics.PREDICTED_STEP_SECONDS.name}_sum"


class _Sums(NamedTuple):
    observed_s: float
    predicted_s: float


_NO_STEPS = _Sums(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class WatchedStepTimes:
    """Reads of the router's metrics."""

    looks: list[tuple[float, str]] = field(default_factory=list)
    """Instants of `time.monotonic`, and what the router said then; at least two."""

    def ratios(self) -> StepTimeRatios:
        """From the first look to the last."""
        made = _made_between(_sums(self.looks[0][1]), _sums(self.looks[-1][1]))
        return {steps: sums.observed_s / sums.predicted_s for steps, sums in made.items()}

    def ratios_over_time(self) -> list[tuple[float, StepTimeRatios]]:
        """From each look to the next, with the instant of the first; the same steps as in `ratios` everywhere."""
        usual = self.ratios()
        found = []
        for (began_s, before), (_, after) in pairwise([(looked_s, _sums(text)) for looked_s, text in self.looks]):
            made = _made_between(before, after)
            ratios = {}
            for steps, ratio in usual.items():
                observed_s, predicted_s = made.get(steps, _NO_STEPS)
                ratios[steps] = (observed_s + _USUAL_S * ratio) / (predicted_s + _USUAL_S)
            found.append((began_s, ratios))
        return found


@contextmanager
def watched_step_times(admin_url: str, every_s: float = LOOK_EVERY_S) -> Iterator[WatchedStepTimes]:
    """Yield an object that holds all reads once the context has ended.

    Raises:
        httpx.HTTPError: nobody answers at ``admin_url``, or no longer.
    """
    times = WatchedStepTimes()
    has_ended = threading.Event()

    def look() -> None:
        text = client.get(f"{admin_url}/metrics").raise_for_status().text
        times.looks.append((time.monotonic(), text))

    def watch() -> None:
        while not has_ended.wait(every_s):
            look()

    with httpx.Client(trust_env=False) as client, ThreadPoolExecutor(1, "step-times") as threads:
        look()
        watching = threads.submit(watch)
        try:
            yield times
        finally:
            has_ended.set()
        watching.result()
        look()


def _made_between(old: dict[Steps, _Sums], new: dict[Steps, _Sums]) -> dict[Steps, _Sums]:
    """By how much the sums of two looks differ, where steps were made."""
    grown = {
        steps: _Sums(*(now - then for now, then in zip(sums, old.get(steps, _NO_STEPS), strict=True)))
        for steps, sums in new.items()
    }
    return {steps: sums for steps, sums in grown.items() if sums.predicted_s > 0}


def _sums(text: str) -> dict[Steps, _Sums]:
    """Sums over all workers of a role."""
    seconds: defaultdict[tuple[str, Steps], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in (_OBSERVED, _PREDICTED):
                seconds[sample.name, (WorkerRole(sample.labels["role"]), sample.labels["kind"])] += sample.value
    return {steps: _Sums(seconds[_OBSERVED, steps], seconds[_PREDICTED, steps]) for _, steps in list(seconds)}
