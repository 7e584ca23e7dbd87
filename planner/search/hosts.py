"""Places a layout's workers on hosts, which decides whether KV moves over links within a host or over the network.

`pdserve.planner.search.layouts` uses it for the search and `pdserve.planner.report.deployment_file` for simulation; a
running cluster reports its hosts (`pdserve.planner.live.running`). `pdserve.deploy.cluster.hosts` places live workers
by the same rule.

- Each host has devices of one kind; a layout takes as few hosts as its workers fit on.
- A stage's tensor-parallel group is on one host, and the stages of a pipeline fill a host before the next one, as
  `pdserve.model.cost.cost_model` assumes.
- Each worker takes the emptiest remaining host, larger workers first. This spreads both phases over all hosts, and as
  many workers as possible share a host with the other phase: the low node affinity of Zhong et al., "DistServe" (OSDI
  2024, section 4.2), without its splitting of both phases' pipelines over the same hosts.
- If the workers do not fit that way, each takes the first host with room, one phase after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.layout import Hosts, Layout, Pool
from pdserve.planner.search.plan import Supply
from pdserve.planner.simulate.attainment import Attainment
from pdserve.planner.wording import ROLE_NAMES, share


def placed(layout: Layout, fleet: Iterable[Supply]) -> Layout:
    """``layout`` with its workers placed on hosts of ``fleet``.

    Raises:
        ValueError: the workers do not fit.
    """
    hosts: dict[WorkerRole, tuple[Hosts, ...]] = {}
    num_taken = 0
    for supply in fleet:
        pools = [pool for pool in layout.pools if pool.hardware.name == supply.hardware.name]
        if pools:
            found = _on_fewest(tuple(pools), supply.num_nodes, supply.devices_per_node, num_taken)
            if found is None:
                raise ValueError(
                    f"{layout} does not fit hosts of {supply.devices_per_node} x {supply.hardware.name}: use more or "
                    "larger ones, or smaller workers"
                )
            hosts |= {pool.role: workers for pool, workers in zip(pools, found.workers, strict=True)}
            num_taken += found.num_hosts
    if num_taken == 1:
        return replace(layout, hosts=())
    return replace(layout, hosts=tuple(hosts[pool.role] for pool in layout.pools))


def host_words(layout: Layout) -> str:
    """The workers of each host: ``4 hosts, by devices: 2 with 8 prefill, 2 with 4 prefill and 4 decode``."""
    kinds = Counter(_devices_by_host(layout).values())
    told = ", ".join(f"{count} with {what}" for what, count in kinds.items())
    return f"{layout.num_hosts} host{'s' * (layout.num_hosts > 1)}, by devices: {told}"


def host_sentence(layout: Layout, seen: Attainment | None) -> str:
    """`host_words` as a sentence, with the share of pulls that crossed the network."""
    crossing = ""
    if seen is not None and layout.spans_hosts:
        crossing = f"; {share(seen.network_share)} of the pulls cross the network"
    return f"On {host_words(layout)}{crossing}."


class _Found(NamedTuple):
    num_hosts: int
    workers: tuple[tuple[Hosts, ...], ...]
    """Per pool."""


@cache
def _on_fewest(pools: tuple[Pool, ...], most_hosts: int, devices_per_host: int, first: int) -> _Found | None:
    """Place on as few hosts as possible, numbered from ``first``."""
    num_devices = sum(pool.num_devices for pool in pools)
    largest_first = sorted(pools, key=lambda pool: (pool.devices_per_worker, pool.tensor_parallel), reverse=True)
    for num_hosts in range(-(-num_devices // devices_per_host), most_hosts + 1):
        for order, is_spread in ((largest_first, True), (pools, False)):
            free = dict.fromkeys(range(first, first + num_hosts), devices_per_host)
            workers = {pool.role: _place(pool, free, is_spread=is_spread) for pool in order}
            if all(len(workers[pool.role]) == pool.replicas for pool in pools):
                return _Found(num_hosts, tuple(workers[pool.role] for pool in pools))
    return None


def _place(pool: Pool, free: dict[int, int], *, is_spread: bool) -> tuple[Hosts, ...]:
    """Hosts of as many of the workers as fit.

    Args:
        free: free devices by host; reduced by the devices taken.
        is_spread: each worker takes the emptiest host, while one has room for all of it.
    """
    placed_workers: list[Hosts] = []
    size = pool.devices_per_worker
    if is_spread:
        # Slots in the order in which their hosts become the emptiest, each with the room left by then.
        places = [(n * size - room, host) for host, room in free.items() for n in range(room // size)]
        placed_workers = [(host,) for _, host in sorted(places)[: pool.replicas]]
        for (host,) in placed_workers:
            free[host] -= size
    num_left, num_stages = pool.replicas - len(placed_workers), pool.pipeline_parallel
    if num_left:
        emptiest_first = sorted(free, key=free.__getitem__, reverse=True)
        groups = [host for host in emptiest_first for _ in range(free[host] // pool.tensor_parallel)]
        for start in range(0, min(num_left, len(groups) // num_stages) * num_stages, num_stages):
            stages = tuple(groups[start : start + num_stages])
            placed_workers.append(stages if len(set(stages)) > 1 else stages[:1])
            for host in stages:
                free[host] -= pool.tensor_parallel
    return tuple(placed_workers)


def _devices_by_host(layout: Layout) -> dict[int, str]:
    """Devices of each role, by host number."""
    words: dict[int, list[str]] = {}
    hosts = layout.worker_hosts
    for pool in layout.pools:
        counts: Counter[int] = Counter()
        for worker in hosts[pool.role]:
            for host in worker:
                counts[host] += pool.devices_per_worker // len(worker)  # those of a stage, or of the whole worker
        for host, count in counts.items():
            words.setdefault(host, []).append(f"{count} {ROLE_NAMES[pool.role]}")
    return {host: " and ".join(words[host]) for host in sorted(words)}
