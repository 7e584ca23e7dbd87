"""Interface between the dispatcher and the policies: which worker computes a prompt, and which one decodes its answer.

The dispatcher owns one `Placement`, live and in the planner's simulator alike, asks it for both decisions with a
snapshot of every worker, and reports what became of them. Pure: no I/O and no clock; the same calls give the same
decisions. `pdserve.router.requests.policies` names the policies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from typing import NamedTuple

from pdserve.contracts.block_hash import block_hash, root_hash
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import CostModel, OnlineCorrection

Costs = Mapping[WorkerRole, CostModel]
"""Cost model of each role; hardware and parallelism may differ between roles."""
PULL_MEMORY_S = 0.1
"""Predicted seconds of pulls after which what was observed before has decayed to 1 / e."""


class WorkerSnapshot(NamedTuple):
    """State of one worker as of its last report, with what was sent since; another object once anything but
    `cached_blocks` has changed."""

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
    num_steps: float = 0.0
    """Steps in which its sequences decoded so far."""
    stepped_s: float = 0.0
    """Instant of the last of those steps."""
    num_tokens_in_flight: int = 0
    """Prompt tokens of steps in flight, which no other prompt can go before."""
    num_empty_blocks: int = 0
    """Of the free blocks, those that no prefix is cached in."""
    next_step_s: float = 0.0
    """Predicted seconds of a decode step with one more answer."""


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

    def num_cached_tokens(self, cached_blocks: Container[bytes], guess: int = 0) -> int:
        """Leading tokens whose blocks are all in ``cached_blocks``, which has the parent of each of its blocks: workers
        evict the leaves of a chain first. Takes a logarithm of the known hashes, unless it is as many as ``guess``, and
        each new one once."""
        hashes, num_blocks = self._hashes, guess // self.block_size
        has_as_many = not num_blocks or hashes[num_blocks - 1] in cached_blocks
        if not has_as_many or (num_blocks < len(hashes) and hashes[num_blocks] in cached_blocks):
            num_blocks = bisect_left(hashes, True, key=lambda each: each not in cached_blocks)
        if num_blocks == len(hashes):
            while num_blocks < self._num_cacheable and self._next_hash() in cached_blocks:
                num_blocks += 1
        return num_blocks * self.block_size

    def cached_on(self, workers: Iterable[WorkerSnapshot]) -> dict[str, int]:
        """`num_cached_tokens` of the workers that cache any of the prompt, by id. Often they cache the same part."""
        if not self._num_cacheable:
            return {}
        first, num_cached, cached = self._hashes[0] if self._hashes else self._next_hash(), 0, {}
        for worker in [worker for worker in workers if first in worker.cached_blocks]:
            cached[worker.worker_id] = num_cached = self.num_cached_tokens(worker.cached_blocks, num_cached)
        return cached

    def hashes(self) -> Sequence[bytes]:
        """Hashes of the full blocks, less one that ends with the last token."""
        while len(self._hashes) < self._num_cacheable:
            self._next_hash()
        return self._hashes

    def _next_hash(self) -> bytes:
        start = len(self._hashes) * self.block_size
        self._parent = block_hash(self._parent, self._tokens[start : start + self.block_size])
        self._hashes.append(self._parent)
        return self._parent


class Arrival(NamedTuple):
    """A prompt to place."""

    request_id: int
    blocks: PromptBlocks
    now_s: float
    wanted_s: float
    """Instant at which token 0 is due; infinite if it has no objective, or is out already."""
    is_resumed: bool = False
    """Its client has tokens already, or others wait for its trial: it goes before all prompts that have not begun."""
    is_probe: bool = False
    """Health probe: to be handed off if that is possible."""
    token_s: float | None = None
    """When its token 0 came, if it is out already while the prompt waits for a decode worker."""
    tpot_slo_s: float = 0.0
    """TPOT objective; 0 for none."""
    weight: float = 1.0
    """Worth of meeting both objectives, as a share of that in the heaviest tier."""
    may_refuse: bool = False
    """Refuse it if it would meet its objectives nowhere."""
    queued_s: float = 0.0
    """Instant from which it waits."""
    decodes: bool = True
    """Whether tokens follow its next one, so that it takes part in steps of answers."""
    is_sibling: bool = False
    """Another choice of its request has the prompt before it, and brings it into the cache where that decodes."""
    share: str = ""
    """Prompts of one share wait behind each other, those of several side by side: its tenant and tier."""


class PrefixPull(NamedTuple):
    """A prefix of a prompt that the worker which computes the prompt is to pull from another one."""

    worker_id: str
    """The source."""
    num_tokens: int
    """Leading tokens of the prompt that it caches."""
    min_tokens: int
    """As in `pdserve.contracts.request.PrefixSource`."""
    pull_s: float
    """Predicted seconds of the pull."""
    prefill_s: float
    """Predicted seconds to compute what is pulled."""


class PrefillChoice(NamedTuple):
    """Worker chosen to compute a prompt."""

    worker_id: str
    handoff: bool
    """Whether another worker decodes; False runs the whole request here."""
    ttft_s: float
    """Predicted seconds from now to the first new token, corrected by `pdserve.router.requests.least_time`."""
    num_cached_tokens: int
    """Expected prefix-cache hit, with what is pulled."""
    num_pulled_tokens: int = 0
    """Expected tokens of its KV that the worker pulls which decodes it."""
    is_late: bool = False
    """It is unlikely to meet its TTFT objective, or would cost others more: it runs behind prompts that can."""
    is_held: bool = False
    """It is not to be sent yet: late, and its answer would take room from others wherever it decodes."""
    prefill_s: float = 0.0
    """Predicted seconds of its own tokens."""
    due_s: float = inf
    """Instant by which workers order prompts; infinite for none."""
    retry_after_s: float = 0.0
    """Above 0: the request is refused, and may be served after so many seconds."""
    misses_per_s: float = 0.0
    """Expected misses of TTFT, times weight, that each second of delay would cost it."""
    prefix: PrefixPull | None = None
    """What it pulls first."""


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
        self.pull_corrections = OnlineCorrection(memory_s=PULL_MEMORY_S), OnlineCorrection(memory_s=PULL_MEMORY_S)
        """Observed over predicted time of pulls between hosts, and of pulls within one."""

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

    def prefilled(self, request_id: int) -> None:
        """The last chunk of its prompt was planned, or token 0 arrived."""

    def decoding(self, request_id: int, began_s: float, num_tokens: int, worker: WorkerSnapshot) -> None:
        """An answer, ``num_tokens`` long so far since ``began_s``, decodes on ``worker`` from now on."""

    def pulled(self, role: WorkerRole, num_tokens: int, seconds: float, source_id: str, *, same_host: bool) -> None:
        """A worker pulled the KV of so many tokens from another, and held it ``seconds`` after its last block was
        granted. ``source_id``: of the whole worker, if that has micro-batches."""
        predicted_s = self.costs[role].pull_s(num_tokens, same_host=same_host)
        self.pull_corrections[same_host].observe(predicted_s, seconds)

    def prefix_failed(self, worker_id: str, until_s: float) -> None:
        """A worker could not pull a prefix from this one, of which none is to be pulled before ``until_s``."""

    def left(self, request_id: int, num_tokens: int) -> None:
        """The request is on no worker any more; its answer ended with ``num_tokens``, or 0 if it did not."""


def prefill_candidates(workers: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Workers that may compute any prompt now. Prefill workers among them hand it off, others do not have to.

    Prefill workers count only while a decode worker can take over from them, decode workers only while no prefill
    worker is up. Mixed workers always count; ``goodput`` alone has them hand off.
    """
    roles = {worker.role for worker in workers}
    may_prefill = {
        WorkerRole.PREFILL: WorkerRole.DECODE in roles,
        WorkerRole.DECODE: WorkerRole.PREFILL not in roles,
        WorkerRole.MIXED: True,
    }
    return [worker for worker in workers if may_prefill[worker.role]]


def tie_order(blocks: PromptBlocks, worker: WorkerSnapshot) -> tuple[int, str]:
    """Order of workers between which nothing else decides: the most empty blocks first, if they hold the prompt, so
    that all caches fill before one evicts; then the lowest id."""
    num_empty = worker.num_empty_blocks
    return -num_empty if num_empty >= blocks.num_blocks() else 0, worker.worker_id


def shortfall(
    blocks: PromptBlocks, worker: WorkerSnapshot, num_cached_tokens: int = 0, num_more: float = 0, num_taken: float = 0
) -> float:
    """Blocks and batch slots that ``worker`` lacks for a sequence that shares the blocks of so many cached tokens, with
    so many more beside it and so many of the free blocks taken."""
    num_new_blocks = blocks.num_blocks() - num_cached_tokens // blocks.block_size
    missing_blocks = num_new_blocks - (worker.num_free_blocks - num_taken)
    missing_slots = worker.num_decoding + num_more + 1 - worker.max_batch_size
    return (missing_blocks if missing_blocks > 0 else 0) + (missing_slots if missing_slots > 0 else 0)
