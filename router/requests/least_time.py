"""The ``least-time`` policy: least predicted TTFT for prefill, least predicted TPOT, transfer included, for decode.

A decode worker may also prefill where that is faster and violates nobody's TPOT (`may_prefill_locally`): typically the
next turn of a chat whose history only that worker caches. The planner's screener,
`pdserve.planner.simulate.scout_kernel`, models this policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import CostModel
from pdserve.router.requests.placement import (
    Arrival,
    Binding,
    Placement,
    PrefillChoice,
    WorkerSnapshot,
    prefill_candidates,
    shortfall,
    tie_order,
)

STALL_TOKENS = 100
"""Tokens of an answer over which the wait for its KV is spread: TPOT includes the handoff stall, and the length of the
answer is unknown."""


class LeastTime(Placement):
    """Least predicted TTFT, then least predicted TPOT."""

    def prefill(self, arrival: Arrival, workers: Sequence[WorkerSnapshot]) -> PrefillChoice | None:
        """Worker with the least predicted TTFT; ``None`` when no worker can start.

        Ties go to prefill and mixed workers, then by `tie_order`. While prefill workers are up, only a decode
        worker's cache or a queue elsewhere brings it a prompt. A lower correction than that of the best prefill
        candidate does not: corrections change within seconds, and prompts would oscillate.
        """
        blocks, num_tokens = arrival.blocks, arrival.blocks.num_tokens
        options: list[tuple[float, bool, tuple[int, str], bool, int, float]] = []  # the least one wins
        candidates = prefill_candidates(workers)
        for worker in candidates:
            num_cached = blocks.num_cached_tokens(worker.cached_blocks)
            ttft_s = predict_ttft_s(worker, num_tokens, num_cached, self.costs[worker.role])
            is_decode, handoff = worker.role is WorkerRole.DECODE, worker.role is WorkerRole.PREFILL
            order = tie_order(blocks, worker)
            options.append((ttft_s, is_decode, order, handoff, num_cached, worker.prefill_correction))
        if not options:
            return None
        if not arrival.is_probe and any(worker.role is WorkerRole.PREFILL for worker in candidates):
            cost, correction = self.costs[WorkerRole.DECODE], min(options)[-1]
            for worker in workers:
                if worker.role is not WorkerRole.DECODE or shortfall(blocks, worker):
                    continue  # without blocks and a batch slot, the request would wait for them before its token 0
                num_cached = blocks.num_cached_tokens(worker.cached_blocks)
                if may_prefill_locally(worker, num_tokens, num_cached, cost, tpot_slo_s=self.tpot_slo_s):
                    ttft_s = predict_ttft_s(worker, num_tokens, num_cached, cost, least=correction)
                    options.append((ttft_s, True, tie_order(blocks, worker), False, num_cached, correction))
        ttft_s, _, (_, worker_id), handoff, num_cached, _ = min(options)
        return PrefillChoice(worker_id, handoff, ttft_s, num_cached, due_s=arrival.wanted_s)

    def decode(
        self, arrival: Arrival, workers: Sequence[WorkerSnapshot], cut_off: AbstractSet[str], source_host: str
    ) -> Binding | None:
        """Decode worker with the least predicted TPOT among those with room; ties go by `tie_order`.

        The pull, shorter where more of the prompt is cached, counts with its share of TPOT: among workers of similar
        load, the one with less to pull wins. If none has room, the worker that lacks the fewest blocks and batch slots
        wins: its queue is first come, first served. ``None`` when no decode worker is up.
        """
        blocks, cost, keys = arrival.blocks, self.costs[WorkerRole.DECODE], []
        for worker in workers:
            tpot_s = predict_tpot_s(worker, blocks.num_tokens, cost)
            num_to_pull = blocks.num_tokens - blocks.num_cached_tokens(worker.cached_blocks)
            same_host = worker.host == source_host
            transfer_s = cost.transfer_s(num_to_pull, same_host=same_host) * self.pull_corrections[same_host].factor
            total_s = tpot_s + transfer_s / STALL_TOKENS
            keys.append((worker.worker_id in cut_off, shortfall(blocks, worker), total_s, tie_order(blocks, worker)))
        return Binding(min(keys)[-1][-1]) if keys else None


def predict_ttft_s(
    worker: WorkerSnapshot,
    num_tokens: int,
    num_cached: int,
    cost: CostModel,
    num_behind: int = 0,
    least: float = 0.0,
    num_answers: int = 0,
) -> float:
    """Seconds to the first new token of a prompt that joins ``worker``'s queue now.

    Prompts ahead fill steps of ``max_batch_tokens``; sequences that decode in the same steps lengthen each.

    Args:
        num_behind: waiting tokens that it goes before, unless they are in flight.
        least: lower bound of the worker's correction.
        num_answers: that decode on a prefill worker, from before it became one.
    """
    num_new = num_tokens - num_cached
    budget, num_ahead = worker.max_batch_tokens, worker.num_waiting_tokens
    num_ahead = max(worker.num_tokens_in_flight, num_ahead - num_behind) if num_behind else num_ahead
    ahead_s = queue_s(num_ahead, budget, cost)
    own_s = cost.prompt_s(num_new, num_cached, budget)
    beside_s = 0.0
    num_decoding = num_answers if worker.role is WorkerRole.PREFILL else worker.num_decoding
    if num_decoding > 0:
        num_left = num_ahead + num_new
        chunk = min(num_left, budget)
        step_s = cost.mixed_s(chunk, num_cached, num_decoding, worker.num_context_tokens)
        beside_s = -(-num_left // budget) * (step_s - cost.prefill_s(chunk, num_cached))
    return (ahead_s + own_s + beside_s) * max(least, mixed_correction(worker))


def predict_tpot_s(worker: WorkerSnapshot, num_tokens: int, cost: CostModel) -> float:
    """Seconds per output token of a decode worker once a prompt of ``num_tokens`` has joined."""
    num_context = worker.num_context_tokens + num_tokens
    return cost.decode_s(worker.num_decoding + 1, num_context) * worker.decode_correction


def queue_s(num_tokens: int, max_batch_tokens: int, cost: CostModel) -> float:
    """Seconds of so many waiting tokens, in steps of ``max_batch_tokens``."""
    if num_tokens > max_batch_tokens:
        return cost.prefill_s(max_batch_tokens, 0) * num_tokens / max_batch_tokens
    return cost.prefill_s(num_tokens, 0) if num_tokens > 0 else 0.0


def may_prefill_locally(
    worker: WorkerSnapshot, num_tokens: int, num_cached_tokens: int, cost: CostModel, *, tpot_slo_s: float
) -> bool:
    """Whether a decode worker may compute a prompt without harm to sequences that decode there or are about to.

    The step that delays their tokens grows by the prompt's chunk. Together with prompts already waiting there, it must
    not exceed the TPOT objective. Sarathi-Serve chooses its token budget by the same rule (Agrawal et al., OSDI 2024,
    section 4.3); here it applies to one step instead of all. It applies to an idle worker too, so long prompts go to
    prefill workers.

    Args:
        tpot_slo_s: TPOT objective; 0 for none, and decode workers then prefill nothing.
    """
    num_new = worker.num_waiting_tokens + num_tokens - num_cached_tokens
    step_s = cost.mixed_s(
        min(num_new, worker.max_batch_tokens), num_cached_tokens, worker.num_decoding, worker.num_context_tokens
    )
    return step_s * mixed_correction(worker) <= tpot_slo_s


def mixed_correction(worker: WorkerSnapshot) -> float:
    """Observed over predicted time of steps with prefill rows. A decode worker may not have run one lately, or ever, so
    its correction for pure decode steps is a lower bound."""
    if worker.role is WorkerRole.DECODE:
        return max(worker.prefill_correction, worker.decode_correction)
    return worker.prefill_correction
