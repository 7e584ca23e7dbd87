"""What happened to a choice on its way, and which part of it is why an objective was missed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TTFT_PHASES = ("tokenise", "queue", "prefill_queue", "prefill", "first_write")
"""Phases before token 0 reaches the client (`pdserve.contracts.metrics.PHASES`)."""
TTFT_CAUSES = (*TTFT_PHASES, "failover", "wire")
"""``wire``: between router and worker, both ways."""
TPOT_CAUSES = ("failover", "handoff", "preemption", "client", "decode")
"""Parts of TPOT, too. ``client``: writes that waited for the client."""
GAP_CAUSE = "gap"
"""The mean gap was short enough, and one gap too long."""


class Span(NamedTuple):
    """A phase of one attempt."""

    phase: str
    end_s: float
    """By the router's clock."""
    seconds: float


@dataclass(slots=True)
class Journey:
    """Of one choice, summed over its attempts, until its tokens are handed over to the client."""

    spans: list[Span] = field(default_factory=list)
    """Phases in the order in which they ended."""
    token_s: float = 0.0
    """When token 0 arrived."""
    stall_s: float = 0.0
    """Token 0 to token 1, if a handoff was between them."""
    preempted_s: float = 0.0
    lost_s: float = 0.0
    """Between the loss of an attempt that had tokens and the next token."""
    num_retries: int = 0
    predicted_ttft_s: float = 0.0
    """By the placement of the first attempt; 0 if its policy predicts nothing."""
    predicted_tpot_s: float = 0.0
    first_s: float = 0.0
    """When token 0 was handed over; 0 before."""
    last_s: float = 0.0
    """When the last token was."""
    num_gaps: int = 0
    longest_gap_s: float = 0.0

    def spent(self, phase: str, seconds: float, now_s: float) -> None:
        """``phase`` took the last ``seconds``."""
        self.spans.append(Span(phase, now_s, seconds))

    def phase_s(self, *phases: str) -> float:
        """Seconds in these phases."""
        return sum([span.seconds for span in self.spans if span.phase in phases])

    @property
    def mean_gap_s(self) -> float:
        """Its TPOT; 0 without a gap."""
        return (self.last_s - self.first_s) / self.num_gaps if self.num_gaps else 0.0


def ttft_cause(journeys: Sequence[Journey], ttft_s: float) -> str:
    """The longest part of a missed TTFT, of several prompts that of the slowest."""
    journey = max(journeys, key=lambda each: each.phase_s(*TTFT_PHASES))
    parts = {phase: journey.phase_s(phase) for phase in TTFT_PHASES}
    parts["failover" if journey.num_retries else "wire"] = ttft_s - sum(parts.values())
    return max(parts, key=lambda part: parts[part])


def tpot_parts_s(journey: Journey, write_s: float) -> dict[str, float]:
    """Seconds from token 0 to the last token by cause.

    Args:
        write_s: those in which a write waited for the client.
    """
    answer_s = journey.last_s - journey.first_s
    parts_s = {
        "failover": journey.lost_s,
        "handoff": journey.stall_s,
        "preemption": journey.preempted_s,
        "client": min(write_s, answer_s),
    }
    return {**parts_s, "decode": max(0.0, answer_s - sum(parts_s.values()))}


def tpot_cause(parts_s: Mapping[str, float], num_gaps: int, slo_s: float) -> str:
    """Why a mean of ``num_gaps`` gaps missed its objective: the largest part without which it would have been met, or
    the decode steps."""
    answer_s = sum(parts_s.values())
    enough = [part for part, seconds in parts_s.items() if part != "decode" and answer_s - seconds <= slo_s * num_gaps]
    return max(enough, key=lambda part: parts_s[part], default="decode")
