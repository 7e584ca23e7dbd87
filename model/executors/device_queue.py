"""Copies, events and captured steps of a device: everything but kernels that an executor launches.

All of it runs in launch order: on a CPU at once, on a GPU later, and the host waits only for events. No model
knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import cast
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch


class Event:
    """A point in launch order. On a CPU, everything before it is done; a GPU has `torch.cuda.Event` instead."""

    def __init__(self) -> None:
        self._at_s = perf_counter()

    def synchronize(self) -> None:
        """Wait until everything before the event is done.

        Raises:
            RuntimeError: something before it failed.
        """

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``, both waited for."""
        return (end._at_s - self._at_s) * 1000


class DeviceQueue:
    """A CPU, which does everything at once; base class of other devices' queues. Not thread-safe."""

    pipeline_depth = 1
    """Steps to submit before the first result is read; see `pdserve.contracts.step.Executor`."""

    def put(self, inputs: npt.NDArray[np.int32], into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy to the device and return the inputs there. ``inputs`` must not change afterwards.

        Args:
            into: its beginning receives the inputs; by default they get a new tensor.
        """
        there = torch.from_numpy(inputs)
        return there if into is None else into[: len(inputs)].copy_(there)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Copy to the host. The copy is valid once a later event was waited for; ``values`` must not change."""
        return values

    def event(self) -> Event:
        return Event()

    def aside(self) -> AbstractContextManager[object]:
        """Return a context, to enter repeatedly, in which launches do not wait for those outside."""
        return nullcontext()

    def in_turn(self) -> AbstractContextManager[object]:
        """Launch in order with others outside of `aside`, and what follows in this context after it."""
        return nullcontext()

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a replay of ``compute`` that costs the host next to nothing.

        Args:
            compute: launches the same kernels on the same tensors every time. It may be called here.
        """
        return compute


class CudaQueue(DeviceQueue):
    """The current stream of a GPU, streams aside of it, and CUDA graphs that share their memory.

    torch's allocator reuses a pinned buffer only after the copies from and to it are done.
    """

    pipeline_depth = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_turn = torch.cuda.current_stream(device)
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph_memory = torch.cuda.graph_pool_handle()

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
        return cast(Event, event)

    def aside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._in_turn):
            yield
        if current != self._in_turn:
            current.wait_stream(self._in_turn)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        # Compiling kernels and allocating library memory cannot be captured, so compute once on another stream.
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            compute()
        current.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            compute()
        return graph.replay


def select_queue(device: torch.device) -> DeviceQueue:
    assert device.type in ("cpu", "cuda"), f"no executor for a pool on {device}"
    return CudaQueue(device) if device.type == "cuda" else DeviceQueue()


def swap_slots(num_slots: int, pool_blocks: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for ``num_slots`` blocks of a pool, pinned for a GPU's copies.

    Raises:
        RuntimeError: the memory cannot be pinned.
    """
    slots = torch.empty((num_slots, pool_blocks.shape[1]), dtype=torch.uint8)
    if pool_blocks.is_cuda and num_slots:
        # torch would pin a power of two.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostRegister(slots.data_ptr(), slots.nbytes, 0))
        # Memory that stays registered could not be pinned again by its next owner; a process's end frees all of it.
        finalize(slots, cudart.cudaHostUnregister, slots.data_ptr()).atexit = False
    return slots
