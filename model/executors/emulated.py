"""An executor that hashes tokens instead of running a model, and keeps the hashes in the real KV pool.

With ``time_scale`` it emulates an absent device: steps last as long as the cost model predicts, and the rest of the
cluster is real. Without, it is instantaneous, and tests compare its answers with those of
`pdserve.model.executors.hash_chain`, which exposes any lost, repeated or misplaced token and any wrong byte of KV.

Sampling honours seed, choices, banned tokens and grammars; a hash has no logits for penalties or bias. A row with
cached tokens reads its state from its blocks only. No thread: `EmulatedExecutor.submit` writes KV and chooses tokens,
and a handle's ``result`` sleeps until the step's modelled end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import SampledToken, StepBatch, StepHandle, StepOutput, StepRow, TokenLogprobs
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.stage import Stage
from pdserve.model.executors.block_copies import copy_blocks
from pdserve.model.executors.drafting import Drafter, num_right, with_guesses
from pdserve.model.executors.hash_chain import (
    INVERSE_STRIDE,
    ROOT_STATE,
    HashVocabulary,
    link,
    linked_token,
    mix64,
    pick,
    sampling_salt,
)
from pdserve.model.sampling.grammars import GrammarMatchers

_LOGPROBS = TokenLogprobs(0.0, ())
"""Answer to every request for log probabilities, prompts included: the token is certain, without alternatives."""


class EmulatedExecutor:
    """Implements `pdserve.contracts.step.Executor`.

    Args:
        layout: one KV head, one layer, head dimension 1, dtype ``uint64``.
        pool: writable, C-contiguous, ``layout.pool_bytes`` bytes: a memoryview or an array of ``layout.shape``.
        vocab_size: tokens are in ``[0, vocab_size)``.
        eos_token_ids: end-of-sequence tokens; generated only as ``eos_period`` sets.
        eos_period: one token in this many, picked by hash, ends the sequence; 0 for none.
        cost: predicts the duration of a step; required if ``time_scale`` is not 0.
        time_scale: factor on the durations that ``cost`` predicts; 0 is instantaneous.
        pipeline_depth: 1 or 2.
        stage: first stage of the worker's pipeline, which the executors of its micro-batches share.
        num_swap_slots: host slots for blocks of preempted sequences.
        check_context: verify all cached tokens of every row at every step, not only the last one; emulation of large
            batches disables it to save time.
        matchers: match the answers of rows with grammars; ``None`` if there are none.
        drafter: guesses tokens; ``None`` if no row has guesses.

    Raises:
        ValueError: a layout that cannot hold hash states.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        pool: memoryview[int] | npt.NDArray[np.uint64],
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        eos_period: int = 0,
        cost: CostModel | None = None,
        time_scale: float = 0.0,
        pipeline_depth: int = 2,
        stage: Stage | None = None,
        num_swap_slots: int = 0,
        check_context: bool = True,
        matchers: GrammarMatchers | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        if (layout.num_kv_heads, layout.num_layers, layout.head_dim, layout.dtype) != (1, 1, 1, "uint64"):
            raise ValueError(f"an emulated KV pool has 1 head, 1 layer, head_dim 1 and dtype uint64, not {layout}")
        assert cost is not None or time_scale == 0
        self._states = (pool if isinstance(pool, memoryview) else pool.data).cast("B").cast("Q")
        assert not self._states.readonly
        assert self._states.nbytes == layout.pool_bytes
        self._num_blocks, self._block_size = layout.num_blocks, layout.block_size
        self._blocks = np.frombuffer(self._states, np.uint8).reshape(layout.num_blocks, layout.block_bytes)
        self._slots = np.empty((num_swap_slots, layout.block_bytes), np.uint8)
        self._vocabulary = HashVocabulary(vocab_size, eos_token_ids, eos_period)
        self._cost = cost
        self._time_scale = time_scale
        self._pipeline_depth = pipeline_depth
        self._stage = stage or Stage(1)
        self._check_context = check_context
        self._matchers = matchers
        self._drafter = drafter
        self._previous: list[SampledToken | None] = []
        self._free_at_s = 0.0

    @property
    def pipeline_depth(self) -> int:
        return self._pipeline_depth

    def submit(self, batch: StepBatch) -> StepHandle:
        """Compute the step now. Its modelled time starts when the previous step has ended and the stage is free;
        ``result`` waits for its end."""
        rows, _, no_guess = with_guesses(batch, self._drafter, self._matchers)
        duration_s = self._duration_s(batch, rows)
        self._free_at_s = self._stage.enter(max(time.monotonic(), self._free_at_s), duration_s) + duration_s
        copy_blocks(batch, self._blocks, self._slots, np.copyto)
        try:
            if no_guess is not None:
                raise no_guess
            runs = self._compute(rows)
        except RuntimeError as error:
            self._previous = []
            return _ComputedStep(error, self._free_at_s)
        self._previous = sampled = [run[0] if run else None for run in runs]
        guessing = {index: len(row.guesses) for index, row in enumerate(rows) if row.guesses}
        output = StepOutput(
            step_id=batch.step_id,
            sampled=sampled,
            prompt_logprobs={
                index: [_LOGPROBS] * len(row.prompt_targets)
                for index, row in enumerate(batch.rows)
                if row.prompt_targets
            },
            num_guesses=guessing,
            more={index: runs[index][1:] for index in guessing},
            forced={index for index in guessing if rows[index].is_forced},
            duration_s=duration_s,
        )
        return _ComputedStep(output, self._free_at_s)

    def close(self) -> None:
        del self._blocks  # a view of the states
        self._states.release()

    def _duration_s(self, batch: StepBatch, rows: Sequence[StepRow]) -> float:
        if self._cost is None or self._time_scale == 0:
            return 0.0
        swap_s = self._cost.swap_s((len(batch.swap_outs) + len(batch.swap_ins)) * self._block_size)
        step_s = self._cost.step_s((row.num_new_tokens, row.cached_length) for row in rows)
        return self._time_scale * (swap_s + step_s)

    def _compute(self, rows: Sequence[StepRow]) -> list[list[SampledToken]]:
        for row in rows:
            self._check_row(row)
        if self._check_context:
            self._check_contexts([row for row in rows if row.cached_length > 0])
        return [self._compute_row(row) for row in rows]

    def _compute_row(self, row: StepRow) -> list[SampledToken]:
        """Write the KV of a row's new tokens; choose the token after them, and further ones as far as guesses hold."""
        known = row.tokens if row.previous_row < 0 else (self._token_of(row.previous_row),)
        run: list[SampledToken] = []
        allowed = self._allowed(row) if row.sample is not None and row.sample.grammar is not None else []
        states, block_size, block_table = self._states, self._block_size, row.block_table
        state = self._cached_state(row)
        for position, token in enumerate((*known, *row.guesses), row.cached_length):
            slot = block_table[position // block_size] * 2 * block_size + position % block_size
            states[slot + block_size] = value = link(state, token)
            states[slot] = state = mix64(value)
            if row.sample is not None and position + 1 >= row.sample_position:
                run.append(self._sample(row, row.sample, state, allowed[len(run)] if allowed else None))
        return run[: 1 + num_right(row.guesses, [sampled.token for sampled in run])]

    def _sample(self, row: StepRow, sample: SamplingParams, state: int, allowed: Sequence[int] | None) -> SampledToken:
        """Choose the token after ``state``, of the ``allowed`` ones if a grammar allows no others."""
        logprobs = _LOGPROBS if sample.num_logprobs >= 0 else None
        salt = sampling_salt(sample, row.choice)
        if allowed is not None:
            return SampledToken(pick(state, salt, allowed), logprobs)
        return SampledToken(self._vocabulary.next_token(state, salt, row.banned_tokens), logprobs)

    def _allowed(self, row: StepRow) -> list[list[int]]:
        """Tokens that the row's grammar allows after its last token, and after each guess."""
        assert self._matchers is not None, "an executor without grammars has a row with one"
        masks = np.zeros((1 + len(row.guesses), self._matchers.num_words), np.int32)
        self._matchers.fill(masks, row, self._token_of)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return [np.flatnonzero(mask).tolist() for mask in bits]

    def _token_of(self, previous_row: int) -> int:
        sampled = self._previous[previous_row] if previous_row < len(self._previous) else None
        if sampled is None:
            raise RuntimeError(f"row {previous_row} of the step before has no token")
        return sampled.token

    def _cached_state(self, row: StepRow) -> int:
        """Read the row's starting state from the pool and verify its link."""
        if row.cached_length == 0:
            return ROOT_STATE
        state, value = self._kv_at(row, row.cached_length - 1)
        before = self._kv_at(row, row.cached_length - 2)[0] if row.cached_length > 1 else ROOT_STATE
        if mix64(value) != state or linked_token(before, value) >= self._vocabulary.size:
            raise _wrong_kv(row, row.cached_length - 1)
        return state

    def _kv_at(self, row: StepRow, position: int) -> tuple[int, int]:
        slot = row.block_table[position // self._block_size] * 2 * self._block_size + position % self._block_size
        return self._states[slot], self._states[slot + self._block_size]

    def _check_row(self, row: StepRow) -> None:
        """Raise RuntimeError for a row with missing blocks, or ids or positions out of range."""
        end = row.cached_length + row.num_new_tokens
        num_blocks = -(-end // self._block_size)
        if end == row.cached_length or len(row.block_table) < num_blocks:
            raise RuntimeError(f"sequence {row.sequence_id}: {len(row.block_table)} blocks for tokens up to {end}")
        touched = row.block_table[max(row.cached_length - 2, 0) // self._block_size : num_blocks]
        if min(touched) < 0 or max(touched) >= self._num_blocks:
            raise RuntimeError(f"sequence {row.sequence_id}: a block id is outside the pool of {self._num_blocks}")
        if row.tokens and (min(row.tokens) < 0 or max(row.tokens) >= self._vocabulary.size):
            raise RuntimeError(f"sequence {row.sequence_id}: a token id is outside the vocabulary")
        if row.sample is not None and row.sample_position != end - len(row.guesses):
            raise RuntimeError(
                f"sequence {row.sequence_id}: samples position {row.sample_position}, but its tokens end before {end}"
            )

    def _check_contexts(self, rows: Sequence[StepRow]) -> None:
        """Raise RuntimeError unless the KV of every cached token follows from the token before it."""
        if not rows:
            return
        blocks: list[int] = []
        starts, ends = [], []
        for row in rows:
            starts.append(len(blocks) * self._block_size)
            ends.append(starts[-1] + row.cached_length)
            blocks.extend(row.block_table[: -(-row.cached_length // self._block_size)])
        if min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise RuntimeError(f"a block id is outside the pool of {self._num_blocks}")
        pool = np.frombuffer(self._states, np.uint64).reshape(-1, 2, self._block_size)[blocks]
        states, links = pool[:, 0].reshape(-1), pool[:, 1].reshape(-1)
        before = np.empty_like(states)
        before[1:] = states[:-1]
        before[starts] = ROOT_STATE  # the first is 0
        tokens = (links - before) * np.uint64(INVERSE_STRIDE) - np.uint64(1)
        is_wrong = (tokens >= self._vocabulary.size) | (_mix64(links) != states)
        num_wrong_before = np.concatenate(([0], is_wrong.cumsum()))
        row_is_wrong = num_wrong_before[ends] > num_wrong_before[starts]
        if row_is_wrong.any():
            first = int(row_is_wrong.argmax())
            raise _wrong_kv(rows[first], int(is_wrong[starts[first] :].argmax()))


@dataclass(frozen=True, slots=True)
class _ComputedStep:
    outcome: StepOutput | RuntimeError
    end_s: float

    def result(self) -> StepOutput:
        if (wait_s := self.end_s - time.monotonic()) > 0:
            time.sleep(wait_s)
        if isinstance(self.outcome, RuntimeError):
            raise self.outcome
        return self.outcome


def _wrong_kv(row: StepRow, position: int) -> RuntimeError:
    return RuntimeError(
        f"sequence {row.sequence_id}: the KV of position {position} does not follow from the one before"
    )


def _mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`pdserve.model.executors.hash_chain.mix64` of an array."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
