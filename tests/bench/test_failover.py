from __future__ import annotations

import asyncio

import pytest

from pdserve.bench import failover, handoff_cluster


def test_answers_go_on_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_CLIENTS": 16, "WARM_S": 0.5, "SATURATED_S": 1.0, "PAUSE_S": 0.5}.items():
        monkeypatch.setattr(failover, name, value)
    monkeypatch.setattr(handoff_cluster, "PARK_TIMEOUT_S", 0.5)
    monkeypatch.setattr(failover, "NAMES", ("prefill-0", "decode-0", "decode-1"))
    seen = asyncio.run(failover.failover(1, 0.9, 1.0))
    assert seen["saturation_per_s"] > 0
    assert seen["streams"]["killed"] == 1
    assert seen["streams"]["right"] == sum(seen["streams"].get(kind, 0) for kind in ("resumed", "restarted", "others"))
    assert not [name for name in seen["streams"] if name.startswith("error")]
