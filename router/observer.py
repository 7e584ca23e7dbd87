"""What the HTTP edge reports of its work, for whoever counts it.

The edge calls these where bytes are handed to the socket; `pdserve.router.metrics` implements them. An implementation
is quick, never awaits and never raises. All durations are differences of two `time.monotonic` readings, in seconds.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class AnswerTiming(NamedTuple):
    """Latencies of one complete answer; of its slowest choice where it has several."""

    ttft_s: float
    """Arrival to token 0."""
    tpot_s: float | None
    """Mean time per token after token 0; ``None`` where no choice has more, and so none has a TPOT."""
    duration_s: float
    """Arrival to the last token."""
    num_tokens: int


class EdgeObserver(Protocol):
    """Counts answers and token latencies.

    Tokens are timed when written to the client, or, of an answer that is not streamed, when they reach the edge.
    """

    def responded(self, route: str, code: int) -> None:
        """A request was answered with HTTP status ``code``.

        Args:
            route: path of the route, such as ``/v1/chat/completions``, or ``other`` where none matched.
            code: 499 where the client left before there was a status.
        """
        ...

    def first_token(self, ttft_s: float) -> None:
        """Token 0 of a choice."""
        ...

    def gap(self, gap_s: float) -> None:
        """Every later token, with the time since the one before."""
        ...

    def finished(self, timing: AnswerTiming) -> None:
        """An answer is complete. Not called where the client left or the generation failed."""
        ...
