"""Copies, events and captured steps of a device: everything but kernels that an executor launches.

All of it happens in launch order. A GPU does it later, and the host waits for events only; a CPU does it at once.
Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, Protocol
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch


class Event(Protocol):
    """A point in launch order."""

    def wait(self) -> None:
        """Wait until everything before it is done.

        Raises:
            RuntimeError: something before it failed.
        """
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two events of one queue that were both waited for."""
        ...


class DeviceQueue(Protocol):
    """A device and the work that it still has to do. Not thread-safe."""

    @property
    def pipeline_depth(self) -> int:
        """Steps to submit before the first result is taken; see `pdserve.contracts.step.Executor`."""
        ...

    def put(self, inputs: npt.NDArray[np.int32], into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy to the device, and return the inputs there. ``inputs`` must not change afterwards.

        Args:
            into: takes them at its beginning; by default a new tensor does.
        """
        ...

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Copy to the host: not to be read before a later event was waited for. ``values`` must not change."""
        ...

    def event(self) -> Event: ...

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """A replay of ``compute`` that costs the host next to nothing.

        Args:
            compute: launches the same every time, on the same tensors. It may be called some times here.
        """
        ...


def select_queue(device: torch.device) -> DeviceQueue:
    assert device.type in ("cpu", "cuda"), f"no executor for a pool on {device}"
    return CudaQueue(device) if device.type == "cuda" else HostQueue()


class HostQueue:
    """Implements `DeviceQueue` for a CPU."""

    @property
    def pipeline_depth(self) -> int:
        return 1

    def put(self, inputs: npt.NDArray[np.int32], into: torch.Tensor | None = None) -> torch.Tensor:
        there = torch.from_numpy(inputs)
        return there if into is None else into[: len(inputs)].copy_(there)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def event(self) -> Event:
        return _HostEvent(perf_counter())

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        return compute


class _HostEvent(NamedTuple):
    at_s: float

    def wait(self) -> None:
        """Everything was done as it was asked for."""

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _HostEvent)
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

    @property
    def pipeline_depth(self) -> int:
        return 2

    def put(self, inputs: npt.NDArray[np.int32], into: torch.Tensor | None = None) -> torch.Tensor:
        pinned = torch.empty(len(inputs), dtype=torch.int32, pin_memory=True)
        pinned.numpy()[:] = inputs
        if into is None:
            return pinned.to(self._device, non_blocking=True)
        return into[: len(inputs)].copy_(pinned, non_blocking=True)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    def event(self) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return _CudaEvent(event)

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


class _CudaEvent(NamedTuple):
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1000


class DeviceBlocks:
    """Implements `pdserve.model.executors.block_copies.Blocks` over uint8 ``[number, block_bytes]``, in launch
    order."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int, /) -> torch.Tensor:
        return self._blocks[index]

    def __setitem__(self, index: int, block: torch.Tensor, /) -> None:
        self._blocks[index].copy_(block, non_blocking=True)


def swap_slots(num_slots: int, pool_blocks: torch.Tensor) -> DeviceBlocks:
    """Host memory for as many blocks of a pool, which the pool's device copies to and from by itself.

    Raises:
        RuntimeError: the host's memory cannot be pinned.
    """
    slots = torch.empty((num_slots, pool_blocks.shape[1]), dtype=torch.uint8)
    if pool_blocks.is_cuda and num_slots:
        # By hand: torch's own pinned memory comes in powers of two.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostRegister(slots.data_ptr(), slots.nbytes, 0))
        # Whoever gets this memory next could not pin it. Where the process ends, so does all of it.
        finalize(slots, cudart.cudaHostUnregister, slots.data_ptr()).atexit = False
    return DeviceBlocks(slots)
