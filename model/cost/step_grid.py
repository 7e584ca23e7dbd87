"""Steps that a profile measures: prefill, decode and mixed, over the lengths and batches that a worker may run; and of
a few tokens of each sequence, as with guesses.

Pure. `pdserve.model.cost.profiling` runs the steps; `pdserve.planner.cost_fit` fits the cost model to their durations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import NamedTuple

_FIRST_CHUNK = 8
_CHUNKS_BESIDE_DECODES = (16, 64, 256, 1024)
_BATCHES_BESIDE_CHUNKS = (1, 8, 64)
_PROMPTS_TOGETHER = (2, 8)
_TOKENS_WITH_GUESSES = (2, 4, 8)
_SEQUENCES_THAT_GUESS = (1, 8)
_FIRST_CONTEXT = 32
_CACHED_PER_NEW = 256
"""Cached tokens that cost about as much time as one new token; only orders the grid."""


class StepKind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class StepRow(NamedTuple):
    """One sequence's share of a step."""

    num_new: int
    num_cached: int


class Step(NamedTuple):
    """Rows of a step. Every row samples; a row with one new token decodes."""

    rows: tuple[StepRow, ...]

    @property
    def kind(self) -> StepKind:
        num_decoding = sum(row.num_new == 1 for row in self.rows)
        if num_decoding == len(self.rows):
            return StepKind.DECODE
        return StepKind.MIXED if num_decoding else StepKind.PREFILL

    @property
    def num_new(self) -> int:
        return sum(row.num_new for row in self.rows)

    @property
    def num_cached(self) -> int:
        return sum(row.num_cached for row in self.rows)

    def num_blocks(self, block_size: int) -> int:
        """Total KV blocks of the rows."""
        return sum(-(-(row.num_new + row.num_cached) // block_size) for row in self.rows)

    def __str__(self) -> str:
        """``512 + 2048 cached`` or ``16 x (1 + 1024 cached)``; a mixed step joins its parts with commas."""
        return ", ".join(_describe(row, self.rows.count(row)) for row in dict.fromkeys(self.rows))


def _describe(row: StepRow, count: int) -> str:
    text = f"{row.num_new} + {row.num_cached} cached" if row.num_cached else f"{row.num_new}"
    return text if count == 1 else f"{count} x ({text})"


@dataclass(frozen=True, slots=True, kw_only=True)
class GridLimits:
    max_model_len: int
    max_batch_tokens: int = 2048
    max_batch_size: int = 256
    num_kv_blocks: int
    """Blocks of the measured pool; no step holds more."""
    block_size: int = 16

    def allow(self, step: Step) -> bool:
        return (
            step.num_new <= self.max_batch_tokens
            and sum(row.num_new == 1 for row in step.rows) <= self.max_batch_size
            and all(0 <= row.num_cached <= self.max_model_len - row.num_new for row in step.rows)
            and step.num_blocks(self.block_size) <= self.num_kv_blocks
        )


def step_grid(limits: GridLimits) -> list[Step]:
    """Steps to measure within ``limits``, the smallest first."""
    steps = dict.fromkeys(step for step in _candidates(limits) if limits.allow(step))
    return sorted(steps, key=lambda step: (step.num_new + step.num_cached / _CACHED_PER_NEW, step.num_cached))


def _candidates(limits: GridLimits) -> Iterator[Step]:
    longest = limits.max_model_len - 1
    chunks = _powers(2, _FIRST_CHUNK, min(limits.max_batch_tokens, longest))
    contexts = _powers(4, _FIRST_CONTEXT, longest)
    for chunk, num_cached in product(chunks, (0, *contexts[1:-1])):
        yield Step((StepRow(chunk, min(num_cached, limits.max_model_len - chunk)),))
    for chunk, count in product(chunks, _PROMPTS_TOGETHER):
        if chunk // count > 1:
            yield Step((StepRow(chunk // count, 0),) * count)
    for batch, context in product(_powers(2, 1, limits.max_batch_size), contexts):
        yield Step((StepRow(1, context),) * batch)
    for tokens, batch, context in product(_TOKENS_WITH_GUESSES, _SEQUENCES_THAT_GUESS, contexts[1::2]):
        yield Step((StepRow(tokens, min(context, limits.max_model_len - tokens)),) * batch)
    for chunk, batch, context in product(_CHUNKS_BESIDE_DECODES, _BATCHES_BESIDE_CHUNKS, contexts[1::2]):
        yield Step((StepRow(chunk, 0), *(StepRow(1, context),) * batch))
        yield Step((StepRow(chunk, min(context, longest - chunk)), *(StepRow(1, context),) * (batch // 2)))


def _powers(factor: int, first: int, last: int) -> list[int]:
    """Geometric series from ``first`` by ``factor``, ending at ``last``."""
    values = [min(first, last)]
    while values[-1] < last:
        values.append(min(factor * values[-1], last))
    return values
