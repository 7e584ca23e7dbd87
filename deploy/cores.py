"""Divides a machine's cores between workers, and what is left for the router and Ray's daemons. Pure.

Threads of two processes that wait for each other on the same cores slow both down, so workers get disjoint sets.
The supervisor calls `split_cores` once; workers pin themselves to what they were given, and one that was given nothing
uses every core with threads that wait passively.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.contracts.placement import WorkerRole

_LOAD = {WorkerRole.PREFILL: 2.0, WorkerRole.MIXED: 2.0, WorkerRole.DECODE: 1.0}
"""Share of the cores by role: prefill is bound by compute and gains from each core, decode by memory bandwidth, which
few cores saturate."""

_CORES_PER_SPARE = 8
"""One core in this many is kept for the router and the daemons, once every worker has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSplit:
    """Who runs where."""

    worker_cores: tuple[tuple[int, ...], ...]
    """Cores of each worker, in the order of the roles; all empty where there are fewer cores than workers."""
    spare_cores: tuple[int, ...]
    """Cores of no worker; empty where there are none to spare."""


def split_cores(cores: Sequence[int], roles: Sequence[WorkerRole]) -> CoreSplit:
    """Give each worker a contiguous run of ``cores``, sized by its role's load.

    Each gets one, a few are spared, and every further core goes to the worker that has the least for its load.

    Args:
        cores: ids of the usable cores, at least one.
        roles: one entry per worker, at least one.
    """
    assert cores
    assert roles
    if len(cores) < len(roles):
        return CoreSplit(worker_cores=((),) * len(roles), spare_cores=())
    num_extra = len(cores) - len(roles)
    num_spare = min(num_extra, max(1, len(cores) // _CORES_PER_SPARE))
    counts = [1] * len(roles)
    for _ in range(num_extra - num_spare):
        neediest = min(range(len(roles)), key=lambda index: counts[index] / _LOAD[roles[index]])
        counts[neediest] += 1
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    runs = tuple(tuple(cores[end - count : end]) for count, end in zip(counts, ends, strict=True))
    return CoreSplit(worker_cores=runs, spare_cores=tuple(cores[ends[-1] :]))
