"""Contract between schedulers and executors: one ragged batch per step, and its output.

A `StepBatch` mixes prefill chunks and decode rows, so that a mixed step is one forward pass. Executors receive the KV
tensor and block tables, never a block pool. With an `Executor.pipeline_depth` of 2, schedulers plan step N + 1 before
they know the results of step N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pdserve.contracts.request import SamplingParams


@dataclass(slots=True, kw_only=True)
class StepRow:
    """One sequence's share of a step: compute KV for its next tokens, and sample after the last one if requested."""

    sequence_id: int
    tokens: Sequence[int]
    """New tokens, at least one, at positions ``cached_length ..``; empty if and only if ``previous_row >= 0``."""
    previous_row: int = -1
    """``>= 0``: row of the preceding `StepBatch` that sampled the one new token, which the scheduler does not know."""
    cached_length: int
    """Tokens of the sequence with KV in the pool."""
    block_table: Sequence[int]
    """Pool block ids in sequence order, for at least ``cached_length + num_new_tokens`` tokens. Read only during
    `Executor.submit`."""
    sample: SamplingParams | None
    """Sampling parameters after the last new token; ``None`` for a chunk that does not end the prompt."""
    sample_position: int = 0
    """Absolute position of the sampled token, prompt included; the random generator's counter."""
    choice: int = 0
    """Index of the row's choice (n > 1); part of the random generator's counter."""
    history: Sequence[int] = ()
    """All known tokens of the sequence if ``sample.reads_history``, else empty. Read only during `Executor.submit`. The
    token that ``previous_row`` sampled follows it."""
    num_prompt_tokens: int = 0
    """Prompt tokens at the start of ``history``."""
    banned_tokens: Sequence[int] = ()
    """Tokens that must not be sampled."""
    prompt_targets: Sequence[int] = ()
    """Prompt logprobs: the prompt token after each new token, as far as the prompt goes; empty if not requested."""
    num_prompt_logprobs: int = -1
    """Likely tokens to report with each of ``prompt_targets``."""
    max_guesses: int = 0
    """Tokens after ``tokens`` that the executor may guess and compute in the same row, at most. ``block_table`` covers
    them, ``history`` holds all known tokens, and ``banned_tokens`` are the same after each of them."""
    max_forced: int = 0
    """The same for tokens that the grammar prescribes, which come before any others."""
    guesses: Sequence[int] = ()
    """Set by the executor alone: what it guessed. It samples after the last of ``tokens`` and after each guess."""
    is_forced: bool = False
    """Set by the executor alone: the grammar prescribes the guesses."""

    @property
    def num_new_tokens(self) -> int:
        return 1 if self.previous_row >= 0 else len(self.tokens) + len(self.guesses)


class BlockCopy(NamedTuple):
    """Copy of one KV block, from pool block to host slot or back."""

    source: int
    target: int


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One step: block copies, then decode rows (one new token) and prefill rows (a chunk) together.

    Copies run in the order of the fields, before any row. A batch may have copies only.
    """

    step_id: int
    rows: list[StepRow]
    swap_outs: list[BlockCopy] = field(default_factory=list)
    """Copies from the pool to host slots, numbered from 0."""
    swap_ins: list[BlockCopy] = field(default_factory=list)
    """Copies from host slots to the pool."""
    may_guess: bool = False
    """Some rows may have guesses, so that their lengths are known only once the step has ended."""

    @property
    def num_new_tokens(self) -> int:
        return sum([len(row.tokens) or 1 for row in self.rows])


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, before temperature and truncation."""

    logprob: float
    """Log probability of the sampled token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability), most likely first; as many as requested."""


class SampledToken(NamedTuple):
    """Output of a row with ``sample``."""

    token: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """Results of one step, row by row."""

    step_id: int
    sampled: list[SampledToken | None]
    """One entry per row of the batch; ``None`` for rows without ``sample``."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Keyed by row; one entry per token of ``prompt_targets``."""
    failed: dict[int, str] = field(default_factory=dict)
    """Rows that sampled nothing because they cannot be computed, each with the reason. The other rows stand."""
    num_guesses: dict[int, int] = field(default_factory=dict)
    """Keyed by row: the guesses that were made, where there were any."""
    forced: set[int] = field(default_factory=set)
    """Rows of which a grammar prescribed the guesses."""
    more: dict[int, list[SampledToken]] = field(default_factory=dict)
    """Keyed by row: the tokens after the one in ``sampled``, as many as guesses were right. Each is what a step of its
    own would sample, because a token depends on those before it, its position and the row's parameters only."""
    guessing_s: float = 0.0
    """Duration of making the guesses."""
    duration_s: float
    """Duration of the step's computation, after its guesses were made."""


class RankLostError(Exception):
    """A rank of the worker's model is gone, and with it every step to come: the worker must end."""


class StepHandle(Protocol):
    """A step in flight."""

    def result(self) -> StepOutput:
        """Wait for the step and return its output. Its KV is then in the pool, visible to any reader.

        Raises:
            RuntimeError: the computation failed; no row has a result, and the step no longer writes to the pool.
        """


class Executor(Protocol):
    """Runs steps in submission order and writes KV into its pool."""

    @property
    def pipeline_depth(self) -> int:
        """Steps to submit before reading the first result: 1 (synchronous) or 2 (one step late)."""

    def submit(self, batch: StepBatch) -> StepHandle:
        """Start a step. The caller may modify the batch once this returns.

        Raises:
            RankLostError: no further step can run.
        """

    def close(self) -> None:
        """Release resources; no step may be in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Model limits that end a sequence."""

    max_model_len: int
    """Upper limit of prompt and answer tokens together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
