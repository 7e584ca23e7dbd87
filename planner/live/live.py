"""Observes the traffic of a running cluster as the difference between two scrapes of the router's metrics.

The search can then plan for a workload that resembles it. Parses text only; the caller fetches it. Prompt and answer
lengths are drawn independently, because histograms do not record their pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families

from pdserve.contracts import metrics
from pdserve.contracts.metrics import Histogram
from pdserve.contracts.worker_config import WorkerRole

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values by sample name and sorted labels."""


class LiveError(ValueError):
    """The metrics are insufficient; the message names the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthHistogram:
    """Distribution of prompt or answer lengths."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, the last one finite."""
    counts: tuple[float, ...]
    """Per bucket, not cumulative; the last one includes lengths beyond its bound."""
    mean: float

    def draw(self, num_lengths: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Lengths with these bucket shares, log-uniform within a bucket, scaled to the mean; at least 1."""
        bounds = np.array((0.0, *self.bounds))
        shares = np.array(self.counts) / sum(self.counts)
        buckets = random.choice(len(shares), num_lengths, p=shares)
        low, high = np.log(bounds[buckets] + 1), np.log(bounds[buckets + 1])
        lengths = np.exp(low + (high - low) * random.random(num_lengths))
        scaled: npt.NDArray[np.int64] = np.rint(lengths * (self.mean / lengths.mean())).astype(np.int64)
        return np.maximum(scaled, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTraffic:
    """Traffic between two scrapes."""

    seconds: float
    num_requests: int
    prompt_tokens: LengthHistogram
    output_tokens: LengthHistogram
    cached_share: float
    """Share of prompt tokens found in a prefix cache."""
    attainment: float
    """Finished requests that met both objectives; NaN if none finished."""
    num_workers: Mapping[WorkerRole, int]
    """Workers that are up."""

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds


def observe(before: str, after: str, seconds: float) -> ObservedTraffic:
    """The traffic between two scrapes of the router's `/metrics`, or of those of all routers one after the other,
    ``seconds`` apart.

    Raises:
        LiveError: the texts are not pdserve's metrics, the router restarted in between, or it received no requests.
    """
    old, new = _parse(before), _parse(after)
    prompts = _lengths(old, new, metrics.REQUEST_PROMPT_TOKENS)
    num_prompt_tokens = _grown(old, new, f"{metrics.PROMPT_TOKENS.name}_total")
    num_cached = _grown(old, new, f"{metrics.CACHED_PROMPT_TOKENS.name}_total")
    verdicts = {
        labels: value - old.get((name, labels), 0.0)
        for (name, labels), value in new.items()
        if name == f"{metrics.SLO_REQUESTS.name}_total"
    }
    num_met = sum(count for labels, count in verdicts.items() if ("ttft", "met") in labels and _meets_tpot(labels))
    num_finished = sum(verdicts.values())
    return ObservedTraffic(
        seconds=seconds,
        num_requests=round(sum(prompts.counts)),
        prompt_tokens=prompts,
        output_tokens=_lengths(old, new, metrics.REQUEST_OUTPUT_TOKENS),
        cached_share=num_cached / num_prompt_tokens if num_prompt_tokens else 0.0,
        attainment=num_met / num_finished if num_finished else float("nan"),
        num_workers={
            role: sum(
                1
                for (name, labels), value in new.items()
                if name == metrics.WORKER_UP.name and ("role", role.value) in labels and value
            )
            for role in WorkerRole
        },
    )


def _meets_tpot(labels: tuple[tuple[str, str], ...]) -> bool:
    return ("tpot", "missed") not in labels


def _parse(text: str) -> Samples:
    samples: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name, tuple(sorted(sample.labels.items()))] += float(sample.value)
    except ValueError as error:
        raise LiveError(f"these are not Prometheus metrics: {error}; name the router's admin address") from error
    return dict(samples)


def _grown(old: Samples, new: Samples, name: str) -> float:
    if (name, ()) not in new:
        raise LiveError(f"the metrics have no {name}: give the admin address of a pdserve router")
    grown = new[name, ()] - old.get((name, ()), 0.0)
    if grown < 0:
        raise LiveError("the router restarted during the observation: try again")
    return grown


def _lengths(old: Samples, new: Samples, metric: Histogram) -> LengthHistogram:
    num_seen = _grown(old, new, f"{metric.name}_count")
    if not num_seen:
        raise LiveError("the router received no requests during the observation: observe for longer, or under load")
    cumulative = [0.0]
    for bound in (*metric.buckets, float("inf")):
        key = (f"{metric.name}_bucket", (("le", "+Inf" if bound == float("inf") else str(float(bound))),))
        cumulative.append(new.get(key, 0.0) - old.get(key, 0.0))
    counts = [high - low for low, high in pairwise(cumulative)]
    counts[-2] += counts.pop()
    mean = _grown(old, new, f"{metric.name}_sum") / num_seen
    return LengthHistogram(bounds=metric.buckets, counts=tuple(counts), mean=mean)
