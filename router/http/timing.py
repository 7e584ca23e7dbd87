"""Latencies of answers, measured where the edge hands tokens over, and the observer that counts them.

All durations are differences of two `time.monotonic` readings, in seconds.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class AnswerTiming(NamedTuple):
    """Latencies of one complete answer; with several choices, those of the slowest."""

    ttft_s: float
    """Arrival to token 0."""
    tpot_s: float | None
    """Mean seconds per token after token 0; ``None`` if no choice has a second token."""
    duration_s: float
    """Arrival to the last token."""
    num_tokens: int


class EdgeObserver:
    """Receives answers and token latencies and ignores them; `pdserve.router.metrics` overrides.

    Tokens are timed when written to the client or, if the answer is not streamed, when they reach the edge.
    """

    def responded(self, route: str, code: int) -> None:
        """A request was answered with HTTP status ``code``.

        Args:
            route: path of the route, such as ``/v1/chat/completions``, or ``other`` if none matched.
            code: 499 if the client left before a status was sent.
        """

    def first_token(self, ttft_s: float) -> None:
        """Token 0 of a choice was handed over."""

    def gap(self, gap_s: float) -> None:
        """A later token was handed over, ``gap_s`` after the previous one."""

    def finished(self, timing: AnswerTiming) -> None:
        """An answer is complete. Not called if the client left or the generation failed."""


class TokenTimer:
    """Times the choices of one request, each with its own token 0 and gaps; the slowest count for the request."""

    def __init__(self, observer: EdgeObserver, arrived_s: float) -> None:
        """``arrived_s``: `time.monotonic` at arrival of the request."""
        self._observer = observer
        self._arrived_s = arrived_s
        self._choices: dict[int, _ChoiceTimes] = {}

    def token(self, index: int) -> None:
        """Record that the next token of choice ``index`` was handed over."""
        now_s = time.monotonic()
        choice = self._choices.get(index)
        if choice is None:
            self._choices[index] = _ChoiceTimes(now_s)
            self._observer.first_token(now_s - self._arrived_s)
        else:
            self._observer.gap(now_s - choice.last_s)
            choice.last_s = now_s
            choice.num_gaps += 1

    def finished(self) -> None:
        choices = self._choices.values()
        tpots_s = [(choice.last_s - choice.first_s) / choice.num_gaps for choice in choices if choice.num_gaps]
        self._observer.finished(
            AnswerTiming(
                ttft_s=max(choice.first_s for choice in choices) - self._arrived_s,
                tpot_s=max(tpots_s, default=None),
                duration_s=max(choice.last_s for choice in choices) - self._arrived_s,
                num_tokens=sum(1 + choice.num_gaps for choice in choices),
            )
        )


class _ChoiceTimes:
    """Times at which the tokens of one choice were handed over."""

    __slots__ = ("first_s", "last_s", "num_gaps")

    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s
        self.num_gaps = 0
