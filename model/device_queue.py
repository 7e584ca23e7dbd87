"""What an executor asks of a device beside its kernels: copies, the order of things, and steps that are captured.

Everything is done in the order in which it is asked for, after what was launched before. A GPU does it later, and the
host waits for marks only; a CPU does it at once. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Mark(Protocol):
    """A point in the order of what a device is asked to do."""

    def wait(self) -> None:
        """Until everything before it is done.

        Raises:
            RuntimeError: something before it failed.
        """
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Between two marks of one queue that were both waited for."""
        ...


class DeviceQueue(Protocol):
    """A device and what it still has to do. Not thread-safe."""

    def put(self, words: npt.NDArray[np.int32], into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy to the device; ``words`` may change at once.

        Args:
            into: takes them at its beginning; by default a new tensor does.

        Returns:
            The words on the device.
        """
        ...

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Copy to the host: not to be read before a later mark was waited for."""
        ...

    def mark(self) -> Mark: ...

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Something that does what ``compute`` would, and costs the host next to nothing.

        Args:
            compute: launches the same every time, on the same tensors. It may be called some times here.
        """
        ...


def select_queue(device: torch.device) -> DeviceQueue:
    assert device.type in ("cpu", "cuda"), f"no executor for a pool on {device}"
    return CudaQueue(device) if device.type == "cuda" else HostQueue()


class HostQueue:
    """Implements `DeviceQueue` for a CPU."""

    def put(self, words: npt.NDArray[np.int32], into: torch.Tensor | None = None) -> torch.Tensor:
        if into is None:
            return torch.from_numpy(words.copy())
        return into[: len(words)].copy_(torch.from_numpy(words))

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def mark(self) -> Mark:
        return _HostMark(perf_counter())

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        return compute


class _HostMark(NamedTuple):
    at_s: float

    def wait(self) -> None:
        """Everything was done as it was asked for."""

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _HostMark)
        return self.at_s - earlier.at_s


class CudaQueue:
    """Implements `DeviceQueue` for a GPU: its current stream, and CUDA graphs that share their memory.

    Pinned buffers come from torch's allocator, which gives one away again only once the copies with it are done: they
    rotate by themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph_memory = torch.cuda.graph_pool_handle()

    def put(self, words: npt.NDArray[np.int32], into: torch.Tensor | None = None) -> torch.Tensor:
        pinned = torch.empty(len(words), dtype=torch.int32, pin_memory=True)
        pinned.numpy()[:] = words
        if into is None:
            return pinned.to(self._device, non_blocking=True)
        return into[: len(words)].copy_(pinned, non_blocking=True)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return _CudaMark(event)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        # Once before, elsewhere: kernels are compiled and libraries take memory, neither of which can be captured.
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            compute()
        current.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            compute()
        return graph.replay


class _CudaMark(NamedTuple):
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1000
