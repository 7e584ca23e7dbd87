from __future__ import annotations

import pytest

from pdserve.bench import handoff_cluster
from pdserve.bench.relabels import RELABELS_PER_KILL, relabels


def test_no_stream_is_hurt_by_new_roles_and_blocks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_cluster, "PARK_TIMEOUT_S", 0.5)
    seen = relabels(RELABELS_PER_KILL, 100)
    assert seen["relabels"] >= RELABELS_PER_KILL
    assert seen["running_at_each"] > 0
    assert seen["streams"]["right"] >= 100
    assert not [name for name in seen["streams"] if name.startswith("error")]
