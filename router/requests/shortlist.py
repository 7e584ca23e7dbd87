"""First stage of a decision of the ``goodput`` policy: the few workers that are worth a score.

All workers of a role are ordered by one number each that follows from their snapshots alone, which are made when they
report: the time of a decision grows with the number of workers by that number only. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest

from pdserve.router.requests.placement import PromptBlocks, WorkerSnapshot, shortfall

NUM_SCORED = 4
"""Workers that are scored of each order. More than one, because the orders know neither how much time the answers there
have left nor which prompts would run behind the new one; few, because neighbours in an order differ little."""
_LACKING_S = 1e6
"""What a block or batch slot that is lacking counts as, in seconds of a step: more than any."""


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
    order = [
        (worker.num_waiting_tokens + num_tokens - num_cached(worker.worker_id, 0) - num_late(worker.worker_id, 0))
        * worker.prefill_correction
        for worker in workers
    ]
    others = [min(workers, key=lambda worker: worker.num_waiting_tokens)] if late_tokens else []
    return _first(order, others, blocks, workers, cached)


def by_room(
    blocks: PromptBlocks, workers: Sequence[WorkerSnapshot], cached: Mapping[str, int]
) -> Sequence[WorkerSnapshot]:
    """Workers of one role where one more answer may cause the fewest misses.

    They lack the fewest blocks and batch slots and have the shortest steps, or also cache most of the prompt. The last
    one has the longest steps of those with room: answers that have missed their objectives already lose nothing.
    """
    if len(workers) <= NUM_SCORED:
        return workers
    num_blocks = blocks.num_blocks()
    order = [
        worker.next_step_s
        if worker.num_free_blocks >= num_blocks and worker.num_decoding < worker.max_batch_size
        else worker.next_step_s + _LACKING_S * shortfall(blocks, worker)
        for worker in workers
    ]
    lacks_more_s = (min(order) // _LACKING_S + 1) * _LACKING_S
    longest = order.index(max([each for each in order if each < lacks_more_s]))
    return _first(order, [workers[longest]], blocks, workers, cached)


def _first(
    order: Sequence[float],
    others: Sequence[WorkerSnapshot],
    blocks: PromptBlocks,
    workers: Sequence[WorkerSnapshot],
    cached: Mapping[str, int],
) -> list[WorkerSnapshot]:
    """First workers by ``order``, a number each: of all, and of those that cache most of the prompt; and ``others``.
    Ties go to the most empty blocks, then to those that come first."""
    last, num_tokens = nsmallest(NUM_SCORED, order)[-1], blocks.num_tokens
    groups = [[index for index, each in enumerate(order) if each <= last]]
    if cached:
        groups.append([i for i, worker in enumerate(workers) if 2 * cached.get(worker.worker_id, 0) > num_tokens])
    keys = [sorted((order[index], -workers[index].num_empty_blocks, index) for index in group) for group in groups]
    chosen = [workers[index] for group in keys for _, _, index in group[:NUM_SCORED]]
    return list({each.worker_id: each for each in (*chosen, *others)}.values())
