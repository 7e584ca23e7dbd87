"""Which requests are alive, by session."""

from __future__ import annotations

import pytest

from pdserve.contracts.events import RefusalCode, RequestKey
from pdserve.engine.live_requests import LiveRequests

ONE, TWO, OTHER = RequestKey(1, 10, 0), RequestKey(1, 10, 1), RequestKey(2, 10, 0)


def test_keys_are_kept_by_session_until_they_end() -> None:
    live = LiveRequests()
    for key in (TWO, ONE, OTHER):
        live.add(key)
    assert live.of_session(1) == [ONE, TWO]
    live.discard(ONE)
    live.discard(ONE)
    assert (live.of_session(1), live.of_session(2), live.of_session(3)) == ([TWO], [OTHER], [])
    live.discard(TWO)
    live.discard(OTHER)
    assert len(live) == 0


def test_what_cannot_be_added_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.engine.live_requests.MAX_LIVE_REQUESTS", 2)
    live = LiveRequests()
    live.add(ONE)
    refusal = live.refusal(ONE)
    assert refusal is not None
    assert (refusal.code, "already runs" in refusal.message) == (RefusalCode.INVALID, True)
    live.add(TWO)
    refusal = live.refusal(OTHER)
    assert refusal is not None
    assert (refusal.code, "2 requests" in refusal.message) == (RefusalCode.OVERLOADED, True)
    live.discard(ONE)
    assert live.refusal(OTHER) is None
