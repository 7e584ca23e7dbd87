"""Figures of ``pdserve top`` against values that are known."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pdserve.contracts import metrics
from pdserve.contracts.deployment import SloConfig
from pdserve.deploy.commands.top import WINDOW_S, Window, draw, read_sample
from pdserve.router.metrics import RouterMetrics

STATUS: dict[str, Any] = {"ready": True, "draining": False, "in_flight": 3, "queued": 1, "workers": []}


def sample(router: RouterMetrics, time_s: float) -> Any:
    return read_sample(router.render().decode(), time_s)


@pytest.fixture
def router() -> RouterMetrics:
    return RouterMetrics(SloConfig(ttft_seconds=0.2, tpot_seconds=0.05, attainment=0.9))


def text_of(window: Window) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(draw(window, STATUS))
    return console.export_text()


def test_only_what_is_new_counts(router: RouterMetrics) -> None:
    router.ttft_seconds.observe(50.0)
    window = Window()
    window.add(sample(router, 100.0))
    for _ in range(100):
        router.ttft_seconds.observe(0.011)
    window.add(sample(router, 110.0))
    bounds = metrics.TTFT_SECONDS.buckets
    assert bounds is not None
    low, high = max(each for each in bounds if each <= 0.011), min(each for each in bounds if each > 0.011)
    assert window.quantile(metrics.TTFT_SECONDS, 0.5) == pytest.approx((low + high) / 2)
    assert window.quantile(metrics.TTFT_SECONDS, 0.99) == pytest.approx(low + 0.99 * (high - low))
    assert window.quantile(metrics.TPOT_SECONDS, 0.5) is None


def test_goodput_and_attainment_count_failures(router: RouterMetrics) -> None:
    window = Window()
    window.add(sample(router, 0.0))
    for ttft, tpot, count in (("met", "met", 6), ("met", "none", 1), ("missed", "met", 2), ("failed", "failed", 1)):
        router.slo_requests.labels(ttft, tpot).inc(count)
    router.output_tokens.inc(500)
    window.add(sample(router, 2.0))
    shown = text_of(window)
    assert "ready: 3 in flight, 1 queued" in shown
    assert "3.5 good requests/s, 250 tokens/s" in shown
    assert "70.0%" in shown
    assert "200.0 ms" in shown
    assert "90%" in shown


def test_one_sample_has_no_rates(router: RouterMetrics) -> None:
    window = Window()
    window.add(sample(router, 5.0))
    assert "0.0 requests/s, 0.0 good requests/s, 0 tokens/s" in text_of(window)


def test_samples_leave_the_window(router: RouterMetrics) -> None:
    window = Window()
    for time_s in range(0, 200, 10):
        router.output_tokens.inc(10)
        window.add(sample(router, float(time_s)))
    assert window.seconds == WINDOW_S
    assert window.rate("pdserve_output_tokens_total") == pytest.approx(1.0)


def test_a_restarted_router_begins_anew(router: RouterMetrics) -> None:
    window = Window()
    router.accepted_requests.inc(7)
    window.add(sample(router, 0.0))
    window.add(sample(RouterMetrics(), 10.0))
    assert window.seconds == 0
