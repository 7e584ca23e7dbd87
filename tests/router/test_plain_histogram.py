"""A plain histogram says the same as one of prometheus_client."""

from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from pdserve.contracts.metrics import Histogram
from pdserve.router.plain_histogram import PlainHistogram

METRIC = Histogram("pdserve_x_seconds", "Help.", ("role",), (0.1, 0.5, 2.0, 2.0**21))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from((0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0)))))
def test_it_says_the_same(observations: list[tuple[str, float]]) -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram(METRIC, registry)
    usual = prometheus_client.Histogram(METRIC.name, METRIC.help, METRIC.labels, buckets=METRIC.buckets, registry=other)
    for role, value in observations:
        plain.labels(role).observe(value)
        usual.labels(role).observe(value)
    expected = [line for line in generate_latest(other).splitlines() if b"_created" not in line]
    assert generate_latest(registry).splitlines() == expected
