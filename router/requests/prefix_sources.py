"""Which worker a prompt's worker pulls a prefix from, if a pull is predicted to take less time than to compute it.

Used by `pdserve.router.requests.goodput`. The worker pulls what it lacks of the prefix when it gets to the prompt, and
computes what does not come (`pdserve.engine.scheduling.prefixes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nsmallest
from math import ceil
from operator import itemgetter
from typing import NamedTuple

from pdserve.contracts.request import MAX_PREFIX_BLOCKS
from pdserve.contracts.worker_config import whole_worker_id
from pdserve.model.cost.cost_model import OnlineCorrection
from pdserve.router.requests.least_time import mixed_correction
from pdserve.router.requests.placement import Arrival, Costs, PrefixPull, WorkerSnapshot
from pdserve.router.requests.shortlist import NUM_SCORED
from pdserve.router.requests.worker_view import WorkerView


class Sources(NamedTuple):
    """Workers that a prefix of a prompt may be pulled from."""

    num_tokens: int
    """Leading tokens that each caches."""
    waits: list[tuple[float, WorkerSnapshot]]
    """Each with the seconds until it may lend."""


class PrefixSources:
    """Chooses the pulls, and when each worker may lend again."""

    def __init__(self, costs: Costs, pull_corrections: tuple[OnlineCorrection, OnlineCorrection]) -> None:
        """
        Args:
            pull_corrections: of `pdserve.router.requests.placement.Placement`.
        """
        self._costs = costs
        self._pull_corrections = pull_corrections
        self._lends_until_s: dict[str, float] = {}
        """By id of the worker."""

    def leave(self, worker_id: str, until_s: float) -> None:
        """Have nothing more pulled from a worker before ``until_s``."""
        self._lends_until_s[worker_id] = until_s

    def of(self, arrival: Arrival, workers: Iterable[WorkerSnapshot], cached: Mapping[str, int]) -> Sources | None:
        """Workers that cache the most of a prompt, a few that answer soonest; ``None`` if it is too little for a pull.
        Micro-batches of a pipeline share the address that others pull from, which does not tell them apart.

        Args:
            cached: tokens of the prompt that workers cache, by id.
        """
        most = max(cached.values(), default=0)
        if not _is_most(most, 0, arrival.blocks.num_tokens):
            return None
        have_most = (each for each in workers if cached.get(each.worker_id) == most)
        turns = [(self._turn_s(each), each) for each in have_most if whole_worker_id(each.worker_id) == each.worker_id]
        waits = [
            (max(turn_s, self._lends_until_s.get(each.worker_id, 0.0) - arrival.now_s), each)
            for turn_s, each in nsmallest(NUM_SCORED, turns, itemgetter(0))
        ]
        return Sources(most, waits) if waits else None

    def pull(self, arrival: Arrival, view: WorkerView, num_cached: int, sources: Sources) -> PrefixPull | None:
        """The pull that brings a worker most of what it lacks of a prompt, beside the ``num_cached`` tokens that it
        caches; ``None`` if to compute them takes less time."""
        num_tokens, block_size = arrival.blocks.num_tokens, arrival.blocks.block_size
        num_pulled = min(sources.num_tokens - num_cached, MAX_PREFIX_BLOCKS * block_size)
        num_known = num_cached + num_pulled
        if not _is_most(num_known, num_cached, num_tokens):
            return None
        pulls = []
        for waits_s, source in sources.waits:
            same_host = source.host == view.snapshot.host
            costs = [self._costs[role] for role in {source.role, view.role}]
            pull_s = max([cost.pull_s(num_pulled, same_host=same_host) for cost in costs])
            pulls.append((waits_s + pull_s * self._pull_corrections[same_host].factor, source.worker_id))
        pull_s, source_id = min(pulls)
        prefill_s = view.prefill_s(num_tokens, num_cached) - view.prefill_s(num_tokens, num_known)
        if pull_s >= prefill_s:
            return None
        min_tokens = ceil(num_pulled * pull_s / prefill_s)
        return PrefixPull(source_id, num_known, min_tokens, pull_s, prefill_s)

    def _turn_s(self, worker: WorkerSnapshot) -> float:
        """Seconds of a step of the worker, after which it answers a pull."""
        num_tokens = min(worker.num_waiting_tokens, worker.max_batch_tokens)
        if not num_tokens:
            return worker.next_step_s if worker.num_decoding else 0.0
        step_s = self._costs[worker.role].mixed_s(num_tokens, 0, worker.num_decoding, worker.num_context_tokens)
        return step_s * mixed_correction(worker)


def _is_most(num_source: int, num_cached: int, num_tokens: int) -> bool:
    """Whether a pull of what a source caches brings most of what a worker lacks of a prompt. If not, the source may be
    computing the same prompt, and soon has more."""
    return 2 * (num_source - num_cached) >= num_tokens - num_cached
