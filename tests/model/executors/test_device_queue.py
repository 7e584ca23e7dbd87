"""The queue of a CPU, which does at once what it is asked for; and in which order that of a GPU asks for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import pytest
import torch

from pdserve.contracts.step import BlockCopy, StepBatch
from pdserve.model.executors.block_copies import copy_blocks
from pdserve.model.executors.device_queue import DeviceQueue, select_queue, swap_slots


def test_inputs_go_to_a_new_tensor_or_to_the_beginning_of_another() -> None:
    queue, inputs = DeviceQueue(), np.arange(3, dtype=np.int32)
    room = torch.full((5,), 9, dtype=torch.int32)
    assert queue.put(inputs).tolist() == queue.put(inputs, room).tolist() == [0, 1, 2]
    assert room.tolist() == [0, 1, 2, 9, 9]


def test_a_replay_is_the_computation() -> None:
    queue, calls = DeviceQueue(), []
    started = queue.event()
    replay = queue.capture(lambda: calls.append(1))
    assert not calls
    replay()
    replay()
    ended = queue.event()
    ended.synchronize()
    assert len(calls) == 2
    assert started.elapsed_time(ended) > 0


def test_a_cpu_has_it_and_other_devices_are_refused() -> None:
    assert type(select_queue(torch.device("cpu"))) is DeviceQueue
    with pytest.raises(AssertionError, match="no executor for a pool on meta"):
        select_queue(torch.device("meta"))


class _FakeCuda:
    """What is asked of ``torch.cuda``, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[object] = []
        self.streams = [_FakeStream("current", self.asked)]
        for name in ("current_stream", "Stream", "CUDAGraph", "Event", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "memory")

    def current_stream(self, device: torch.device) -> _FakeStream:
        return self.streams[-1]

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
        self.streams.append(stream)
        yield
        self.streams.pop()
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


def test_what_a_gpu_launches_aside_waits_for_what_it_launched_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _FakeCuda(monkeypatch)
    queue = select_queue(torch.device("cuda", 0))
    with queue.in_turn():
        cuda.asked.append("one step")
    with queue.aside():
        with queue.in_turn():
            cuda.asked.append("stage")
        cuda.asked.append("sample")
    assert cuda.asked == [
        *("on current", "one step", "off current"),
        *("on aside", "on current", "stage", "off current", "aside waits for current", "sample", "off aside"),
    ]


def test_a_gpu_times_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _FakeCuda(monkeypatch)
    queue = select_queue(torch.device("cuda", 0))
    started, ended = queue.event(), queue.event()
    ended.synchronize()
    assert cuda.asked == ["record", "record", "synchronize"]
    assert started.elapsed_time(ended) == 250


def test_blocks_go_to_slots_and_back() -> None:
    pool = torch.arange(4, dtype=torch.uint8)[:, None].repeat(1, 16)
    batch = StepBatch(step_id=0, rows=[])
    batch.swap_outs = [BlockCopy(1, 0), BlockCopy(2, 1)]
    batch.swap_ins = [BlockCopy(1, 1), BlockCopy(0, 3)]
    copy_blocks(batch, pool, swap_slots(2, pool), torch.Tensor.copy_)
    assert pool.tolist() == [[0] * 16, [2] * 16, [2] * 16, [1] * 16]


def test_there_may_be_no_slots() -> None:
    assert len(swap_slots(0, torch.zeros((4, 16), dtype=torch.uint8))) == 0


class _FakeCudart:
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        return flags

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_slots_beside_a_gpus_pool_are_pinned_for_as_long_as_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = _FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    errors: list[int] = []
    monkeypatch.setattr(torch.cuda, "check_error", errors.append)
    pool = cast(torch.Tensor, SimpleNamespace(is_cuda=True, shape=(4, 16)))
    slots = swap_slots(2, pool)
    assert list(cudart.pinned.values()) == [2 * 16]
    assert errors == [0]
    del slots
    assert not cudart.pinned
    assert not len(swap_slots(0, pool))
    assert not cudart.pinned
