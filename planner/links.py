"""Closed-form bound on the prompts whose KV the links between a layout's prefill and decode workers can carry.

Used by `pdserve.planner.bounds`. Each worker, or each micro-batch of a pipeline, has one link that serialises its pulls
(`pdserve.planner.simulated_transfers`); the time of a pull depends on whether both ends share a host.
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


def most_per_s(layout: Layout, times: PullTimes) -> float:
    """Pulls per second at most: all wires of the phase that has fewer are in use, and on each host as many by the links
    within it as both phases have wires there."""
    senders, takers = _wires(layout)
    num_near = (senders & takers).total()
    num_far = min(senders.total(), takers.total()) - num_near
    is_one_host = len(senders | takers) == 1
    # Who can pull within a host can from another one too, if that is faster.
    near_s = times.near_s if is_one_host else min(times)
    return num_near / near_s + num_far / times.far_s


def even_per_s(layout: Layout, times: PullTimes) -> float:
    """Pulls per second, if every prefill worker's prompts go to all decode workers alike: where there is much to do,
    the policy evens out load more than it spares the network."""
    senders, takers = _wires(layout)
    num_pairs = senders.total() * takers.total()
    near_share = sum(count * takers[hosts] for hosts, count in senders.items()) / num_pairs
    mean_s = near_share * times.near_s + (1 - near_share) * times.far_s
    return min(senders.total(), takers.total()) / mean_s


def _wires(layout: Layout) -> tuple[Counter[Hosts], Counter[Hosts]]:
    """Of the prefill and of the decode workers, by their hosts."""
    hosts = layout.worker_hosts
    senders, takers = (
        Counter({place: count * pool.pipeline_parallel for place, count in Counter(hosts[pool.role]).items()})
        for pool in (layout.prefill, layout.decode)
        if pool is not None
    )
    return senders, takers
