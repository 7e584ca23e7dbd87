"""Placement policies by name; the names are `pdserve.contracts.deployment.POLICIES`."""

from __future__ import annotations

from pdserve.router.requests.baselines import CacheAware, ConServe, LeastLoaded, PowerOfTwo, RoundRobin
from pdserve.router.requests.goodput import Goodput
from pdserve.router.requests.least_time import LeastTime
from pdserve.router.requests.placement import Costs, Placement

_POLICIES: dict[str, type[Placement]] = {
    "least-time": LeastTime,
    "goodput": Goodput,
    "cache-aware": CacheAware,
    "conserve": ConServe,
    "power-of-two": PowerOfTwo,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}


def new_placement(policy: str, costs: Costs, *, tpot_slo_s: float = 0.0) -> Placement:
    """Placement with the policy of that name, which has decided nothing yet."""
    return _POLICIES[policy](costs, tpot_slo_s=tpot_slo_s)
