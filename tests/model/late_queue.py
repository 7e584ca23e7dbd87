"""A queue whose copies to the host arrive when they are waited for, as those of a GPU may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pdserve.model.executors.device_queue import Event, HostQueue

NOT_YET = -12345


@dataclass
class LateQueue(HostQueue):
    """Counts what it is asked for. Until a later event is waited for, what was fetched is not what it will be."""

    num_puts: int = 0
    num_fetches: int = 0
    num_replays: int = 0
    num_captured: int = 0
    spoils: Callable[[], bool] = lambda: False
    """Whether the logits of the step that is fetched are to be NaN."""
    _pending: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def pipeline_depth(self) -> int:
        return 2

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
        return _LateEvent(super().event(), self, len(self._pending))

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


@dataclass
class _LateEvent:
    inner: Event
    queue: LateQueue
    num_fetched: int

    def wait(self) -> None:
        self.queue.arrive(self.num_fetched)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _LateEvent)
        return self.inner.seconds_since(earlier.inner)
