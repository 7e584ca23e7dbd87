"""What ``pdserve status`` shows, and what other commands learn from it."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cli import run
from pdserve.deploy.cluster.folder import ClusterNote
from pdserve.deploy.commands import status
from pdserve.router.http.keys import read_keys

LOAD: dict[str, Any] = dict.fromkeys(
    ("num_running", "num_waiting", "num_parked", "num_preemptions", "draining", "num_blocks_free", "num_blocks_cached",
     "num_blocks_referenced"), 0
) | {"tier_failure": ""}  # fmt: skip
STATUS: dict[str, Any] = {
    "ready": True, "draining": False, "in_flight": 0, "queued": 0, "accepted": 0, "outcomes": {}, "routers": ["a"],
    "workers": [{"worker_id": "decode-0", "role": "decode", "up": True, "load": LOAD, "address": "b"}],
    "slo": {"tiers": {"fast": {}}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "fetch", lambda *of: STATUS)


def shown(down_since_s: dict[str, float], *, as_json: bool = False) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    assert status.show_status("url", console, down_since_s=down_since_s, as_json=as_json) == 0
    return console.export_text()


def test_a_worker_that_is_started_again_is_shown_as_down() -> None:
    now_s = time.monotonic()
    text = shown({"decode-1": now_s - 12, "decode-0": now_s - 3})
    assert "decode-1 has been down for 12 s, and is being restarted" in text
    assert text.count("decode-0") == 1, "routers know that it is back"
    assert "down" not in shown({})
    assert json.loads(shown({"decode-1": now_s - 12}, as_json=True))["down_s"]["decode-1"] == pytest.approx(12, abs=1)


def test_a_kv_tier_that_is_off_is_shown_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "KV tier" not in shown({})
    monkeypatch.setitem(LOAD, "tier_failure", "No space left on device")
    assert "The KV tier of decode-0 is off until it is restarted: No space left on device" in shown({})


def test_a_key_of_a_tier_that_no_cluster_here_has_is_made_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    make = ["key", "acme", "--keys-file", str(path), "--tier"]
    notes: list[ClusterNote] = []
    monkeypatch.setattr(status, "running_clusters", lambda: notes)
    assert run([*make, "gold"]) == 0
    assert not capsys.readouterr().err, "nothing is known"
    notes.append(ClusterNote(pid=1, admin_url="url"))
    assert run([*make, "fast", "--tier", "default"]) == 0
    assert not capsys.readouterr().err
    assert run([*make, "gold"]) == 0
    warning = capsys.readouterr().err
    assert f"the tier 'gold' is none of those here (default, fast); remove its line from {path} unless" in warning
    assert len(read_keys(path)) == 3


def test_a_cluster_that_does_not_answer_has_no_known_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*of: object) -> None:
        raise DeployError("no answer")

    monkeypatch.setattr(status, "fetch", refuse)
    monkeypatch.setattr(status, "running_clusters", lambda: [ClusterNote(pid=1, admin_url="url")])
    assert status.running_tiers() == []
