"""A call that hangs stops no submitter, and later calls follow once it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pdserve.deploy.cluster.ray_desk import RayDesk
from tests.patience import HANG_S


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """Ends the call that hangs."""
    event = threading.Event()
    yield event
    event.set()


def test_calls_run_in_order_and_errors_reach_the_submitter() -> None:
    desk, ran = RayDesk(), list[int]()
    futures = [desk.submit(lambda number=number: ran.append(number)) for number in range(5)]  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        desk.submit(lambda: 1 // 0).result(10)
    assert ran == [0, 1, 2, 3, 4]
    assert all(future.done() for future in futures)
    assert not desk.is_stuck


def test_a_call_that_hangs_makes_ray_silent_until_it_ends(
    hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    desk, began = RayDesk(), threading.Event()

    def hang() -> None:
        began.set()
        hung.wait()

    first = desk.submit(hang)
    assert began.wait(HANG_S)
    second = desk.submit(lambda: "later")
    seen = []
    for now_s[0] in (100.0, 105.0, 111.0):
        seen.append((desk.is_stuck, desk.is_silent))
    assert seen == [(False, False), (True, False), (True, True)]
    assert not second.done()
    hung.set()
    assert second.result(10) == "later"
    assert first.done()
    assert not desk.is_stuck
