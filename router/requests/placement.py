"""Placement policies behind one interface: which worker computes a prompt, and which one decodes its answer.

The dispatcher owns one `Placement`, live and in the planner's simulator alike, asks it for both decisions and reports
what became of them. Pure: no I/O and no clock; the same calls give the same decisions. Here are ``least-time``, which
`pdserve.router.requests.policy` computes, and the baselines to compare with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pdserve.contracts.placement import WorkerRole
from pdserve.router.requests.policy import (
    Costs,
    PrefillChoice,
    PromptBlocks,
    WorkerSnapshot,
    choose_decode,
    choose_prefill,
    prefill_candidates,
    shortfall,
    tie_order,
)

MAX_IMBALANCE = 32
"""Difference in requests or thousands of waiting tokens above which ``cache-aware`` ignores caches."""
MIN_MATCH = 0.5
"""Cached share of a prompt from which ``cache-aware`` follows the cache."""


class Arrival(NamedTuple):
    """A prompt to place."""

    request_id: int
    blocks: PromptBlocks
    now_s: float
    wanted_s: float
    """Instant at which token 0 is due; infinite if it has no objective, or is out already."""
    is_resumed: bool = False
    """Its client has tokens already: workers compute it before all prompts that have not begun."""
    is_probe: bool = False
    """Health probe: to be handed off if that is possible."""
    tpot_slo_s: float = 0.0
    """TPOT objective; 0 for none."""
    weight: float = 1.0
    """Worth of meeting both objectives, as a share of that in the heaviest tier."""
    may_refuse: bool = False
    """Refuse it if it would meet its objectives nowhere."""
    queued_s: float = 0.0
    """Instant from which it waits."""
    share: str = ""
    """Prompts of one share wait behind each other, those of several side by side: its tenant and tier."""


class Binding(NamedTuple):
    """Decode worker chosen for a prompt."""

    worker_id: str
    stall_slo_s: float = 0.0
    """As in `pdserve.contracts.request.GenerationRequest`."""


class Placement:
    """Decides; the base class ignores what is reported."""

    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        """``tpot_slo_s``: the tightest TPOT objective of any request; 0 for none."""
        self.costs = costs
        self.tpot_slo_s = tpot_slo_s

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        """Worker that computes the prompt, if `placed` follows; ``None`` if no worker can start."""
        raise NotImplementedError

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        """Decode worker of a prompt whose last chunk is planned; ``None`` if none is up.

        Args:
            workers: decode workers.
            cut_off: ids of workers that recently failed to pull from the prompt's prefill worker; a last resort.
            source_host: host of the prompt's prefill worker.
        """
        raise NotImplementedError

    def placed(self, arrival: Arrival, choice: PrefillChoice) -> None:
        """The prompt was sent as chosen."""

    def prefilled(self, request_id: int, worker_id: str) -> None:
        """The last chunk of its prompt was planned, or token 0 arrived."""

    def decoding(self, request_id: int, began_s: float, num_tokens: int, worker: WorkerSnapshot) -> None:
        """An answer, ``num_tokens`` long so far since ``began_s``, decodes on ``worker`` from now on."""

    def left(self, request_id: int, num_tokens: int) -> None:
        """The request is on no worker any more; its answer ended with ``num_tokens``, or 0 if it did not."""


class LeastTime(Placement):
    """Least predicted TTFT, then least predicted TPOT."""

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        tpot_slo_s = 0.0 if arrival.is_probe else self.tpot_slo_s
        choice = choose_prefill(arrival.blocks, workers, self.costs, tpot_slo_s=tpot_slo_s)
        return None if choice is None else choice._replace(due_s=arrival.wanted_s)

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        choice = choose_decode(arrival.blocks, workers, self.costs, cut_off, source_host=source_host)
        return None if choice is None else Binding(choice.worker_id)


class _Baseline(Placement):
    """A policy with one rule for both phases. It never prefills on decode workers while prefill workers are up."""

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        handoffs = {worker.worker_id: handoff for worker, handoff in prefill_candidates(workers)}
        candidates = [worker for worker in workers if worker.worker_id in handoffs]
        if not candidates:
            return None
        chosen = self._pick(arrival.blocks, candidates, _prompts)
        num_cached = arrival.blocks.num_cached_tokens(chosen.cached_blocks)
        return PrefillChoice(chosen.worker_id, handoffs[chosen.worker_id], 0.0, num_cached, due_s=arrival.wanted_s)

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        up = [worker for worker in workers if worker.role is WorkerRole.DECODE]
        near = [worker for worker in up if worker.worker_id not in cut_off] or up
        roomy = [worker for worker in near if not shortfall(arrival.blocks, worker)] or near
        return Binding(self._pick(arrival.blocks, roomy, _answers).worker_id) if roomy else None

    def _pick(
        self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: Callable[[WorkerSnapshot], float]
    ) -> WorkerSnapshot:
        """One of ``workers``, which are one or more."""
        raise NotImplementedError


class RoundRobin(_Baseline):
    """Each worker in turn, by phase."""

    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._last: dict[Callable[[WorkerSnapshot], float], str] = {}

    def _pick(
        self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: Callable[[WorkerSnapshot], float]
    ) -> WorkerSnapshot:
        last = self._last.get(load, "")
        chosen = min(workers, key=lambda worker: (worker.worker_id <= last, worker.worker_id))
        self._last[load] = chosen.worker_id
        return chosen


class LeastLoaded(_Baseline):
    """Fewest waiting prompt tokens, then fewest answers."""

    def _pick(
        self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: Callable[[WorkerSnapshot], float]
    ) -> WorkerSnapshot:
        return min(workers, key=lambda worker: (load(worker), tie_order(blocks, worker)))


class PowerOfTwo(LeastLoaded):
    """The less loaded of two random workers (Mitzenmacher, 2001)."""

    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._random = random.Random(0)

    def _pick(
        self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: Callable[[WorkerSnapshot], float]
    ) -> WorkerSnapshot:
        return super()._pick(blocks, self._random.sample(workers, min(2, len(workers))), load)


class CacheAware(LeastLoaded):
    """The longest cached prefix while loads are balanced, as SGLang's router does; else the least load."""

    def _pick(
        self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: Callable[[WorkerSnapshot], float]
    ) -> WorkerSnapshot:
        loads = [load(worker) for worker in workers]
        if max(loads) - min(loads) <= MAX_IMBALANCE:
            cached = {worker.worker_id: blocks.num_cached_tokens(worker.cached_blocks) for worker in workers}
            most = max(cached.values())
            if most >= MIN_MATCH * blocks.num_tokens:
                workers = [worker for worker in workers if cached[worker.worker_id] == most]
        return super()._pick(blocks, workers, load)


def _prompts(worker: WorkerSnapshot) -> float:
    """Load of a candidate for prefill: thousands of waiting tokens, and answers, of which a prefill worker has none."""
    return worker.num_waiting_tokens / 1000 + worker.num_decoding


def _answers(worker: WorkerSnapshot) -> float:
    return worker.num_decoding
