"""Times of the tokens of one request, as the edge hands them over. Makes no decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.router.metrics import RouterMetrics
from pdserve.router.requests.journey import Journey, tpot_parts_s


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
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._num_gaps: dict[int, int] = {}
        self.write_s = 0.0
        """Seconds in which writes after token 0 waited for the client."""
        self.is_good: bool | None = None
        """Whether both objectives were met; None until the answer is complete."""

    def token(self, choice: int) -> None:
        """Record that the next token of ``choice`` was handed over."""
        now_s = time.monotonic()
        last_s = self._last_s.get(choice)
        self._last_s[choice] = now_s
        if last_s is None:
            self._first_s[choice] = now_s
            self._num_gaps[choice] = 0
            self._metrics.first_token(now_s - self._arrived_s, self._request_id)
        else:
            self._num_gaps[choice] += 1
            self._metrics.gap(now_s - last_s)

    def wrote(self, seconds: float) -> None:
        """A write took ``seconds``."""
        if self._first_s:
            self.write_s += seconds

    @property
    def ttft_s(self) -> float | None:
        """TTFT; None before token 0."""
        return max(self._first_s.values()) - self._arrived_s if self._first_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap so far; None without one."""
        return max((self._mean_gap_s(choice) for choice, num_gaps in self._num_gaps.items() if num_gaps), default=None)

    def _mean_gap_s(self, choice: int) -> float:
        return (self._last_s[choice] - self._first_s[choice]) / self._num_gaps[choice]

    def finished(self, journeys: Sequence[Journey]) -> None:
        """The answer is complete; ``journeys`` are those of its prompts."""
        ttft_s = self.ttft_s
        assert ttft_s is not None
        slowest_s, num_gaps, slowest_parts_s = 0.0, 0, {}
        for choice, journey in zip(range(0, len(self._first_s), self._num_choices(journeys)), journeys, strict=False):
            parts_s = self._measure(choice, journey)
            if parts_s and self._mean_gap_s(choice) > slowest_s:
                slowest_s, num_gaps, slowest_parts_s = self._mean_gap_s(choice), self._num_gaps[choice], parts_s
        self.is_good = self._metrics.answered(
            ttft_s=ttft_s,
            tpot_s=self.tpot_s,
            duration_s=max(self._last_s.values()) - self._arrived_s,
            num_tokens=sum(1 + num_gaps for num_gaps in self._num_gaps.values()),
            num_gaps=num_gaps,
            journeys=journeys,
            tpot_parts_s=slowest_parts_s,
            request_id=self._request_id,
            tier=self._tier,
        )

    def _num_choices(self, journeys: Sequence[Journey]) -> int:
        return max(1, len(self._first_s) // max(1, len(journeys)))

    def _measure(self, choice: int, journey: Journey) -> dict[str, float]:
        """Observe one prompt's first choice beside its predictions; returns the seconds after token 0 by cause."""
        metrics, num_gaps, first_s = self._metrics, self._num_gaps[choice], self._first_s[choice]
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
        parts_s = tpot_parts_s(journey, self._last_s[choice] - first_s, self.write_s)
        for part, seconds in parts_s.items():
            metrics.tpot_part_seconds.labels(part).observe(seconds / num_gaps)
        return parts_s
