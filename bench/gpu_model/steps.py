"""Times steps of pdserve's executor, submitted as the step loop does: on a GPU, two in flight.

Called by `pdserve.bench.gpu_model.run`. Plans as a scheduler would, but keeps no sequences: timed decode steps read
random KV from the pool, and prompts overwrite each other.
"""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from pdserve.bench.kernels.attention import random_pool
from pdserve.contracts.kv_layout import KvLayout, resolve_kv_dtype
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepBatch, StepHandle, StepOutput, StepRow
from pdserve.kernels.kv_pool import KvPool
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.executors.model import ModelExecutor

BLOCK_SIZE = 16
_WARM_STEPS = 4
_GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Precision of a model's weights and KV."""

    dtype: str
    quantization: str = "none"
    kv_dtype: str = "auto"

    @property
    def pool_dtype(self) -> str:
        return resolve_kv_dtype(self.kv_dtype, self.dtype)

    @property
    def name(self) -> str:
        weights = self.dtype if self.quantization == "none" else self.quantization
        return f"{weights} weights, {self.pool_dtype} KV"


class StepSeconds(NamedTuple):
    """Medians of some steps."""

    step_s: float
    """Between the ends of steps, as the host sees them."""
    device_s: float
    """Between the step's events on the device."""
    host_s: float
    """The host's time to submit it."""


class OwnModel:
    """A checkpoint and a pool, on a device."""

    def __init__(self, folder: Path, variant: Variant, device: torch.device, *, num_blocks: int, max_rows: int) -> None:
        """
        Args:
            max_rows: rows of the largest decode step.
        """
        config = DecoderConfig.from_folder(folder)
        self.shape = config.shape
        self.layout = config.kv_layout(num_blocks, BLOCK_SIZE, variant.pool_dtype, "random")
        self._executor = ModelExecutor(
            folder=folder,
            config=config,
            layout=self.layout,
            pool=noise_pool(self.layout, device),
            precision=Precision(dtype=variant.dtype, quantization=variant.quantization),
            max_captured_rows=max_rows,
        )
        self._block_ids = random.Random(0).sample(range(num_blocks), num_blocks)

    def decode(self, num_rows: int, context_tokens: int, num_steps: int) -> StepSeconds:
        """Time ``num_steps`` decode steps, the last with ``context_tokens`` tokens a row."""
        first = context_tokens - num_steps - _WARM_STEPS
        tables = self._tables(num_rows, context_tokens)
        lengths = range(first, context_tokens)
        return _medians(self._run(_decode_batch(index, tables, length) for index, length in enumerate(lengths)))

    def prefill(self, num_tokens: int, num_steps: int) -> StepSeconds:
        """Time prompts of ``num_tokens``, one a step, all in the same blocks."""
        tokens = random_tokens(num_tokens, self.shape.vocab_size)
        table = self._tables(1, num_tokens)[0]
        num_batches = num_steps + _WARM_STEPS
        return _medians(self._run(_prefill_batch(index, tokens, table) for index in range(num_batches)))

    def step_once(self, num_rows: int, context_tokens: int) -> None:
        """Run one decode step to its end."""
        batch = _decode_batch(0, self._tables(num_rows, context_tokens), context_tokens - 1, is_first=True)
        self._executor.submit(batch).result()

    def _tables(self, num_rows: int, num_tokens: int) -> list[list[int]]:
        """Scattered blocks for each row."""
        each = self.layout.num_blocks_for(num_tokens)
        assert num_rows * each <= self.layout.num_blocks, f"{num_rows} x {num_tokens} tokens do not fit"
        return [self._block_ids[row * each : (row + 1) * each] for row in range(num_rows)]

    def _run(self, batches: Iterable[StepBatch]) -> Iterator[_Timed]:
        """Submit ahead of results as the step loop does."""
        in_flight: deque[tuple[StepHandle, float]] = deque()
        for batch in batches:
            started_s = perf_counter()
            handle = self._executor.submit(batch)
            in_flight.append((handle, perf_counter() - started_s))
            if len(in_flight) == self._executor.pipeline_depth:
                yield _wait(*in_flight.popleft())
        while in_flight:
            yield _wait(*in_flight.popleft())


class _Timed(NamedTuple):
    output: StepOutput
    ended_s: float
    host_s: float


def _wait(handle: StepHandle, host_s: float) -> _Timed:
    output = handle.result()
    return _Timed(output, perf_counter(), host_s)


def _medians(steps: Iterable[_Timed]) -> StepSeconds:
    """Without the first steps, which warm up."""
    measured = list(steps)[_WARM_STEPS - 1 :]
    gaps = [after.ended_s - before.ended_s for before, after in pairwise(measured)]
    return StepSeconds(
        statistics.median(gaps),
        statistics.median(timed.output.duration_s for timed in measured[1:]),
        statistics.median(timed.host_s for timed in measured[1:]),
    )


def _decode_batch(
    index: int, tables: Sequence[Sequence[int]], cached: int, *, is_first: bool | None = None
) -> StepBatch:
    """One row per table; its token is the one that the step before sampled, except in the first batch."""
    has_token = index == 0 if is_first is None else is_first
    rows = [
        StepRow(
            sequence_id=row,
            tokens=[1] if has_token else [],
            previous_row=-1 if has_token else row,
            cached_length=cached,
            block_table=table,
            sample=_GREEDY,
            sample_position=cached + 1,
        )
        for row, table in enumerate(tables)
    ]
    return StepBatch(step_id=index, rows=rows)


def _prefill_batch(index: int, tokens: Sequence[int], table: Sequence[int]) -> StepBatch:
    row = StepRow(
        sequence_id=0,
        tokens=tokens,
        cached_length=0,
        block_table=table,
        sample=_GREEDY,
        sample_position=len(tokens),
    )
    return StepBatch(step_id=index, rows=[row])


def random_tokens(num_tokens: int, vocab_size: int) -> list[int]:
    """A prompt without special tokens."""
    return random.Random(0).choices(range(3, vocab_size), k=num_tokens)


def noise_pool(layout: KvLayout, device: torch.device) -> KvPool:
    return random_pool(layout.shape, getattr(torch, layout.dtype), device)
