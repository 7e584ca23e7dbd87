from __future__ import annotations

from pdserve.bench.decisions import decision_times_us


def test_every_decision_but_the_first_is_timed() -> None:
    for is_cached in (False, True):
        times_us = decision_times_us(2, 400, 4, is_cached=is_cached)
        assert len(times_us) == 3
        assert min(times_us) > 0
