"""How much longer the steps of a running cluster take than its cost model predicts, over a while.

The router's metrics count both, for each worker; what grew between two looks at them is compared. Whole sums, because
a few long steps are most of what requests wait for, and short ones most of the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pdserve.contracts import metrics
from pdserve.contracts.placement import WorkerRole

StepTimeRatios = dict[WorkerRole, float]
"""Observed over predicted time of the steps of each role that made any."""

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
    roles = [role for name, role in grown if name == _PREDICTED and grown[name, role] > 0]
    return {role: grown[_OBSERVED, role] / grown[_PREDICTED, role] for role in roles}


def _seconds(text: str) -> dict[tuple[str, WorkerRole], float]:
    """Both sums, of all workers of a role."""
    seconds: defaultdict[tuple[str, WorkerRole], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in (_OBSERVED, _PREDICTED):
                seconds[sample.name, WorkerRole(sample.labels["role"])] += sample.value
    return seconds


def _metrics(admin_url: str) -> str:
    return httpx.get(f"{admin_url}/metrics", trust_env=False).raise_for_status().text
