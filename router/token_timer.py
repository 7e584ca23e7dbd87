"""Times the tokens of one request where the edge hands them over, and reports them."""

from __future__ import annotations

import time

from pdserve.router.observer import AnswerTiming, EdgeObserver


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
