"""How much longer the steps of a running cluster take than its cost model predicts, watched over a while.

Each worker keeps the ratio itself, for the router, which scales its predictions by it; here it is read from the
router's status and averaged.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import httpx

from pdserve.contracts.placement import WorkerRole

SAMPLE_S = 0.25

StepTimeRatios = dict[WorkerRole, float]
"""Observed over predicted time of the steps that each role is there for."""


@contextmanager
def watched_step_times(admin_url: str) -> Iterator[StepTimeRatios]:
    """What is yielded holds the ratios once the context has ended.

    Raises:
        httpx.HTTPError: nobody answered at ``admin_url``.
    """
    seen: defaultdict[WorkerRole, list[float]] = defaultdict(list)
    ratios: StepTimeRatios = {}
    is_over = threading.Event()
    failures: list[httpx.HTTPError] = []

    def sample() -> None:
        try:
            with httpx.Client(base_url=admin_url, trust_env=False) as client:
                while not is_over.wait(SAMPLE_S):
                    for role, ratio in ratios_of(client.get("/status").raise_for_status().json()):
                        seen[role].append(ratio)
        except httpx.HTTPError as error:
            failures.append(error)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield ratios
    finally:
        is_over.set()
        thread.join()
    if failures:
        raise failures[0]
    ratios.update({role: fmean(of_role) for role, of_role in seen.items()})


def ratios_of(status: Mapping[str, Any]) -> Iterator[tuple[WorkerRole, float]]:
    """Of each worker that is up, by the router's `/status`; 1 where it has made no step yet."""
    for worker in status["workers"]:
        if worker["up"]:
            role = WorkerRole(worker["role"])
            steps = "decode" if role is WorkerRole.DECODE else "prefill"
            yield role, worker["load"][f"{steps}_correction"] or 1.0
