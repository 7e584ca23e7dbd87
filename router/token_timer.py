"""Times the tokens of one answer where the edge hands them over, and reports them."""

from __future__ import annotations

import time

from pdserve.router.observer import AnswerTiming, EdgeObserver


class TokenTimer:
    """TTFT, gaps and the totals of one answer."""

    def __init__(self, observer: EdgeObserver, arrived_s: float) -> None:
        """``arrived_s``: `time.monotonic` when the request arrived."""
        self._observer = observer
        self._arrived_s = arrived_s
        self._first_s = 0.0
        self._last_s = 0.0
        self._num_tokens = 0

    def token(self) -> None:
        """The next token was handed over."""
        now_s = time.monotonic()
        if self._num_tokens == 0:
            self._first_s = now_s
            self._observer.first_token(now_s - self._arrived_s)
        else:
            self._observer.gap(now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += 1

    def finished(self) -> None:
        """That was the last one."""
        num_gaps = self._num_tokens - 1
        self._observer.finished(
            AnswerTiming(
                ttft_s=self._first_s - self._arrived_s,
                tpot_s=(self._last_s - self._first_s) / num_gaps if num_gaps > 0 else None,
                duration_s=self._last_s - self._arrived_s,
                num_tokens=self._num_tokens,
            )
        )
