"""What Prometheus reads of a router."""

from __future__ import annotations

from prometheus_client import generate_latest

from pdserve.router.metrics import RouterMetrics


def scrape(metrics: RouterMetrics) -> str:
    """Text of all series."""
    metrics.refresh()
    return generate_latest(metrics.registry).decode()
