"""The work that requests bring, in seconds of one worker, by the cost model: what an autoscaler decides by.

Owned by the dispatcher, live and in the planner's simulator alike; `pdserve.planner.autoscale` reads it. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import CostModel
from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.attempt import Attempt, Decoding, Held, Parked, Prefilling, Queued
from pdserve.router.requests.lengths import LENGTH_MEMORY
from pdserve.router.requests.placement import Costs
from pdserve.router.requests.request import Request

TPOT_SHARE, KV_SHARE = 0.85, 0.9
"""Shares of the TPOT objective and of a decode worker's KV pool that a full batch takes."""


class Demand(NamedTuple):
    """At one instant."""

    prefill_s: float = 0.0
    """Predicted seconds of all prompts accepted so far, less what caches had of them."""
    num_answers: int = 0
    """Accepted so far."""
    answer_s: float = 0.0
    """Seconds of a decode worker for each answer, in full batches: as large as TPOT and KV allow. 0: not known yet,
    because no answer has ended, or no decode worker is up."""
    waiting_s: float = 0.0
    """Predicted seconds of the prompts that wait."""
    num_waiting: int = 0
    """Answers that do not decode yet, and have no decode worker to."""
    num_full: float = 0.0
    """Decode workers that the others fill."""

    def beside(self, other: Demand) -> Demand:
        """That of two routers."""
        return Demand(
            self.prefill_s + other.prefill_s,
            self.num_answers + other.num_answers,
            max(self.answer_s, other.answer_s),
            self.waiting_s + other.waiting_s,
            self.num_waiting + other.num_waiting,
            self.num_full + other.num_full,
        )


class DemandMeter:
    """Of one router."""

    def __init__(self, costs: Costs, tpot_slo_s: float) -> None:
        self._prefill, self._decode = costs.get(WorkerRole.PREFILL), costs.get(WorkerRole.DECODE)
        self._tpot_slo_s = tpot_slo_s
        self._budget, self._correction = 2048, 1.0
        """Token budget of prefill workers' steps, and observed over predicted time of these, as of the last look."""
        self._prefill_s, self._num_answers = 0.0, 0
        self._num_ended = self._num_tokens = self._num_attended = 0.0
        """Of answers that ended, the older the less: their number, tokens, and context of all tokens."""

    def accepted(self, request: Request) -> None:
        request.predicted_prefill_s = self._prompt_s(len(request.spec.prompt_tokens))
        self._prefill_s += request.predicted_prefill_s
        self._num_answers += request.spec.num_choices

    def prompt_started(self, request: Request) -> None:
        """The cached part of its prompt is known."""
        num_tokens, num_cached = len(request.spec.prompt_tokens), request.num_cached_tokens
        if whole_s := self._prompt_s(num_tokens):
            cached_share = 1 - self._prompt_s(num_tokens, num_cached) / whole_s
            self._prefill_s -= cached_share * request.predicted_prefill_s

    def answer_ended(self, num_prompt_tokens: int, num_tokens: int) -> None:
        kept = 1 - 1 / LENGTH_MEMORY
        self._num_ended = self._num_ended * kept + 1
        self._num_tokens = self._num_tokens * kept + num_tokens
        self._num_attended = self._num_attended * kept + num_tokens * (num_prompt_tokens + num_tokens / 2)

    def now(self, workers: Iterable[Worker], attempts: Iterable[Attempt]) -> Demand:
        """The demand; ``workers``: those that are up."""
        workers = list(workers)
        prefillers = [worker for worker in workers if worker.role is WorkerRole.PREFILL]
        decoders = [worker for worker in workers if worker.role is WorkerRole.DECODE and _num_blocks(worker)]
        if prefillers:
            self._budget = min(worker.max_batch_tokens for worker in prefillers)
            self._correction = sum(worker.load.prefill_correction for worker in prefillers) / len(prefillers)
        waiting_s, num_waiting, num_decoding = 0.0, 0, 0
        for attempt in attempts:
            match attempt.state:
                case Queued() | Held() | Prefilling(started_s=None):
                    waiting_s += self._prompt_s(len(attempt.request.spec.prompt_tokens))
                    num_waiting += 1
                case Parked(pull=None):
                    num_waiting += 1
                case Parked() | Decoding():
                    num_decoding += 1
        answer_s = num_full = 0.0
        if self._decode is not None and decoders and self._num_tokens:
            batch, step_s = self._full_batch(self._decode, decoders)
            answer_s, num_full = self._num_tokens / self._num_ended * step_s / batch, num_decoding / batch
        return Demand(self._prefill_s, self._num_answers, answer_s, waiting_s, num_waiting, num_full)

    def _prompt_s(self, num_tokens: int, num_cached: int = 0) -> float:
        if self._prefill is None:
            return 0.0
        return self._prefill.prompt_s(num_tokens - num_cached, num_cached, self._budget) * self._correction

    def _full_batch(self, cost: CostModel, decoders: Sequence[Worker]) -> tuple[int, float]:
        """Answers of a full batch, and seconds of its steps."""
        context = self._num_attended / self._num_tokens
        correction = sum(worker.load.decode_correction for worker in decoders) / len(decoders)
        num_tokens = KV_SHARE * min(map(_num_blocks, decoders)) * decoders[0].block_size
        most = max(1, min(min(worker.max_batch_size for worker in decoders), int(num_tokens / max(context, 1.0))))

        def step_s(batch: int) -> float:
            return cost.decode_s(batch, int(batch * context)) * correction

        batch = max(1, bisect_left(range(1, most + 1), TPOT_SHARE * self._tpot_slo_s, key=step_s))
        return batch, step_s(batch)


def _num_blocks(worker: Worker) -> int:
    """Of its KV pool; 0 before it has reported."""
    load = worker.load
    return load.num_blocks_free + load.num_blocks_cached + load.num_blocks_referenced
