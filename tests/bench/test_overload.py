"""Verdicts of the overload benchmark."""

from __future__ import annotations

import pytest

from pdserve.bench.overload import TPOT_S, TTFT_S, Sent
from pdserve.loadgen.client import StreamedAnswer

REFUSED = StreamedAnswer(sent_s=1.0, status=429, error="full", retry_after_s=2.0)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "error", "is_good"),
    [
        (0.9 * TTFT_S, 0.9 * TPOT_S, "", True),
        (1.1 * TTFT_S, 0.9 * TPOT_S, "", False),
        (0.9 * TTFT_S, 1.1 * TPOT_S, "", False),
        (0.9 * TTFT_S, 0.9 * TPOT_S, "the stream ended early", False),
    ],
)
def test_a_good_answer_is_whole_and_meets_both_objectives_from_its_last_try_on(
    ttft_s: float, tpot_s: float, error: str, is_good: bool
) -> None:
    token_s = [10.0 + ttft_s + number * tpot_s for number in range(5)]
    after_the_end_s = token_s[-1] + 1.0
    answer = StreamedAnswer(
        sent_s=10.0, token_s=[*token_s, after_the_end_s], num_tokens=len(token_s), status=200, error=error
    )
    request = Sent(0.0, b"", [REFUSED, answer])
    assert request.is_served == (not error)
    assert request.is_good == is_good
    assert not Sent(0.0, b"", [REFUSED]).is_good
