"""A queue whose copies to the host arrive when they are waited for, as those of a GPU may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pdserve.model.executors.device_queue import DeviceQueue, Event

NOT_YET = -12345


@dataclass
class LateQueue(DeviceQueue):
    """Counts what it is asked for. Until a later event is waited for, what was fetched is not what it will be."""

    pipeline_depth = 2
    num_puts: int = 0
    num_fetches: int = 0
    num_replays: int = 0
    num_captured: int = 0
    spoils: Callable[[], bool] = lambda: False
    """Whether the logits of the step that is fetched are to be NaN."""
    _pending: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def put(self, inputs: npt.NDArray[np.int32], into: torch.Tensor | None = None) -> torch.Tensor:
        self.num_puts += 1
        return super().put(inputs, into)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        self.num_fetches += 1
        fetched, values = torch.full_like(values, NOT_YET), values.clone()
        if self.spoils():
            values[:, 1] = torch.tensor(torch.nan).view(torch.int32)
        self._pending.append((fetched, values))
        return fetched

    def event(self) -> Event:
        return _LateEvent(self, len(self._pending))

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1

        def replay() -> None:
            self.num_replays += 1
            compute()

        return replay

    @torch.inference_mode()
    def arrive(self, num_fetched: int) -> None:
        """The first so many of the copies are done."""
        for fetched, values in self._pending[:num_fetched]:
            fetched.copy_(values)


class _LateEvent(Event):
    def __init__(self, queue: LateQueue, num_fetched: int) -> None:
        super().__init__()
        self._queue = queue
        self._num_fetched = num_fetched

    def synchronize(self) -> None:
        self._queue.arrive(self._num_fetched)
