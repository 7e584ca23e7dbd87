"""Placement policies to compare with: one simple rule each, for both phases."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.placement import (
    Arrival,
    Binding,
    Costs,
    Placement,
    PrefillChoice,
    PromptBlocks,
    WorkerSnapshot,
    prefill_candidates,
    shortfall,
    tie_order,
)

MAX_IMBALANCE = 32
"""Difference in requests or thousands of waiting tokens above which ``cache-aware`` ignores caches."""
MIN_MATCH = 0.5
"""Cached share of a prompt from which ``cache-aware`` follows the cache."""
MAX_PINNED = 100_000
"""Turns that ``conserve`` remembers; a conversation whose last one is forgotten begins anew."""

_Load = Callable[[WorkerSnapshot], float]
"""What a rule takes for the load of a worker, by phase."""


class _Baseline(Placement):
    """A policy with one rule for both phases. It never prefills on decode workers while prefill workers are up."""

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        candidates = prefill_candidates(workers)
        if not candidates:
            return None
        chosen = self._pick(arrival.blocks, candidates, _prompts)
        handoff, num_cached = chosen.role is WorkerRole.PREFILL, arrival.blocks.num_cached_tokens(chosen.cached_blocks)
        return PrefillChoice(chosen.worker_id, handoff, 0.0, num_cached, due_s=arrival.wanted_s)

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        near = [worker for worker in workers if worker.worker_id not in cut_off] or workers
        roomy = [worker for worker in near if not shortfall(arrival.blocks, worker)] or near
        return Binding(self._pick(arrival.blocks, roomy, _answers).worker_id) if roomy else None

    def _pick(self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: _Load) -> WorkerSnapshot:
        """One of ``workers``, which are one or more."""
        raise NotImplementedError


class RoundRobin(_Baseline):
    """Each worker in turn, by phase."""

    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._last: dict[_Load, str] = {}

    def _pick(self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: _Load) -> WorkerSnapshot:
        last = self._last.get(load, "")
        chosen = min(workers, key=lambda worker: (worker.worker_id <= last, worker.worker_id))
        self._last[load] = chosen.worker_id
        return chosen


class LeastLoaded(_Baseline):
    """Fewest waiting prompt tokens, then fewest answers."""

    def _pick(self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: _Load) -> WorkerSnapshot:
        return min(workers, key=lambda worker: (load(worker), tie_order(blocks, worker)))


class PowerOfTwo(LeastLoaded):
    """The less loaded of two random workers (Mitzenmacher, 2001)."""

    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._random = random.Random(0)

    def _pick(self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: _Load) -> WorkerSnapshot:
        return super()._pick(blocks, self._random.sample(workers, min(2, len(workers))), load)


class CacheAware(LeastLoaded):
    """The longest cached prefix while loads are balanced, as SGLang's router does; else the least load."""

    def _pick(self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: _Load) -> WorkerSnapshot:
        loads = [load(worker) for worker in workers]
        if max(loads) - min(loads) <= MAX_IMBALANCE:
            cached = {worker.worker_id: blocks.num_cached_tokens(worker.cached_blocks) for worker in workers}
            most = max(cached.values())
            if most >= MIN_MATCH * blocks.num_tokens:
                workers = [worker for worker in workers if cached[worker.worker_id] == most]
        return super()._pick(blocks, workers, load)


class ConServe(LeastLoaded):
    """Pins each conversation to the decode worker of its first turn, which computes its later prompts, too, so that KV
    moves once (Ding et al., "Observation, Not Prediction", arXiv 2606.01839).

    First turns go to the least loaded prefill worker, then to the decode worker with the most free blocks. A prompt is
    a later turn if its blocks begin with all full blocks of an earlier prompt.
    """

    def __init__(self, costs: Costs, *, tpot_slo_s: float = 0.0) -> None:
        super().__init__(costs, tpot_slo_s=tpot_slo_s)
        self._pinned: dict[bytes, str] = {}
        """Worker by the hash of a prompt's last full block."""

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        hashes = reversed(arrival.blocks.hashes())
        pinned = next((self._pinned[each] for each in hashes if each in self._pinned), "")
        at_home = [each for each in workers if each.worker_id == pinned and each.role is not WorkerRole.PREFILL]
        if at_home:
            num_cached = arrival.blocks.num_cached_tokens(at_home[0].cached_blocks)
            choice: PrefillChoice | None = PrefillChoice(pinned, False, 0.0, num_cached, due_s=arrival.wanted_s)
        else:
            choice = super().prefill(arrival, workers)
        if choice is not None and not choice.handoff:
            self._pin(arrival, workers, choice.worker_id)
        return choice

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        binding = super().decode(arrival, workers, cut_off, source_host)
        if binding is not None:
            self._pin(arrival, workers, binding.worker_id)
        return binding

    def _pick(self, blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], load: _Load) -> WorkerSnapshot:
        return super()._pick(blocks, workers, _prompts if load is _prompts else _held_blocks)

    def _pin(self, arrival: Arrival, workers: Sequence[WorkerSnapshot], worker_id: str) -> None:
        hashes = arrival.blocks.hashes()
        # What is cached already is a system prompt, or the pinned part of a conversation: it would pin strangers.
        if hashes and not any(hashes[-1] in worker.cached_blocks for worker in workers):
            self._pinned[hashes[-1]] = worker_id
            if len(self._pinned) > MAX_PINNED:
                del self._pinned[next(iter(self._pinned))]


def _prompts(worker: WorkerSnapshot) -> float:
    """Load of a candidate for prefill: thousands of waiting tokens, and answers, of which a prefill worker has none."""
    return worker.num_waiting_tokens / 1000 + worker.num_decoding


def _answers(worker: WorkerSnapshot) -> float:
    return worker.num_decoding


def _held_blocks(worker: WorkerSnapshot) -> float:
    """Up to a constant, as pools of one role are equally large."""
    return -worker.num_free_blocks
