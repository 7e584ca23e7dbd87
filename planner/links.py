"""How long KV travels between simulated workers: a pull ends when all of it was granted and has crossed the wire.

Of each worker, one pull after the other has the wire to itself, going out and coming in; that is when its bandwidth is
shared, without the partial progress of each. Knows neither schedulers nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Wire:
    """One direction of a worker's connection."""

    free_at_s: float = 0.0


def transfer(source: Wire, target: Wire, begins_s: float, transfer_s: float) -> float:
    """When ``transfer_s`` of transfer that could begin at ``begins_s`` ends, and take both wires until then."""
    ends_s = max(begins_s, source.free_at_s, target.free_at_s) + transfer_s
    source.free_at_s = target.free_at_s = ends_s
    return ends_s
