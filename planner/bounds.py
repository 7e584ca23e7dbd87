"""What can be said of a layout without simulating it.

Used by `pdserve.planner.search` to leave out layouts that cannot win, and to rank the others before they are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Resource(Enum):
    """What runs out first when the rate rises."""

    PREFILL_COMPUTE = "prefill compute"
    DECODE_BANDWIDTH = "decode memory bandwidth"
    KV_MEMORY = "KV memory"
    BATCH_LIMIT = "decode batch limit"
    LINK = "KV transfer link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What can be said of a layout without simulating it: see `pdserve.planner.bounds`."""

    rate: float
    """No rate above it can be served within the SLO."""
    estimate: float
    """Estimated goodput."""
    resource: Resource
    """What sets the bound."""
    is_slo_within_reach: bool = True
    """False: not even an idle cluster would meet the SLO for enough requests."""
