"""The queue of a CPU, which does at once what it is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve.model.device_queue import HostQueue, select_queue


def test_words_may_change_once_they_were_put() -> None:
    queue, words = HostQueue(), np.arange(3, dtype=np.int32)
    room = torch.full((5,), 9, dtype=torch.int32)
    new, there = queue.put(words), queue.put(words, room)
    words[:] = 7
    assert new.tolist() == there.tolist() == [0, 1, 2]
    assert room.tolist() == [0, 1, 2, 9, 9]


def test_what_was_fetched_stays() -> None:
    values = torch.tensor([1, 2])
    fetched = HostQueue().fetch(values)
    values += 1
    assert fetched.tolist() == [1, 2]


def test_a_replay_is_the_computation() -> None:
    queue, calls = HostQueue(), []
    started = queue.mark()
    replay = queue.capture(lambda: calls.append(1))
    assert not calls
    replay()
    replay()
    ended = queue.mark()
    ended.wait()
    assert len(calls) == 2
    assert ended.seconds_since(started) > 0


def test_a_cpu_has_it_and_other_devices_are_refused() -> None:
    assert isinstance(select_queue(torch.device("cpu")), HostQueue)
    with pytest.raises(AssertionError, match="no executor for a pool on meta"):
        select_queue(torch.device("meta"))
