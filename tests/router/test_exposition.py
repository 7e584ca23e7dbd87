"""Text of metrics, read back by Prometheus' own parsers, which are strict about the format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pdserve.contracts.metrics import Metric
from pdserve.router.exposition import OPEN_METRICS, TEXT, Registry

REQUESTS = Metric("counter", "pdserve_some_requests", "Requests.", ("path",))
IN_FLIGHT = Metric("gauge", "pdserve_some_in_flight", "Requests in flight.")
SECONDS = Metric("histogram", "pdserve_some_seconds", "Seconds.", ("role",), (0.1, 1.0))
ODD = 'a"b\\c\nd'


@pytest.mark.parametrize(("content_type", "parse"), [(TEXT, parse_text), (OPEN_METRICS, parse_open_metrics)])
def test_both_formats_hold_the_same(content_type: str, parse: Callable[[str], object]) -> None:
    registry = Registry()
    registry.counter(REQUESTS).labels(ODD).inc(2)
    registry.gauge(IN_FLIGHT).labels().set_function(lambda: 3)
    histogram = registry.histogram(SECONDS).labels("decode")
    for value in (0.1, 0.5, 7.0):
        histogram.observe(value)
    text = registry.render(content_type).decode()
    families = {family.name: family for family in parse(text)}  # type: ignore[attr-defined]
    assert [families[metric.name].type for metric in (REQUESTS, IN_FLIGHT, SECONDS)] == [
        "counter",
        "gauge",
        "histogram",
    ]
    samples = {(each.name, *each.labels.values()): each.value for each in families[SECONDS.name].samples}
    assert samples == {
        ("pdserve_some_seconds_bucket", "decode", "0.1"): 1,
        ("pdserve_some_seconds_bucket", "decode", "1.0"): 2,
        ("pdserve_some_seconds_bucket", "decode", "+Inf"): 3,
        ("pdserve_some_seconds_count", "decode"): 3,
        ("pdserve_some_seconds_sum", "decode"): 7.6,
    }
    [counted] = families[REQUESTS.name].samples
    assert (counted.name, counted.labels, counted.value) == ("pdserve_some_requests_total", {"path": ODD}, 2)
    assert families[IN_FLIGHT.name].samples[0].value == 3


def test_a_bucket_names_its_last_request_where_the_format_has_room() -> None:
    registry = Registry()
    histogram = registry.histogram(SECONDS).labels("decode")
    histogram.observe(0.5, 'id-"1"')
    histogram.observe(0.6, "id-2")
    histogram.observe(9.0)
    [family] = parse_open_metrics(registry.render(OPEN_METRICS).decode())  # type: ignore[no-untyped-call]
    named = {each.labels["le"]: each.exemplar for each in family.samples if each.exemplar}
    assert [(bound, each.labels, each.value) for bound, each in named.items()] == [("1.0", {"request_id": "id-2"}, 0.6)]
    assert "id-2" not in registry.render().decode()


def test_removed_series_are_gone() -> None:
    registry = Registry()
    family = registry.counter(REQUESTS)
    family.labels("a").inc()
    family.labels("b").inc()
    family.remove("a")
    assert [labels for labels, _ in family.items()] == [("b",)]
    assert 'path="a"' not in registry.render().decode()
