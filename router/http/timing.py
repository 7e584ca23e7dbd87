"""Latencies of answers where the edge hands tokens over, and the observer that counts them.

All durations are differences of two `time.monotonic` readings, in seconds.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class AnswerTiming(NamedTuple):
    """Latencies of one complete answer; of its slowest choice where it has several."""

    ttft_s: float
    """Arrival to token 0."""
    tpot_s: float | None
    """Mean time per token after token 0; ``None`` where no choice has more, and so none has a TPOT."""
    duration_s: float
    """Arrival to the last token."""
    num_tokens: int


class EdgeObserver:
    """Hears of answers and token latencies, and ignores them; `pdserve.router.metrics` overrides.

    Tokens are timed when written to the client, or, of an answer that is not streamed, when they reach the edge.
    """

    def responded(self, route: str, code: int) -> None:
        """A request was answered with HTTP status ``code``.

        Args:
            route: path of the route, such as ``/v1/chat/completions``, or ``other`` where none matched.
            code: 499 where the client left before there was a status.
        """

    def first_token(self, ttft_s: float) -> None:
        """Token 0 of a choice."""

    def gap(self, gap_s: float) -> None:
        """Every later token, with the time since the one before."""

    def finished(self, timing: AnswerTiming) -> None:
        """An answer is complete. Not called where the client left or the generation failed."""


class TokenTimer:
    """Choices run side by side: each has a token 0 and gaps of its own, and the slowest ones are the request's."""

    def __init__(self, observer: EdgeObserver, arrived_s: float) -> None:
        """``arrived_s``: `time.monotonic` when the request arrived."""
        self._observer = observer
        self._arrived_s = arrived_s
        self._choices: dict[int, _ChoiceTimes] = {}

    def token(self, index: int) -> None:
        """The next token of choice ``index`` was handed over."""
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
        """Those were the last ones."""
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
    """When the tokens of one choice were handed over."""

    __slots__ = ("first_s", "last_s", "num_gaps")

    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s
        self.num_gaps = 0
