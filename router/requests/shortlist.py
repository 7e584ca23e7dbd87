"""First stage of a decision of the ``goodput`` policy: the few workers that are worth a score.

All workers of a role are ordered by one number each that follows from their snapshots alone, so the time of a decision
grows with the number of workers by that number only. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest

from pdserve.model.cost.cost_model import CostModel
from pdserve.router.requests.placement import PromptBlocks, WorkerSnapshot, shortfall

NUM_SCORED = 4
"""Workers that are scored of each order. More than one, because the orders know neither how much time the answers there
have left nor which prompts would run behind the new one; few, because neighbours in an order differ little."""
_Keys = list[tuple[float, float, int, int]]
"""For each worker two numbers of its order, its empty blocks, of which the most go first, and its index."""


def by_backlog(
    blocks: PromptBlocks,
    workers: Sequence[WorkerSnapshot],
    cached: Mapping[str, int],
    late_tokens: Mapping[str, int],
) -> Sequence[WorkerSnapshot]:
    """Workers of one role on which token 0 of a prompt may come first.

    They have the fewest tokens to compute before it, late prompts aside, or cache most of the prompt and have the
    fewest of those that do; the last one has the fewest with late prompts, behind which a late one would run.

    Args:
        cached: tokens of the prompt that workers cache, by id.
        late_tokens: tokens of late prompts that wait on workers, by id.
    """
    if len(workers) <= NUM_SCORED:
        return workers
    num_tokens, num_cached, num_late = blocks.num_tokens, cached.get, late_tokens.get
    keys = [
        (
            (worker.num_waiting_tokens + num_tokens - num_cached(worker.worker_id, 0) - num_late(worker.worker_id, 0))
            * worker.prefill_correction,
            0.0,
            -worker.num_empty_blocks,
            index,
        )
        for index, worker in enumerate(workers)
    ]
    others = [min(range(len(workers)), key=lambda index: workers[index].num_waiting_tokens)] if late_tokens else []
    return _first(keys, others, blocks, workers, cached)


def by_room(
    blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], cached: Mapping[str, int], cost: CostModel
) -> Sequence[WorkerSnapshot]:
    """Workers of one role where one more answer may cause the fewest misses.

    They lack the fewest blocks and batch slots and have the shortest steps, or also cache most of the prompt. The last
    one has the longest steps of those with room: answers that have missed their objectives already lose nothing.
    """
    if len(workers) <= NUM_SCORED:
        return workers
    num_blocks, decode_s = blocks.num_blocks(), cost.decode_s
    keys: _Keys = [
        (
            0
            if worker.num_free_blocks >= num_blocks and worker.num_decoding < worker.max_batch_size
            else shortfall(blocks, worker),
            decode_s(worker.num_decoding + 1, worker.num_context_tokens) * worker.decode_correction,
            -worker.num_empty_blocks,
            index,
        )
        for index, worker in enumerate(workers)
    ]
    longest = max(keys, key=lambda key: (-key[0], key[1]))[-1]
    return _first(keys, [longest], blocks, workers, cached)


def _first(
    keys: _Keys,
    others: Sequence[int],
    blocks: PromptBlocks,
    workers: Sequence[WorkerSnapshot],
    cached: Mapping[str, int],
) -> list[WorkerSnapshot]:
    """First workers of all, those of them that cache most of the prompt, and ``others`` by index."""
    holders = (
        [key for key in keys if 2 * cached.get(workers[key[-1]].worker_id, 0) > blocks.num_tokens] if cached else []
    )
    first = [key[-1] for key in (*nsmallest(NUM_SCORED, keys), *nsmallest(NUM_SCORED, holders))]
    return [workers[index] for index in dict.fromkeys((*first, *others))]
