"""Closed-form pull rate that the links between a layout's prefill and decode workers carry.

Used by `pdserve.planner.search.estimates`. Each worker, or each micro-batch of a pipeline, has one link that serialises
its pulls (`pdserve.planner.simulate.simulated_transfers`); the time of a pull depends on whether both ends share a
host.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pdserve.planner.layout import Hosts, Layout


class PullTimes(NamedTuple):
    """Seconds of a pull of mean length."""

    near_s: float
    """Within a host."""
    far_s: float
    """Over the network."""


def even_per_s(layout: Layout, times: PullTimes) -> float:
    """Pulls per second if every prefill worker's prompts go to all decode workers equally: under load, the policy
    balances load rather than saving network traffic."""
    senders, takers = _wires(layout)
    num_pairs = senders.total() * takers.total()
    near_share = sum(count * takers[hosts] for hosts, count in senders.items()) / num_pairs
    mean_s = near_share * times.near_s + (1 - near_share) * times.far_s
    return min(senders.total(), takers.total()) / mean_s


def _wires(layout: Layout) -> tuple[Counter[Hosts], Counter[Hosts]]:
    """Links of the prefill and of the decode workers, by their hosts."""
    hosts = layout.worker_hosts
    senders, takers = (
        Counter({place: count * pool.pipeline_parallel for place, count in Counter(hosts[pool.role]).items()})
        for pool in (layout.prefill, layout.decode)
        if pool is not None
    )
    return senders, takers
