"""One request while a worker computes it: tokens, block table, and progress of both.

Owned by the scheduler through `pdserve.engine.scheduling.table`. A sequence decides nothing and owns no block:
it records what the scheduler did and computes its own lengths.

Lengths, in tokens: ``num_written <= num_computed <= len(tokens) + num_pending``. Written KV is in the pool. Computed
KV is written, or will be by a planned step. Pending tokens are sampled by a planned step and not known yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from pdserve.contracts.block_hash import block_hash, root_hash
from pdserve.contracts.events import RequestKey
from pdserve.contracts.request import FinishReason, GenerationRequest, SamplingParams

LOOKAHEAD_TOKENS = 64
"""Minimum number of further tokens a running sequence is expected to need, up to its length limit."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request's tokens and their KV blocks."""

    sequence_id: int
    """Unique on the worker, in order of arrival."""
    key: RequestKey
    request: GenerationRequest
    arrived_s: float
    block_size: int
    is_handoff: bool
    """Only the prompt is computed here, then parked for another worker."""
    max_length: int
    """Maximum length of prompt and answer together, in tokens."""
    stop_token_ids: frozenset[int]
    early_end_ids: tuple[int, ...]
    """Tokens banned from sampling until the answer has ``min_tokens`` tokens."""

    # Set by the scheduler.
    is_preempted: bool = False
    """It lost its blocks to an earlier arrival, and does not decode again yet."""
    is_over: bool = False
    """The request has ended here; results of its planned rows are ignored."""
    is_retiring: bool = False
    """Blocks are freed as soon as no step or pull in flight needs them."""
    is_pulling: bool = False
    """A pull writes to the blocks."""
    handle: bytes = b""
    """Handle under which the prompt is offered for pulling; empty if it is not offered."""
    acceptance: float | None = None
    """Share of guesses that are right, as estimated from those so far; ``None`` before it might have any."""
    was_restored: bool = False
    """Whether the tier was asked for its blocks since it lost the last ones."""
    num_plain_steps: int = 0
    """Steps in a row in which it might have had guesses and had none."""

    # Kept by the sequence table.
    tokens: list[int] = field(init=False)
    """Every known token: prompt, tokens of earlier attempts, tokens sampled here."""
    history: list[int] | tuple[()] = field(init=False)
    """The same tokens, if a draw depends on them; else empty."""
    num_prompt_tokens: int = field(init=False)
    sampling: SamplingParams = field(init=False)
    least_length: int = field(init=False)
    """Length if the answer ends as soon as it may."""
    block_table: array[int] = field(init=False, default_factory=partial(array, "i"))
    """An array, which a step packs without looking at each block."""
    num_computed: int = field(init=False, default=0)
    num_written: int = field(init=False, default=0)
    num_registered_blocks: int = field(init=False, default=0)
    """Leading blocks registered in the prefix cache."""
    num_in_flight: int = field(init=False, default=0)
    """Steps in flight that have a row of this sequence or swap copies of its blocks."""
    num_pending: int = field(init=False, default=0)
    last_row: int = field(init=False, default=-1)
    """Row index in the last step that planned it."""
    _hashes: list[bytes] = field(init=False)
    _min_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_tokens, *self.request.emitted_tokens]
        self.num_prompt_tokens = len(self.request.prompt_tokens)
        self._hashes = list(self.request.block_hashes)
        self.sampling = self.request.sampling
        self.history = self.tokens if self.sampling.reads_history else ()
        self._min_length = self.num_prompt_tokens + self.sampling.min_tokens
        self.least_length = min(self._min_length + 1, self.max_length) if self.stop_token_ids else self.max_length

    @property
    def num_answered(self) -> int:
        """Known tokens of the answer over all attempts, which is the index of the next token."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is neither written nor planned."""
        return len(self.tokens) - self.num_computed

    @property
    def is_idle(self) -> bool:
        """Whether nothing in flight writes or copies the blocks."""
        return not self.num_in_flight and not self.is_pulling

    @property
    def num_kv_tokens_max(self) -> int:
        """Maximum number of tokens with KV. The last token of an answer is never computed on."""
        return self.max_length - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_with_headroom(self) -> int:
        """Blocks required to start decoding: all known tokens plus one block, up to the sequence's maximum."""
        return self.num_blocks_for(min(len(self.tokens) + self.block_size, self.num_kv_tokens_max))

    def num_blocks_expected(self) -> int:
        """Blocks that decoding is expected to need before it ends.

        An answer of n tokens is expected to continue for n more, at least `LOOKAHEAD_TOKENS` and at most to its
        limit. Never less than `num_blocks_with_headroom`, which are allocated at the start.
        """
        num_known, block_size = len(self.tokens), self.block_size
        num_tokens = num_known + max(LOOKAHEAD_TOKENS, block_size, num_known - self.num_prompt_tokens)
        if num_tokens >= self.max_length:
            num_tokens = self.max_length - 1
        return (num_tokens + block_size - 1) // block_size

    def block_hashes(self, num_blocks: int, first: int = 0) -> list[bytes]:
        """Hashes of the full blocks of known tokens, from ``first`` to ``num_blocks``. Each is computed once."""
        while len(self._hashes) < num_blocks:
            self._add_block_hash()
        return self._hashes[first:num_blocks]

    def iter_block_hashes(self, num_blocks: int) -> Iterator[bytes]:
        """Yield the hashes one at a time, so that a caller that stops early does not compute the rest."""
        known = self._hashes[:num_blocks]
        return chain(known, self._further_block_hashes(len(known), num_blocks))

    def _further_block_hashes(self, first: int, num_blocks: int) -> Iterator[bytes]:
        for index in range(first, num_blocks):
            if index == len(self._hashes):
                self._add_block_hash()
            yield self._hashes[index]

    def _add_block_hash(self) -> None:
        hashes, start = self._hashes, len(self._hashes) * self.block_size
        parent = hashes[-1] if hashes else root_hash(self.request.cache_salt)
        hashes.append(block_hash(parent, self.tokens[start : start + self.block_size]))

    def banned_at(self, position: int) -> tuple[int, ...]:
        """Tokens banned from sampling at ``position``, whether or not the tokens before it are known yet."""
        return self.early_end_ids if position < self._min_length else ()

    @property
    def max_guesses(self) -> int:
        """Tokens that may be guessed after the known ones: none where the history is penalised, and none beyond the
        limit of the answer, or where other tokens are banned."""
        if self.sampling.has_penalties:
            return 0
        end = min(self._min_length, self.max_length) if self.banned_at(len(self.tokens)) else self.max_length
        return end - len(self.tokens) - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether to emit log probabilities of the prompt: until the first token of the answer is known."""
        return self.sampling.num_prompt_logprobs >= 0 and not self.num_answered

    def append(self, token: int) -> FinishReason:
        """Append the next token of the answer and return its finish reason."""
        self.tokens.append(token)
        if token in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_length else FinishReason.NONE

    def start_at(self, shared_blocks: Iterable[int], new_blocks: Iterable[int]) -> None:
        """Assign blocks: leading ones with complete KV from the prefix cache, then blocks still to be written."""
        assert not self.block_table, "a sequence takes its first blocks once"
        self.block_table.extend(shared_blocks)
        self.num_registered_blocks = len(self.block_table)
        self.num_computed = self.num_written = self.num_registered_blocks * self.block_size
        self.block_table.extend(new_blocks)

    def receive(self, num_tokens: int) -> None:
        """Record that the KV of all known tokens was pulled."""
        assert num_tokens == len(self.tokens), f"KV of {num_tokens} tokens for a prompt of {len(self.tokens)}"
        self.num_computed = self.num_written = num_tokens

    def receive_blocks(self, num_blocks: int) -> None:
        """Record that the KV of so many blocks after the written ones was pulled."""
        self.num_written += num_blocks * self.block_size
        self.num_computed = self.num_written

    def lose_blocks(self) -> array[int]:
        """Give up all blocks, in order. All KV must be computed again."""
        assert self.is_idle, "blocks that are being written cannot be given up"
        blocks, self.block_table = self.block_table, array("i")
        self.num_computed = self.num_written = self.num_registered_blocks = 0
        self.is_retiring = self.was_restored = False
        return blocks


def sum_blocks_missing(sequences: Iterable[Sequence]) -> int:
    """Blocks that decoding all ``sequences`` is expected to need (`Sequence.num_blocks_expected`) beyond those they
    hold.

    Runs on the whole batch whenever a request may join, so it avoids calls per sequence.
    """
    total = 0
    for sequence in sequences:
        block_size = sequence.block_size
        num_held = len(sequence.block_table) * block_size
        num_tokens = sequence.max_length - 1
        if num_held >= num_tokens:
            continue
        num_known = len(sequence.tokens)
        num_more = num_known - sequence.num_prompt_tokens
        if num_more < LOOKAHEAD_TOKENS or num_more < block_size:
            num_more = max(LOOKAHEAD_TOKENS, block_size)
        if num_known + num_more < num_tokens:
            num_tokens = num_known + num_more
        if num_tokens > num_held:
            total += (num_tokens - num_held + block_size - 1) // block_size
    return total
