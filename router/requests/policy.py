"""The ``least-time`` policy and the view of workers that all policies share (`pdserve.router.requests.placement`).

Minimises predicted time: TTFT for prefill, TPOT including the transfer for decode. A decode worker may also prefill
where that is faster and violates nobody's TPOT (`may_prefill_locally`): typically the next turn of a chat whose history
only that worker caches. No I/O, no clock, no state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from typing import NamedTuple

from pdserve.contracts.block_hash import block_hash, root_hash
from pdserve.contracts.placement import WorkerRole
from pdserve.model.cost.cost_model import CostModel

STALL_TOKENS = 100
"""Tokens of an answer over which the wait for its KV is spread: TPOT includes the handoff stall, and the length of the
answer is unknown."""


class WorkerSnapshot(NamedTuple):
    """State of one worker at the moment of a decision."""

    worker_id: str
    role: WorkerRole
    max_batch_tokens: int
    max_batch_size: int
    num_waiting_tokens: int
    """Prompt tokens still to be prefilled, including those just sent and those of steps in flight."""
    num_context_tokens: int
    """Context tokens of sequences that decode or are about to."""
    num_decoding: int
    """Sequences that decode or were sent to decode."""
    num_free_blocks: int
    """Blocks available to a new sequence, less those of sequences just sent."""
    prefill_correction: float
    """Observed over predicted time of steps with prefill rows."""
    decode_correction: float
    """Observed over predicted time of pure decode steps."""
    cached_blocks: Container[bytes]
    """Hashes of the blocks in the worker's prefix cache, as far as its events have reported."""
    host: str = ""
    """Host of the worker: KV between two workers of one host takes the faster path."""
    num_steps: int = 0
    """Steps in which its sequences decoded so far ..."""
    stepped_s: float = 0.0
    """... and the instant of the last one."""
    num_tokens_in_flight: int = 0
    """Prompt tokens of steps in flight, which no other prompt can go before."""
    num_empty_blocks: int = 0
    """Of the free blocks, those that no prefix is cached in."""


class PromptBlocks:
    """Block hashes of a prompt, computed lazily.

    Looking up a prompt that most workers do not cache costs one hash. The last block is never counted, because the last
    token of a prompt is always computed.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        block_size: int,
        cache_salt: bytes = b"",
        *,
        may_use_cache: bool = True,
        known_hashes: Sequence[bytes] = (),
    ) -> None:
        """
        Args:
            may_use_cache: False forces every token to be computed, cached or not.
            known_hashes: hashes of leading full blocks that were computed before.
        """
        self.num_tokens = len(tokens)
        self.block_size = block_size
        self._tokens = tokens
        self._num_cacheable = (self.num_tokens - 1) // block_size if may_use_cache else 0
        self._hashes = list(known_hashes[: self._num_cacheable])
        self._parent = self._hashes[-1] if self._hashes else root_hash(cache_salt)

    def num_blocks(self) -> int:
        """Blocks that hold the prompt and the next token."""
        return self.num_tokens // self.block_size + 1

    def num_cached_tokens(self, cached_blocks: Container[bytes]) -> int:
        """Leading tokens whose blocks are all in ``cached_blocks``, which has the parent of each of its blocks: workers
        evict the leaves of a chain first. Takes a logarithm of the known hashes, and each new one once."""
        if not self._num_cacheable:
            return 0
        hashes = self._hashes
        if hashes and hashes[0] not in cached_blocks:
            return 0
        num_blocks = bisect_left(hashes, True, key=lambda each: each not in cached_blocks)
        if num_blocks < len(hashes):
            return num_blocks * self.block_size
        while num_blocks < self._num_cacheable and self._next_hash() in cached_blocks:
            num_blocks += 1
        return num_blocks * self.block_size

    def num_cached_tokens_on(self, workers: Sequence[WorkerSnapshot]) -> list[int]:
        """`num_cached_tokens` of each worker."""
        num_cached = [0] * len(workers)
        if self._num_cacheable:
            first = self._hashes[0] if self._hashes else self._next_hash()
            for index in [index for index, worker in enumerate(workers) if first in worker.cached_blocks]:
                num_cached[index] = self.num_cached_tokens(workers[index].cached_blocks)
        return num_cached

    def _next_hash(self) -> bytes:
        start = len(self._hashes) * self.block_size
        self._parent = block_hash(self._parent, self._tokens[start : start + self.block_size])
        self._hashes.append(self._parent)
        return self._parent


Costs = Mapping[WorkerRole, CostModel]
"""Cost model of each role; hardware and parallelism may differ between roles."""


class PrefillChoice(NamedTuple):
    """Worker chosen to compute a prompt."""

    worker_id: str
    handoff: bool
    """Whether another worker decodes; False runs the whole request here."""
    ttft_s: float
    """Predicted seconds from now to the first new token; on a busy decode worker, with the larger correction."""
    num_cached_tokens: int
    """Expected prefix-cache hit."""
    is_late: bool = False
    """It cannot meet its TTFT objective, or not without harm: it runs behind prompts that can."""
    waits: bool = False
    """Late, and harmful to answers wherever it would decode: it is not to be sent yet."""
    own_s: float = 0.0
    """Predicted seconds of its own tokens."""
    due_s: float = inf
    """Instant by which workers order prompts; infinite for none."""
    retry_after_s: float = 0.0
    """Above 0: the request is refused, and may be served after so many seconds."""
    harm_per_s: float = 0.0
    """Chance to meet TTFT, times weight, that each second of delay would cost it."""


class DecodeChoice(NamedTuple):
    """Worker chosen to decode a prefilled prompt."""

    worker_id: str
    has_room: bool
    """False: no worker has room now, and the request waits on this one, which lacks least."""
    tpot_s: float
    """Predicted seconds per output token once the sequence has joined."""
    transfer_s: float
    """Predicted seconds of the pull."""


def prefill_candidates(workers: Iterable[WorkerSnapshot]) -> list[tuple[WorkerSnapshot, bool]]:
    """Workers that may compute any prompt now, each with whether it hands off.

    Prefill workers count only while a decode worker can take over from them, decode workers only while no prefill
    worker is up. Mixed workers always run the whole request.
    """
    workers = list(workers)
    roles = [worker.role for worker in workers]
    has_decode, has_prefill = WorkerRole.DECODE in roles, WorkerRole.PREFILL in roles
    candidates = []
    for worker in workers:
        if worker.role is WorkerRole.PREFILL:
            if has_decode:
                candidates.append((worker, True))
        elif worker.role is WorkerRole.MIXED or not has_prefill:
            candidates.append((worker, False))
    return candidates


def predict_ttft_s(
    worker: WorkerSnapshot, num_tokens: int, num_cached_tokens: int, cost: CostModel, *, least_correction: float = 0.0
) -> float:
    """Seconds to the first new token of a prompt that joins ``worker``'s queue now.

    Prompts ahead fill steps of ``max_batch_tokens``; sequences that decode in the same steps lengthen each.

    Args:
        least_correction: lower bound of the worker's correction.
    """
    num_new = num_tokens - num_cached_tokens
    budget = worker.max_batch_tokens
    ahead_s = queue_s(worker.num_waiting_tokens, budget, cost)
    own_s = cost.prefill_s(num_new, num_cached_tokens)
    beside_s = 0.0
    if worker.role is not WorkerRole.PREFILL and worker.num_decoding > 0:
        num_left = worker.num_waiting_tokens + num_new
        chunk = min(num_left, budget)
        step_s = cost.mixed_s(chunk, num_cached_tokens, worker.num_decoding, worker.num_context_tokens)
        beside_s = -(-num_left // budget) * (step_s - cost.prefill_s(chunk, num_cached_tokens))
    return (ahead_s + own_s + beside_s) * max(least_correction, mixed_correction(worker))


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


def choose_prefill(
    blocks: PromptBlocks, workers: Iterable[WorkerSnapshot], costs: Costs, *, tpot_slo_s: float = 0.0
) -> PrefillChoice | None:
    """Worker with the least predicted TTFT; ``None`` when no worker can start.

    Ties go to prefill and mixed workers, then by `tie_order`. While prefill workers are up, only a decode
    worker's cache or a queue elsewhere brings it a prompt. A lower correction than that of the best prefill candidate
    does not: corrections change within seconds, and prompts would oscillate.

    Args:
        tpot_slo_s: as in `may_prefill_locally`.
    """
    workers = list(workers)
    num_tokens = blocks.num_tokens
    options: list[tuple[float, bool, tuple[int, str], bool, int, float]] = []  # the least one wins
    hands_off = False
    for worker, handoff in prefill_candidates(workers):
        num_cached = blocks.num_cached_tokens(worker.cached_blocks)
        ttft_s = predict_ttft_s(worker, num_tokens, num_cached, costs[worker.role])
        is_decode = worker.role is WorkerRole.DECODE
        options.append((ttft_s, is_decode, tie_order(blocks, worker), handoff, num_cached, worker.prefill_correction))
        hands_off |= handoff
    if not options:
        return None
    if hands_off:
        cost, correction = costs[WorkerRole.DECODE], min(options)[-1]
        for worker in workers:
            if worker.role is not WorkerRole.DECODE or shortfall(blocks, worker):
                continue  # without blocks and a batch slot, the request would wait for them before its token 0
            num_cached = blocks.num_cached_tokens(worker.cached_blocks)
            if may_prefill_locally(worker, num_tokens, num_cached, cost, tpot_slo_s=tpot_slo_s):
                ttft_s = predict_ttft_s(worker, num_tokens, num_cached, cost, least_correction=correction)
                options.append((ttft_s, True, tie_order(blocks, worker), False, num_cached, correction))
    ttft_s, _, (_, worker_id), handoff, num_cached, _ = min(options)
    return PrefillChoice(worker_id, handoff, ttft_s, num_cached)


def choose_decode(
    blocks: PromptBlocks,
    workers: Iterable[WorkerSnapshot],
    costs: Costs,
    cut_off: AbstractSet[str] = frozenset(),
    *,
    source_host: str = "",
) -> DecodeChoice | None:
    """Decode worker with the least predicted TPOT among those with room; ties go by `tie_order`.

    The pull, shorter where more of the prompt is cached, counts with its share of TPOT: among workers of similar load,
    the one with less to pull wins. If none has room, the worker that lacks the fewest blocks and batch slots wins: its
    queue is first come, first served. ``None`` when no decode worker is up.

    Args:
        cut_off: ids of workers that recently failed to pull from the prompt's prefill worker; a last resort.
        source_host: host of the prompt's prefill worker.
    """
    choices = []
    cost = costs[WorkerRole.DECODE]
    for worker in workers:
        if worker.role is not WorkerRole.DECODE:
            continue
        lacking = shortfall(blocks, worker)
        num_context = worker.num_context_tokens + blocks.num_tokens
        tpot_s = cost.decode_s(worker.num_decoding + 1, num_context) * worker.decode_correction
        num_to_pull = blocks.num_tokens - blocks.num_cached_tokens(worker.cached_blocks)
        transfer_s = cost.transfer_s(num_to_pull, same_host=worker.host == source_host)
        choice = DecodeChoice(worker.worker_id, lacking == 0, tpot_s, transfer_s)
        is_last_resort, total_s = worker.worker_id in cut_off, tpot_s + transfer_s / STALL_TOKENS
        choices.append((is_last_resort, lacking, total_s, tie_order(blocks, worker), choice))
    return min(choices)[-1] if choices else None


def tie_order(blocks: PromptBlocks, worker: WorkerSnapshot) -> tuple[int, str]:
    """Order of workers between which nothing else decides: the most empty blocks first, if they hold the prompt, so
    that all caches fill before one evicts; then the lowest id."""
    num_empty = worker.num_empty_blocks
    return -num_empty if num_empty >= blocks.num_blocks() else 0, worker.worker_id


def mixed_correction(worker: WorkerSnapshot) -> float:
    """Observed over predicted time of steps with prefill rows. A decode worker may not have run one lately, or ever, so
    its correction for pure decode steps is a lower bound."""
    if worker.role is WorkerRole.DECODE:
        return max(worker.prefill_correction, worker.decode_correction)
    return worker.prefill_correction


def shortfall(blocks: PromptBlocks, worker: WorkerSnapshot, *, num_cached_tokens: int = 0) -> int:
    """Blocks and batch slots that ``worker`` lacks for one more sequence, which shares the blocks of so many cached
    tokens."""
    num_new_blocks = blocks.num_blocks() - num_cached_tokens // blocks.block_size
    missing_blocks = max(0, num_new_blocks - worker.num_free_blocks)
    missing_slots = max(0, worker.num_decoding + 1 - worker.max_batch_size)
    return missing_blocks + missing_slots
