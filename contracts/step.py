"""The batch that a scheduler submits to an executor, and its output: one ragged batch per step.

A `StepBatch` mixes prefill chunks and decode rows, so that a mixed step is one forward pass. Executors take the KV
tensor and block tables, never a block pool. Schedulers plan step N + 1 before the results of step N are known when the
executor's `Executor.pipeline_depth` is 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pdserve.contracts.request import SamplingParams


@dataclass(slots=True, kw_only=True)
class StepRow:
    """One sequence's share of a step: compute KV for its next tokens, and sample after the last one if asked."""

    sequence_id: int
    tokens: Sequence[int]
    """The new tokens, at least one, at positions ``cached_length ..``; empty exactly when ``previous_row >= 0``."""
    previous_row: int = -1
    """``>= 0``: the one new token is the one that this row of the immediately preceding `StepBatch` sampled, not yet
    known to the scheduler."""
    cached_length: int
    """Tokens of the sequence whose KV is already in the pool."""
    block_table: Sequence[int]
    """Pool block ids in sequence order, covering ``cached_length + num_new_tokens`` tokens at least. Read during
    `Executor.submit` only."""
    sample: SamplingParams | None
    """Parameters to sample with after the last new token; ``None`` for a chunk that does not end the prompt."""
    sample_position: int = 0
    """Absolute position of the token to be sampled, prompt included: the random generator's counter."""
    choice: int = 0
    """Index of the choice (n > 1) that the row belongs to; part of the random generator's counter."""
    history: Sequence[int] = ()
    """Every known token of the sequence, where ``sample.has_penalties``; else empty. Read during `Executor.submit`
    only. The token that ``previous_row`` sampled comes after it."""
    num_prompt_tokens: int = 0
    """Leading tokens of ``history`` that are the prompt."""
    banned_tokens: Sequence[int] = ()
    """Tokens that must not be sampled."""
    prompt_targets: Sequence[int] = ()
    """Prompt logprobs: the tokens that follow each new token in the prompt, as far as there are any; else empty."""
    num_prompt_logprobs: int = -1
    """Likely tokens to report with each of ``prompt_targets``."""

    @property
    def num_new_tokens(self) -> int:
        return 1 if self.previous_row >= 0 else len(self.tokens)


class BlockCopy(NamedTuple):
    """One KV block to copy: pool block to host slot, or host slot to pool block."""

    source: int
    target: int


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One step: decode rows (one new token) and prefill rows (a chunk) together, and block copies before them.

    Copies happen in the order of the fields, all of them before any row; a batch may consist of copies only.
    """

    step_id: int
    rows: list[StepRow]
    swap_outs: list[BlockCopy] = field(default_factory=list)
    """From the pool to host slots, which are numbered from 0."""
    swap_ins: list[BlockCopy] = field(default_factory=list)
    """From host slots to the pool."""

    @property
    def num_new_tokens(self) -> int:
        return sum([len(row.tokens) or 1 for row in self.rows])


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, of the model's distribution before temperature and truncation."""

    logprob: float
    """Log probability of the sampled token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability), most likely first; as many as were asked for."""


class SampledToken(NamedTuple):
    """Output of a row with ``sample``."""

    token: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """Results of one step, row by row."""

    step_id: int
    sampled: list[SampledToken | None]
    """As many as the batch had rows; ``None`` where the row asked for no sample."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By row with ``prompt_targets``: one entry for each of them."""
    duration_s: float
    """Time from the start of the step's computation to its end."""


class StepHandle(Protocol):
    """A step on its way."""

    def result(self) -> StepOutput:
        """Wait for the step and return its output. The KV that it computed is in the pool by then, for any reader.

        Raises:
            RuntimeError: the computation failed; no row of the step has a result, and nothing of it writes to the pool
                any more.
        """
        ...


class Executor(Protocol):
    """Runs steps in the order they are submitted, writing KV into the pool it was given."""

    @property
    def pipeline_depth(self) -> int:
        """Steps that should be submitted before the first result is taken: 1 (synchronous) or 2 (one step late)."""
        ...

    def submit(self, batch: StepBatch) -> StepHandle:
        """Start a step. The batch may be changed by the caller once this returns."""
        ...

    def close(self) -> None:
        """Release what the executor holds; no step may be in flight."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of a model by which a scheduler decides when a sequence ends."""

    max_model_len: int
    """Prompt and answer tokens together, at most."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = field(default=())
