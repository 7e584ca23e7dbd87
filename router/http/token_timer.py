"""Times of the tokens of one request, as the edge hands them over. Makes no decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.router.metrics import RouterMetrics
from pdserve.router.requests.journey import Journey, tpot_parts_s


@dataclass(slots=True)
class _Choice:
    first_s: float
    last_s: float
    num_gaps: int = 0
    longest_gap_s: float = 0.0

    @property
    def mean_gap_s(self) -> float:
        return (self.last_s - self.first_s) / self.num_gaps


class TokenTimer:
    """Times the choices of one request, each with its own token 0 and gaps; the slowest count for the request."""

    def __init__(
        self, metrics: RouterMetrics, arrived_s: float, request_id: str = "", *, tier: str = DEFAULT_TIER
    ) -> None:
        """
        Args:
            arrived_s: `time.monotonic` at arrival of the request.
            tier: name of its objectives.
        """
        self._metrics = metrics
        self._tier = tier
        self._arrived_s = arrived_s
        self._request_id = request_id
        self._choices: dict[int, _Choice] = {}
        self.write_s = 0.0
        """Seconds in which writes after token 0 waited for the client."""
        self.is_good: bool | None = None
        """Whether both objectives were met; None until the answer is complete."""

    def token(self, choice: int) -> None:
        """Record that the next token of ``choice`` was handed over."""
        now_s = time.monotonic()
        timed = self._choices.get(choice)
        if timed is None:
            self._choices[choice] = _Choice(now_s, now_s)
            self._metrics.first_token(now_s - self._arrived_s, self._request_id)
        else:
            gap_s = now_s - timed.last_s
            self._metrics.itl_seconds.observe(gap_s)
            timed.longest_gap_s = max(timed.longest_gap_s, gap_s)
            timed.last_s = now_s
            timed.num_gaps += 1

    def wrote(self, seconds: float) -> None:
        """A write took ``seconds``."""
        if self._choices:
            self.write_s += seconds

    @property
    def ttft_s(self) -> float | None:
        """TTFT; None before token 0."""
        first_s = [each.first_s for each in self._choices.values()]
        return max(first_s) - self._arrived_s if first_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap so far; None without one."""
        return max((each.mean_gap_s for each in self._choices.values() if each.num_gaps), default=None)

    def finished(self, journeys: Sequence[Journey]) -> None:
        """The answer is complete; ``journeys`` are those of its prompts."""
        ttft_s = self.ttft_s
        assert ttft_s is not None
        slowest_s, num_gaps, slowest_parts_s = 0.0, 0, {}
        choices = range(0, len(self._choices), max(1, len(self._choices) // max(1, len(journeys))))
        for choice, journey in zip(choices, journeys, strict=False):
            timed = self._choices[choice]
            parts_s = self._measure(timed, journey)
            if parts_s and timed.mean_gap_s > slowest_s:
                slowest_s, num_gaps, slowest_parts_s = timed.mean_gap_s, timed.num_gaps, parts_s
        self.is_good = self._metrics.answered(
            ttft_s=ttft_s,
            tpot_s=self.tpot_s,
            duration_s=max(each.last_s for each in self._choices.values()) - self._arrived_s,
            num_tokens=sum(1 + each.num_gaps for each in self._choices.values()),
            num_gaps=num_gaps,
            longest_gap_s=max(each.longest_gap_s for each in self._choices.values()),
            journeys=journeys,
            tpot_parts_s=slowest_parts_s,
            request_id=self._request_id,
            tier=self._tier,
        )

    def _measure(self, timed: _Choice, journey: Journey) -> dict[str, float]:
        """Observe one prompt's first choice beside its predictions; returns the seconds after token 0 by cause."""
        metrics, num_gaps, first_s = self._metrics, timed.num_gaps, timed.first_s
        if journey.token_s:
            wait_s = max(0.0, first_s - journey.token_s)
            metrics.phase_ended("first_write", wait_s)
            journey.spent("first_write", wait_s, first_s)
        if journey.predicted_ttft_s:
            metrics.predicted_ttft_seconds.observe(journey.predicted_ttft_s)
        if not num_gaps:
            return {}
        if journey.predicted_tpot_s:
            metrics.predicted_tpot_seconds.observe(journey.predicted_tpot_s)
        parts_s = tpot_parts_s(journey, timed.last_s - first_s, self.write_s)
        for part, seconds in parts_s.items():
            metrics.tpot_part_seconds.labels(part).observe(seconds / num_gaps)
        return parts_s
