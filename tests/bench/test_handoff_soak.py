from __future__ import annotations

import pytest

from pdserve.bench import handoff_cluster, handoff_soak
from pdserve.bench.checked_streams import expected_answer
from pdserve.model.executors.hash_chain import HashVocabulary


def test_streams_are_right_and_blocks_free_under_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run, in which a worker or transfer process is killed or stopped, and bytes are flipped."""
    monkeypatch.setattr(handoff_soak, "FAULT_INTERVAL_S", 0.5)
    monkeypatch.setattr(handoff_cluster, "PARK_TIMEOUT_S", 0.5)
    seen = handoff_soak.soak("tcp", 60, seed=3, handoffs_per_round=60, num_pairs=1)
    assert seen["requests"]["right"] > 40
    assert seen["requests"]["rounds that ended with every block free"] == 1
    assert sum(seen["link"].values()) > 0


def test_an_expected_answer_depends_on_the_whole_prompt() -> None:
    vocabulary = HashVocabulary(512)
    answer = expected_answer((1, 2, 3), 4, vocabulary)
    assert len(answer) == 4
    assert expected_answer((1, 2, 3, answer[0]), 3, vocabulary) == answer[1:]
    assert expected_answer((3, 2, 1), 4, vocabulary) != answer
