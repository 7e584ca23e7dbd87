"""Prefixes that simulated workers pull from each other's prefix caches."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from pdserve.contracts.deployment import SloConfig
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.planner.simulate.simulated_transfers import SimulatedTransfers
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import Segment, SimulatedRequest
from pdserve.router.requests.prefix_sources import PrefixSources
from tests.planner.stand_ins import LLAMA_3_8B, disaggregated

MODEL = replace(LLAMA_3_8B, max_model_len=32_768)
SLO = SloConfig(ttft_seconds=2.0, tpot_seconds=0.05)


def documents(num_documents: int, num_questions: int) -> list[SimulatedRequest]:
    """One question about each document of 24,000 tokens, and a second later all others within 0.3 s."""
    random, requests = np.random.default_rng(0), list[SimulatedRequest]()
    for document in range(num_documents):
        for question in range(num_questions):
            arrived_s = 2.0 * document + (1.0 + random.uniform(0, 0.3) if question else 0.0)
            own = Segment(1000 + len(requests), int(random.integers(750, 2250)))
            segments = Segment(document, 24_000), own
            requests.append(SimulatedRequest(arrived_s, 24_000 + own.num_tokens, 30, segments))
    return sorted(requests, key=lambda each: each.arrived_s)


def served(requests: list[SimulatedRequest], *, pulls_prefixes: bool) -> RequestTimes:
    with patch.object(PrefixSources, "of", PrefixSources.of if pulls_prefixes else lambda *_: None):
        return simulate(MODEL, disaggregated(4, 4), requests, slo=SLO).times


def test_questions_about_one_document_spill_to_workers_that_pull_it() -> None:
    requests = documents(10, 16)
    without, times = served(requests, pulls_prefixes=False), served(requests, pulls_prefixes=True)
    assert not times.is_rejected.any()
    assert times.ttft_s.mean() < 0.6 * without.ttft_s.mean()
    assert times.num_cached_tokens.sum() > without.num_cached_tokens.sum()


@pytest.mark.parametrize("trouble", ["the source lends nothing", "the source is slow"])
def test_a_prefix_that_does_not_come_is_computed(trouble: str) -> None:
    lend, num_asked = Scheduler.lend, 0

    def refuse(scheduler: Scheduler, handle: bytes, hashes: tuple[bytes, ...]) -> None:
        nonlocal num_asked
        num_asked += 1
        if trouble == "the source lends nothing":
            lend(scheduler, handle, ())

    requests = documents(4, 16)
    with patch.object(Scheduler, "lend", refuse):
        times = served(requests, pulls_prefixes=True)
    assert num_asked > 3
    assert not times.is_rejected.any()
    assert not np.isnan(times.last_token_s).any()
    assert times.ttft_s.mean() < 2 * served(requests, pulls_prefixes=False).ttft_s.mean()


def test_every_loan_ends() -> None:
    made = list[SimulatedTransfers]()
    start = SimulatedTransfers.start_pull

    def remember(transfers: SimulatedTransfers, *arguments: object) -> None:
        made.append(transfers)
        start(transfers, *arguments)  # type: ignore[arg-type]

    with patch.object(SimulatedTransfers, "start_pull", remember):
        served(documents(4, 16), pulls_prefixes=True)
    assert made[0]._num_loans > 3
    assert not made[0]._loans
    assert not made[0]._offers
