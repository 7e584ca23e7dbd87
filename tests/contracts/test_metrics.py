"""Metric names and buckets follow the conventions that dashboards rely on."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from pdserve.contracts import metrics
from pdserve.contracts.metrics import FAMILIES, Histogram, Metric

HISTOGRAMS = [metric for metric in FAMILIES if isinstance(metric, Histogram)]


def test_names_are_unique() -> None:
    assert len({metric.name for metric in FAMILIES}) == len(FAMILIES) > 20


@pytest.mark.parametrize("metric", FAMILIES, ids=lambda metric: metric.name)
def test_names_have_the_prefix_and_no_reserved_suffix(metric: Metric) -> None:
    assert re.fullmatch(r"pdserve(_[a-z]+)+", metric.name)
    # The client library and the exposition format add these themselves.
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_created", "_info"))
    # Base units only.
    assert not re.search(r"_(ms|us|milliseconds|microseconds|kib|mib|gib|kb|mb|gb|percent)(_|$)", metric.name)


@pytest.mark.parametrize("metric", FAMILIES, ids=lambda metric: metric.name)
def test_help_is_a_sentence_and_labels_are_names(metric: Metric) -> None:
    assert metric.help.endswith(".")
    assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)
    # These belong to histograms and summaries.
    assert not {"le", "quantile"} & set(metric.labels)
    assert len(set(metric.labels)) == len(metric.labels)


@pytest.mark.parametrize("metric", HISTOGRAMS, ids=lambda metric: metric.name)
def test_buckets_rise_from_above_zero(metric: Histogram) -> None:
    assert metric.buckets[0] > 0
    assert all(low < high for low, high in pairwise(metric.buckets))


def test_latency_buckets_cover_the_default_objectives() -> None:
    """A histogram tells whether an objective is met only where a bucket ends near it."""
    assert 0.25 in metrics.TTFT_BUCKETS_S
    assert any(0.04 <= bound <= 0.06 for bound in metrics.ITL_BUCKETS_S)
