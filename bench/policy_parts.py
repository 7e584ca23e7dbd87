"""The ``goodput`` policy without one of its parts, to see what the part is worth.

The names in `PARTS` are those of policies in this process once it has imported this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from pdserve.router.requests import policies
from pdserve.router.requests.goodput import Goodput, _View
from pdserve.router.requests.lengths import Lengths
from pdserve.router.requests.placement import Arrival, Binding, LeastTime
from pdserve.router.requests.policy import Costs, PrefillChoice, WorkerSnapshot
from pdserve.router.requests.worker_table import FloatArray


class _WithoutDecode(Goodput):
    """Decode workers are chosen by ``least-time``."""

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        binding = super().decode(arrival, workers, cut_off, source_host)
        least = LeastTime.decode(self, arrival, workers, cut_off, source_host)  # type: ignore[arg-type]
        return None if binding is None or least is None else binding._replace(worker_id=least.worker_id)


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
    def _may_prefill(self, arrival: Arrival, view: _View, own_s: FloatArray) -> npt.NDArray[np.bool_]:
        return np.zeros(len(own_s), np.bool_)


class _WithoutPrice(Goodput):
    def _price(self, now_s: float) -> float:
        return 0.0


class _WithoutLinks(Goodput):
    """Pulls take no time."""

    def _view(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], pulled_token_s: FloatArray | float = 0.0
    ) -> _View:
        return super()._view(arrival, workers)


class _Unlearned(Lengths):
    def count(self, num_tokens: npt.NDArray[np.int64]) -> None:
        """Keep what is assumed before any answer has ended."""


class _WithoutLengths(Goodput):
    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._lengths = _Unlearned()


class _WithoutWaiting(Goodput):
    """What would earn nothing is computed at once, or refused."""

    def _has_to_wait(self, arrival: Arrival, view: _View) -> bool:
        return False


PARTS: dict[str, type[Goodput]] = {
    "goodput-decode": _WithoutDecode,
    "goodput-order": _WithoutOrder,
    "goodput-local": _WithoutPrefillOnDecode,
    "goodput-price": _WithoutPrice,
    "goodput-links": _WithoutLinks,
    "goodput-lengths": _WithoutLengths,
    "goodput-waiting": _WithoutWaiting,
}
policies._POLICIES.update(PARTS)
