"""What happened to a request on its way, and which part of it is why an objective was missed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TTFT_PHASES = ("queue", "prefill_queue", "prefill")
"""Phases before token 0 (`pdserve.router.metrics.PHASES`)."""
TTFT_CAUSES = (*TTFT_PHASES, "failover", "edge")
"""``edge``: reading, tokenising and writing in the router."""
TPOT_CAUSES = ("failover", "handoff", "preemption", "decode")


@dataclass(slots=True)
class Journey:
    """Of choice 0, summed over its attempts; ``workers`` are those of all choices."""

    workers: list[str] = field(default_factory=list)
    """Ids of the workers that got a choice, in order."""
    phases_s: dict[str, float] = field(default_factory=dict)
    stall_s: float = 0.0
    """Token 0 to token 1, if a handoff was between them."""
    num_retries: int = 0
    num_preemptions: int = 0

    def spent(self, phase: str, seconds: float) -> None:
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds

    @property
    def before_token_s(self) -> float:
        return sum(self.phases_s.get(phase, 0.0) for phase in TTFT_PHASES)


def ttft_cause(journeys: Sequence[Journey], ttft_s: float) -> str:
    """The longest part of a missed TTFT, of several prompts that of the slowest."""
    journey = max(journeys, key=lambda each: each.before_token_s, default=Journey())
    parts = {phase: journey.phases_s.get(phase, 0.0) for phase in TTFT_PHASES}
    parts["failover" if journey.num_retries else "edge"] = ttft_s - journey.before_token_s
    return max(parts, key=lambda part: parts[part])


def tpot_cause(journeys: Sequence[Journey], tpot_s: float, num_gaps: int, slo_s: float) -> str:
    """Why a mean of ``num_gaps`` gaps missed its objective: it is the handoff if the gaps without its stall meet it."""
    journey = max(journeys, key=lambda each: (each.num_retries, each.stall_s), default=Journey())
    if journey.num_retries:
        return "failover"
    if tpot_s * num_gaps - journey.stall_s <= slo_s * (num_gaps - 1):
        return "handoff"
    return "preemption" if journey.num_preemptions else "decode"
