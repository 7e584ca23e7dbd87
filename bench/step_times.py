"""How much longer the steps of a running cluster take than its cost model predicts, over a while.

The router's metrics count both, for each worker and kind of step; what grew between two looks at them is compared.
Whole sums, because a few long steps are most of what requests wait for, and short ones most of the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pdserve.contracts import metrics
from pdserve.contracts.placement import WorkerRole

Steps = tuple[WorkerRole, str]
"""Of one role and kind (`pdserve.router.metrics.STEP_KINDS`)."""
StepTimeRatios = dict[Steps, float]
"""Observed over predicted time of the steps that were made."""

_OBSERVED, _PREDICTED = f"{metrics.STEP_SECONDS.name}_sum", f"{metrics.PREDICTED_STEP_SECONDS.name}_total"


@contextmanager
def watched_step_times(admin_url: str) -> Iterator[StepTimeRatios]:
    """What is yielded holds the ratios once the context has ended.

    Raises:
        httpx.HTTPError: nobody answered at ``admin_url``.
    """
    before = _metrics(admin_url)
    ratios: StepTimeRatios = {}
    yield ratios
    ratios.update(ratios_between(before, _metrics(admin_url)))


def ratios_between(before: str, after: str) -> StepTimeRatios:
    """Of what two scrapes of the router's metrics count, the second more than the first."""
    old, new = _seconds(before), _seconds(after)
    grown = {key: seconds - old.get(key, 0.0) for key, seconds in new.items()}
    made = [steps for name, steps in grown if name == _PREDICTED and grown[name, steps] > 0]
    return {steps: grown[_OBSERVED, steps] / grown[_PREDICTED, steps] for steps in made}


def _seconds(text: str) -> dict[tuple[str, Steps], float]:
    """Both sums, of all workers of a role."""
    seconds: defaultdict[tuple[str, Steps], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in (_OBSERVED, _PREDICTED):
                seconds[sample.name, (WorkerRole(sample.labels["role"]), sample.labels["kind"])] += sample.value
    return seconds


def _metrics(admin_url: str) -> str:
    return httpx.get(f"{admin_url}/metrics", trust_env=False).raise_for_status().text
