"""What a live cluster says of its changes is read as a simulation has it."""

from __future__ import annotations

import pytest

from pdserve.bench.autoscale import followed, num_turns

LOG = """\
   8.0s  decode-0     up at 127.0.0.1:1

pdserve is ready after 10.0 s
  20.0s  change       the load asks for prefill=1 decode=4 (decode_short)
  20.0s  change       decode-2 starts
  20.0s  change       decode-3 starts
  24.0s  change       decode-2 is up at 127.0.0.1:2
  25.0s  change       decode-3 is up at 127.0.0.1:3
  40.0s  change       the load asks for prefill=2 decode=3 (prefill_short)
  40.0s  change       decode-3 becomes a prefill worker
  70.0s  change       the load asks for prefill=2 decode=2 (surplus)
  70.0s  change       decode-2 finishes its requests
  80.0s  change       decode-2 has left
 120.0s  stopping     finishing running requests; Ctrl-C again ends them
"""


def test_changes_and_seconds_of_workers_are_those_that_the_supervisor_tells_of() -> None:
    seen, starts_s = followed(LOG, 3, 100.0)
    assert seen["changes"] == [[10, "decode_short", 1, 4], [30, "prefill_short", 2, 3], [60, "surplus", 2, 2]]
    assert starts_s == pytest.approx([4, 5])
    assert seen["worker_s"] == 3 * 100 + 90 + 60


def test_a_number_turns_if_it_falls_after_growth_or_grows_after_a_fall() -> None:
    assert num_turns([3, 4, 4, 6]) == 0
    assert num_turns([3, 4, 4, 3, 2, 2, 5]) == 2
