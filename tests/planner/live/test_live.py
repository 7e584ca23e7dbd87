from __future__ import annotations

import numpy as np
import pytest

from pdserve.contracts import metrics
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.live.live import LiveError, observe
from pdserve.proto.v1 import worker_pb2
from pdserve.router.cluster.worker_metrics import WorkerMetrics
from pdserve.router.metrics import RouterMetrics
from tests.router.records import answer_record
from tests.scrape import scrape


class Router:
    """The metrics of a router, and requests that it pretends to have served."""

    def __init__(self, *, has_workers: bool = True) -> None:
        self.metrics = RouterMetrics(SloConfig(ttft_seconds=0.25, tpot_seconds=0.05), has_workers=has_workers)
        for index, role in enumerate((WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.DECODE)):
            WorkerMetrics(self.metrics, f"worker-{index}", role).came_up(worker_pb2.Welcome(), None)
        WorkerMetrics(self.metrics, "lost", WorkerRole.DECODE).went_down()

    def serve(
        self, num_prompt_tokens: int, num_output_tokens: int, *, ttft_s: float = 0.1, num_cached: int = 0
    ) -> None:
        self.metrics[metrics.REQUEST_PROMPT_TOKENS].observe(num_prompt_tokens)
        self.metrics[metrics.PROMPT_TOKENS].inc(num_prompt_tokens)
        self.metrics[metrics.CACHED_PROMPT_TOKENS].inc(num_cached)
        self.metrics.answered(answer_record(ttft_s, [0.01] * (num_output_tokens - 1)))

    @property
    def text(self) -> str:
        return scrape(self.metrics)


def test_only_what_came_between_the_scrapes_counts() -> None:
    router = Router()
    router.serve(60_000, 7, ttft_s=9.0)
    before = router.text
    for _ in range(30):
        router.serve(300, 20)
    for _ in range(10):
        router.serve(1000, 1, ttft_s=0.3, num_cached=500)
    traffic = observe(before, router.text, 8.0)
    assert traffic.num_requests == 40
    assert traffic.requests_per_s == 5
    assert traffic.prompt_tokens.mean == 475
    assert traffic.output_tokens.mean == 15.25
    assert traffic.cached_share == pytest.approx(5000 / 19000)
    assert traffic.attainment == 0.75
    assert traffic.num_workers == {WorkerRole.PREFILL: 1, WorkerRole.DECODE: 2, WorkerRole.MIXED: 0}


def test_the_traffic_of_several_routers_is_added() -> None:
    first, second = Router(), Router(has_workers=False)
    before = first.text + second.text
    first.serve(300, 20)
    second.serve(500, 20, ttft_s=9.0)
    traffic = observe(before, first.text + second.text, 2.0)
    assert traffic.requests_per_s == 1
    assert traffic.prompt_tokens.mean == 400
    assert traffic.attainment == 0.5
    assert traffic.num_workers[WorkerRole.DECODE] == 2, "each worker once"


def test_lengths_are_drawn_like_those_observed() -> None:
    router = Router()
    before = router.text
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 2000).astype(int) + 1
    for length in lengths:
        router.serve(int(length), 20)
    drawn = observe(before, router.text, 1.0).prompt_tokens.draw(20_000, np.random.default_rng(1))
    assert drawn.min() >= 1
    for percentile in (10, 50, 90):
        assert np.percentile(drawn, percentile) == pytest.approx(np.percentile(lengths, percentile), rel=0.1)
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.01)


def test_a_prompt_beyond_the_last_bucket_counts() -> None:
    router = Router()
    before = router.text
    router.serve(10**6, 20)
    histogram = observe(before, router.text, 1.0).prompt_tokens
    assert sum(histogram.counts) == 1
    assert histogram.draw(10, np.random.default_rng(0)).mean() == pytest.approx(10**6, rel=0.01)


def test_the_same_seed_draws_the_same_lengths() -> None:
    router = Router()
    before = router.text
    router.serve(100, 5)
    histogram = observe(before, router.text, 1.0).prompt_tokens
    draws = [histogram.draw(100, np.random.default_rng(3)).tolist() for _ in range(2)]
    assert draws[0] == draws[1]
    assert np.mean(draws[0]) == pytest.approx(100, abs=1)


def test_without_requests_there_is_nothing_to_plan_by() -> None:
    text = Router().text
    with pytest.raises(LiveError, match="received no requests"):
        observe(text, text, 1.0)


def test_a_restarted_router_is_noticed() -> None:
    router = Router()
    router.serve(100, 5)
    router.serve(100, 5)
    fresh = Router()
    fresh.serve(100, 5)
    with pytest.raises(LiveError, match="restarted"):
        observe(router.text, fresh.text, 1.0)


@pytest.mark.parametrize("text", ["<html>", "up 1\n"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(LiveError, match="admin address"):
        observe(text, text, 1.0)
