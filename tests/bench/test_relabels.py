from __future__ import annotations

import pytest

from pdserve.bench import handoff_cluster
from pdserve.bench.relabels import relabels


def test_no_stream_is_hurt_by_new_roles_and_blocks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_cluster, "PARK_TIMEOUT_S", 0.5)
    seen = relabels(10, 100, kills=False)
    assert seen["relabels"] >= 10
    assert seen["running_at_each"] > 0
    assert seen["streams"]["right"] >= 100
    assert not [name for name in seen["streams"] if name.startswith("error")]
