from __future__ import annotations

from pdserve.bench.decisions import decision_times


def test_every_decision_but_the_first_is_timed_and_the_reports_before_it() -> None:
    for is_cached in (False, True):
        times = decision_times(2, 400, 4, is_cached=is_cached)
        assert len(times) == 3
        assert min(each.decisions_us for each in times) > min(each.report_us for each in times) > 0
