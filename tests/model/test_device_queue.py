"""The queue of a CPU, which does at once what it is asked for; and in which order that of a GPU asks for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

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


class _FakeCuda:
    """What is asked of ``torch.cuda``, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[object] = []
        for name in ("current_stream", "Stream", "CUDAGraph", "Event", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "memory")

    def current_stream(self, device: torch.device) -> _FakeStream:
        return _FakeStream("current", self.asked)

    def Stream(self, device: torch.device) -> _FakeStream:  # noqa: N802
        return _FakeStream("aside", self.asked)

    def CUDAGraph(self) -> _FakeGraph:  # noqa: N802
        return _FakeGraph(self.asked)

    def Event(self, enable_timing: bool) -> _FakeEvent:  # noqa: N802
        assert enable_timing
        return _FakeEvent(self.asked)

    @contextmanager
    def stream(self, stream: _FakeStream) -> Iterator[None]:
        self.asked.append(f"on {stream.name}")
        yield
        self.asked.append(f"off {stream.name}")

    @contextmanager
    def graph(self, graph: _FakeGraph, pool: str, capture_error_mode: str) -> Iterator[None]:
        self.asked.append(f"capture in {pool}")
        yield
        self.asked.append("captured")


class _FakeStream(NamedTuple):
    name: str
    asked: list[object]

    def wait_stream(self, other: _FakeStream) -> None:
        self.asked.append(f"{self.name} waits for {other.name}")


class _FakeGraph(NamedTuple):
    asked: list[object]

    def replay(self) -> None:
        self.asked.append("replay")


class _FakeEvent(NamedTuple):
    asked: list[object]

    def record(self) -> None:
        self.asked.append("record")

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    def elapsed_time(self, end: _FakeEvent) -> float:
        return 250.0


def test_a_gpu_computes_once_aside_before_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _FakeCuda(monkeypatch)
    queue = select_queue(torch.device("cuda", 0))
    replay = queue.capture(lambda: cuda.asked.append("compute"))
    assert cuda.asked == [
        "aside waits for current",
        "on aside",
        "compute",
        "off aside",
        "current waits for aside",
        "capture in memory",
        "compute",
        "captured",
    ]
    replay()
    assert cuda.asked[-1] == "replay"


def test_a_gpus_marks_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _FakeCuda(monkeypatch)
    queue = select_queue(torch.device("cuda", 0))
    started, ended = queue.mark(), queue.mark()
    ended.wait()
    assert cuda.asked == ["record", "record", "synchronize"]
    assert ended.seconds_since(started) == 0.25
