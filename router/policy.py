"""Which worker runs each phase of a request: a pure function of snapshots, a request and the cost model.

The first policy takes the least predicted time: TTFT for prefill, TPOT for decode. The dispatcher calls it with
snapshots of the fleet and the planner's simulator with snapshots of virtual workers. It does no I/O, reads no clock and
keeps no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pdserve.contracts.block_hash import block_hash, root_hash
from pdserve.contracts.placement import WorkerRole
from pdserve.model.cost import CostModel


class WorkerSnapshot(NamedTuple):
    """What the router knows of one worker at the moment of a decision."""

    worker_id: str
    role: WorkerRole
    max_batch_tokens: int
    max_batch_size: int
    num_running: int
    """Sequences being computed."""
    num_waiting_tokens: int
    """Prompt tokens that are still to be prefilled, those only just sent included."""
    num_context_tokens: int
    """Tokens in the contexts of the sequences that decode or are about to."""
    num_decoding: int
    """Sequences that decode or were sent to decode."""
    num_free_blocks: int
    """Blocks that a new sequence could take, less those promised to sequences only just sent."""
    prefill_correction: float
    """Observed over predicted time of steps with prefill rows."""
    decode_correction: float
    """The same of pure decode steps."""
    cached_blocks: AbstractSet[bytes]
    """Hashes of the blocks in the worker's prefix cache, as far as its events have told."""


class PromptBlocks:
    """A prompt's block hashes, computed only as far as somebody asks.

    Reading one that most workers do not hold costs a single hash; the last block is never counted, because a prompt's
    last token is always computed.
    """

    def __init__(self, tokens: Sequence[int], block_size: int, cache_salt: bytes = b"") -> None:
        self.num_tokens = len(tokens)
        self.block_size = block_size
        self._tokens = tokens
        self._parent = root_hash(cache_salt)
        self._hashes: list[bytes] = []
        self._num_cacheable = (self.num_tokens - 1) // block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the prompt and the next token."""
        return self.num_tokens // self.block_size + 1

    def num_cached_tokens(self, cached_blocks: AbstractSet[bytes]) -> int:
        """Leading tokens whose blocks are all among ``cached_blocks``."""
        num_blocks = 0
        for digest in self._hashes:
            if digest not in cached_blocks:
                return num_blocks * self.block_size
            num_blocks += 1
        while num_blocks < self._num_cacheable and self._next_hash() in cached_blocks:
            num_blocks += 1
        return num_blocks * self.block_size

    def _next_hash(self) -> bytes:
        """Compute one more block's hash."""
        start = len(self._hashes) * self.block_size
        self._parent = block_hash(self._parent, self._tokens[start : start + self.block_size])
        self._hashes.append(self._parent)
        return self._parent


class PrefillChoice(NamedTuple):
    """Where a prompt is computed."""

    worker_id: str
    handoff: bool
    """Whether another worker decodes; False runs the whole request here."""
    ttft_s: float
    """Predicted time to the first new token, from now."""
    num_cached_tokens: int
    """Expected prefix-cache hit."""


class DecodeChoice(NamedTuple):
    """Where a prefilled prompt is decoded."""

    worker_id: str
    has_room: bool
    """False: no worker has room now, and the request will wait on this one, whose shortfall is least."""
    tpot_s: float
    """Predicted time per output token once it has joined."""


def prefill_candidates(workers: Iterable[WorkerSnapshot]) -> list[tuple[WorkerSnapshot, bool]]:
    """Workers that may compute a prompt now, each with whether it hands off.

    Prefill workers count only while some decode worker can take over from them; decode workers prefill for themselves
    only while no prefill worker is up; mixed workers always run the whole request.
    """
    workers = list(workers)
    roles = {worker.role for worker in workers}
    candidates = []
    for worker in workers:
        if worker.role is WorkerRole.PREFILL:
            if WorkerRole.DECODE in roles:
                candidates.append((worker, True))
        elif worker.role is WorkerRole.MIXED or WorkerRole.PREFILL not in roles:
            candidates.append((worker, False))
    return candidates


def predict_ttft_s(worker: WorkerSnapshot, num_tokens: int, num_cached_tokens: int, cost: CostModel) -> float:
    """Time to the first new token of a prompt that joins ``worker``'s queue now.

    The prompts ahead fill steps of ``max_batch_tokens``; sequences that decode beside them lengthen each step.
    """
    num_new = num_tokens - num_cached_tokens
    budget = worker.max_batch_tokens
    queue_s = 0.0
    if worker.num_waiting_tokens > budget:
        queue_s = cost.prefill_s(budget, 0) * worker.num_waiting_tokens / budget
    elif worker.num_waiting_tokens > 0:
        queue_s = cost.prefill_s(worker.num_waiting_tokens, 0)
    own_s = cost.prefill_s(num_new, num_cached_tokens)
    beside_s = 0.0
    if worker.role is not WorkerRole.PREFILL and worker.num_decoding > 0:
        num_steps = -(-(worker.num_waiting_tokens + num_new) // budget)
        beside_s = num_steps * cost.decode_s(worker.num_decoding, worker.num_context_tokens)
    return (queue_s + own_s + beside_s) * worker.prefill_correction


def choose_prefill(blocks: PromptBlocks, workers: Iterable[WorkerSnapshot], cost: CostModel) -> PrefillChoice | None:
    """The worker with the least predicted TTFT, ties to the lowest id; ``None`` when no worker can begin."""
    choices = []
    for worker, handoff in prefill_candidates(workers):
        num_cached = blocks.num_cached_tokens(worker.cached_blocks)
        ttft_s = predict_ttft_s(worker, blocks.num_tokens, num_cached, cost)
        choices.append(PrefillChoice(worker.worker_id, handoff, ttft_s, num_cached))
    return min(choices, key=lambda choice: (choice.ttft_s, choice.worker_id), default=None)


def choose_decode(
    blocks: PromptBlocks,
    workers: Iterable[WorkerSnapshot],
    cost: CostModel,
    cut_off: AbstractSet[str] = frozenset(),
) -> DecodeChoice | None:
    """The decode worker with the least predicted TPOT among those with room, ties to the lowest id.

    Where none has room, the one that lacks the fewest blocks and seats: its queue is first come, first served. ``None``
    when no decode worker is up.

    Args:
        cut_off: ids of workers that could not pull from the prompt's prefill worker lately; taken only if there is no
            other.
    """
    best: tuple[bool, float, float, str] | None = None
    for worker in workers:
        if worker.role is not WorkerRole.DECODE:
            continue
        missing_blocks = max(0, blocks.num_blocks - worker.num_free_blocks)
        missing_seats = max(0, worker.num_decoding + 1 - worker.max_batch_size)
        shortfall = missing_blocks + missing_seats
        num_context = worker.num_context_tokens + blocks.num_tokens
        tpot_s = cost.decode_s(worker.num_decoding + 1, num_context) * worker.decode_correction
        key = (worker.worker_id in cut_off, float(shortfall), tpot_s, worker.worker_id)
        best = key if best is None else min(best, key)
    if best is None:
        return None
    _, shortfall_, tpot_s, worker_id = best
    return DecodeChoice(worker_id, shortfall_ == 0, tpot_s)
