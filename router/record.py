"""What is known of one HTTP request, and what follows from it.

`pdserve.router.http` fills a record as the request goes and completes it at its end; the dispatcher fills the `Journey`
of each of its choices. The line in the log, the spans, the verdict on the objectives and the metrics are functions of
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from pdserve.contracts.deployment import DEFAULT_TIER, Tier
from pdserve.contracts.metrics import PHASES
from pdserve.contracts.request import Outcome
from pdserve.router.requests.journey import GAP_CAUSE, Journey, tpot_cause, tpot_parts_s, ttft_cause

if TYPE_CHECKING:
    from pdserve.router.text.answer import Answer


class RecordSink(Protocol):
    """Gets records of requests that have ended: a log, or a collector of spans."""

    def write(self, record: RequestRecord) -> None: ...
    def close(self) -> None:
        """Write what waits, and end."""


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. Instants are those of `time.monotonic`."""

    id: str
    path: str
    arrived_s: float
    """Of its head, then of its whole body, from which its objectives count."""
    traceparent: str = ""
    """The client's header, whose trace it belongs to; or empty."""
    tenant: str = ""
    """Empty without keys."""
    tier: str = DEFAULT_TIER
    """Name of its objectives, once it is admitted."""
    answers: Sequence[Answer] = ()
    """One for each prompt, once they run."""
    journeys: Sequence[Journey] = ()
    """Of each choice, by its index in the response."""
    has_token: bool = False
    """Token 0 of a choice was handed over."""
    write_s: float = 0.0
    """Seconds in which writes after token 0 waited for the client."""
    is_answered: bool = False
    """All tokens were handed over."""
    status: int = 0
    """Of HTTP, or `pdserve.router.http.errors.CLIENT_LEFT` if none was sent; 0 until the end."""
    ended_s: float = 0.0
    began_s: float = field(init=False)
    """Arrival of its head."""

    def __post_init__(self) -> None:
        self.began_s = self.arrived_s

    # Progress

    def started(self, answers: Sequence[Answer]) -> None:
        """It is about to generate."""
        self.answers = answers
        self.journeys = [journey for answer in answers for journey in answer.journeys]

    def token(self, choice: int) -> float | None:
        """The next token of ``choice`` was handed over: written or, in a whole answer, received. Returns the gap before
        it; None for token 0."""
        now_s, journey = time.monotonic(), self.journeys[choice]
        if not journey.first_s:
            self.has_token = True
            journey.first_s = journey.last_s = now_s
            return None
        gap_s = now_s - journey.last_s
        if gap_s > journey.longest_gap_s:
            journey.longest_gap_s = gap_s
        journey.last_s = now_s
        journey.num_gaps += 1
        return gap_s

    def wrote(self, seconds: float) -> None:
        """A write took ``seconds``."""
        if self.has_token:
            self.write_s += seconds

    def answered(self) -> None:
        """All tokens were handed over."""
        self.is_answered = True
        for journey in self.first_journeys:
            if journey.token_s:
                journey.spent("first_write", max(0.0, journey.first_s - journey.token_s), journey.first_s)

    def ended(self, status: int) -> None:
        self.status, self.ended_s = status, time.monotonic()

    # What follows

    @property
    def first_journeys(self) -> list[Journey]:
        """Of the first choice of each prompt."""
        return [answer.journeys[0] for answer in self.answers]

    @property
    def num_completion_tokens(self) -> int:
        return sum(answer.num_completion_tokens for answer in self.answers)

    @property
    def ttft_s(self) -> float | None:
        """Of the slowest choice; None before token 0."""
        first_s = max((each.first_s for each in self.journeys), default=0.0)
        return first_s - self.arrived_s if first_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap of the slowest choice so far; None without one."""
        return max((each.mean_gap_s for each in self.journeys if each.num_gaps), default=None)

    @property
    def answer_s(self) -> float:
        """Arrival to the last token so far."""
        return max(each.last_s for each in self.journeys) - self.arrived_s

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices, each of which has one at least."""
        return sum(1 + each.num_gaps for each in self.journeys)

    @property
    def outcome(self) -> Outcome:
        """FAILED if a prompt failed, which ends the others; else that of the first which did not finish."""
        outcomes = [each.outcome or Outcome.REJECTED for each in self.answers]
        if Outcome.FAILED in outcomes:
            return Outcome.FAILED
        return next((each for each in outcomes if each is not Outcome.FINISHED), Outcome.FINISHED)

    def misses(self, slo: Tier) -> dict[str, str]:
        """Of a complete answer, why it missed objectives, by ``ttft`` and ``tpot``; empty if it met both."""
        causes: dict[str, str] = {}
        ttft_s, tpot_s = self.ttft_s, self.tpot_s or 0.0
        assert ttft_s is not None
        if ttft_s > slo.ttft_seconds:
            causes["ttft"] = ttft_cause(self.first_journeys, ttft_s)
        if tpot_s > slo.tpot_seconds:
            slowest = max(self.first_journeys, key=lambda each: each.mean_gap_s)
            parts_s = tpot_parts_s(slowest, self.write_s) if slowest.mean_gap_s else {}
            causes["tpot"] = tpot_cause(parts_s, slowest.num_gaps, slo.tpot_seconds)
        elif 0 < slo.max_gap_seconds < max(each.longest_gap_s for each in self.journeys):
            causes["tpot"] = GAP_CAUSE
        return causes

    def is_good(self, slo: Tier) -> bool | None:
        """Whether it met both objectives; None for a request that ended otherwise by its sender's fault or wish."""
        if self.is_answered:
            return not self.misses(slo)
        is_failed = self.status >= 500 or self.status == 429 or self.outcome is Outcome.FAILED
        return False if self.answers and is_failed else None

    def line(self) -> dict[str, Any]:
        """Its line in the log. Times are in seconds; each of ``phases_s`` is the longest of the prompts.
        ``workers`` are in the order in which they got the request, one more for each fail-over."""
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self.id,
            "path": self.path,
            "status": self.status,
            "duration_s": round(self.ended_s - self.began_s, 6),
        }
        if self.tenant:
            line["tenant"] = self.tenant
        if not self.answers:
            return line
        journeys = self.first_journeys
        phases = {span.phase for each in journeys for span in each.spans}
        return line | {
            "outcome": self.outcome.value,
            "prompt_tokens": sum(len(answer.spec.prompt_tokens) for answer in self.answers),
            "cached_tokens": sum(answer.num_cached_tokens for answer in self.answers),
            "completion_tokens": self.num_completion_tokens,
            "ttft_s": _rounded(self.ttft_s),
            "tpot_s": _rounded(self.tpot_s),
            "phases_s": {
                phase: round(max(each.phase_s(phase) for each in journeys), 6) for phase in PHASES if phase in phases
            },
            "retries": sum(each.num_retries for each in self.journeys),
            "workers": [worker for answer in self.answers for worker in answer.workers],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
