"""The ``goodput`` policy without one of its parts, to see what the part is worth.

The names in `PARTS` are those of policies in this process once it has imported this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import numpy.typing as npt

from pdserve.router.requests import policies
from pdserve.router.requests.goodput import Goodput
from pdserve.router.requests.least_time import choose_decode
from pdserve.router.requests.lengths import Lengths
from pdserve.router.requests.placement import Arrival, Binding, Costs, PrefillChoice, WorkerSnapshot


class _WithoutDecode(Goodput):
    """Decode workers are chosen by ``least-time``."""

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        binding = super().decode(arrival, workers, cut_off, source_host)
        worker_id = choose_decode(arrival.blocks, workers, self.costs, cut_off, source_host=source_host)
        return None if binding is None or worker_id is None else binding._replace(worker_id=worker_id)


class _WithoutOrder(Goodput):
    """All prompts are due as their objectives say, and all who wait for blocks wait in turn."""

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        choice = super().prefill(arrival, workers)
        return None if choice is None else choice._replace(due_s=arrival.wanted_s, is_late=False)

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        binding = super().decode(arrival, workers, cut_off, source_host)
        return None if binding is None else Binding(binding.worker_id)


class _WithoutPrefillOnDecode(Goodput):
    def _may_prefill_beside(self, *_: Any) -> bool:
        return False


class _WithoutPrefillCost(Goodput):
    def placed(self, arrival: Arrival, choice: PrefillChoice) -> None:
        super().placed(arrival, choice._replace(misses_per_s=0.0))


class _WithoutLinks(Goodput):
    """Pulls take no time."""

    def _pull_token_s(self, worker: WorkerSnapshot, source_host: str) -> float:
        return 0.0


class _Unlearned(Lengths):
    def count(self, running: Iterable[npt.NDArray[np.int64]]) -> None:
        """Keep what is assumed before any answer has ended."""


class _WithoutLengths(Goodput):
    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._lengths = _Unlearned()


class _WithoutHolding(Goodput):
    """What meets its objectives nowhere is computed at once, or refused."""

    def _is_held(self, *_: Any) -> bool:
        return False


PARTS: dict[str, type[Goodput]] = {
    "goodput-decode": _WithoutDecode,
    "goodput-order": _WithoutOrder,
    "goodput-local": _WithoutPrefillOnDecode,
    "goodput-cost": _WithoutPrefillCost,
    "goodput-links": _WithoutLinks,
    "goodput-lengths": _WithoutLengths,
    "goodput-holding": _WithoutHolding,
}
policies._POLICIES.update(PARTS)
