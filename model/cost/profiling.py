"""Measures the step durations of a model on this machine, on the executor that a worker builds.

Called by `pdserve profile`. Weights are random if the folder only has a config.json. `measure_steps` runs the steps of
a grid in rounds, so that a noisy second spreads over all of them. Fits nothing, prints nothing.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from pdserve.contracts.kv_layout import KvLayout, resolve_kv_dtype
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import BlockCopy, Executor, StepBatch
from pdserve.contracts.step import StepRow as BatchRow
from pdserve.kernels.cpu.threads import use_cores
from pdserve.kernels.kv_pool import KvPool
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.cost.step_grid import GridLimits, Step, StepKind, step_grid
from pdserve.model.executors.model import ModelExecutor
from pdserve.model.weights.random_checkpoint import write_random_weights

MAX_ROUNDS = 25
MIN_REPEATS = 3
_PROBE_SHARE = 0.2
"""Share of the budget for running every step once; steps that do not fit are left out, the largest first."""
_SHORT_SHARE = 0.15
"""Share of the budget for a one-layer model, which separates overhead per layer from overhead per step."""
_SHORT_EVERY = 4
_MAX_SHORT_TOKENS = 64
_WARM_UP_S = 0.02
"""Warm-up before each measurement of a decode step shorter than this. In a worker such steps run back to back on warm
caches; longer steps read more than the caches hold."""
_COPY_BYTES = 2**27
"""Total size of the blocks that the copy measurement moves, if the pool has them: more than the caches hold."""
_COPY_REPEATS = 5
_POOL_BYTE = 0x3C
"""Value of every byte of the pool but for its sign, a small number in each dtype. The system maps an unwritten pool to
one page of zeros, which stays in the caches whatever the pool's size; and of values of one sign, all rows would attend
to the same, and touch the same experts."""
_POOL_PERIOD = 2**20 + 7
"""Bytes after which signs repeat."""

Progress = Callable[[float, str], None]
"""Receives the spent share of the budget and a line about the current work."""


class MeasuredStep(NamedTuple):
    step: Step
    num_layers: int
    """Layers of the model that ran the step."""
    median_s: float
    fastest_s: float
    spread: float
    """Noise of the machine: half the interquartile range of the repeats, as a share of the median."""
    num_repeats: int


class Profile(NamedTuple):
    """Measurements of one model, before any fit."""

    steps: list[MeasuredStep]
    left_out: list[Step]
    """Steps of the grid that did not fit in the budget."""
    host_bandwidth: float
    """Bytes per second of KV block copies between the pool and the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledModel:
    """The model to measure, its precision and layout, and the cores it runs on."""

    name: str
    folder: Path
    config: DecoderConfig
    has_weights: bool
    """The folder has safetensors; otherwise weights are random."""
    precision: Precision = field(default_factory=Precision)
    block_size: int = 16
    cores: tuple[int, ...]
    """Cores of this machine; one compute thread runs on each."""
    kv_memory_bytes: int
    """Upper limit on the size of the KV pool."""
    max_batch_tokens: int = 2048
    max_batch_size: int = 256
    max_model_len: int = 0
    """0 takes the checkpoint's limit."""

    def kv_layout(self, num_blocks: int) -> KvLayout:
        kv_dtype = resolve_kv_dtype(self.precision.kv_dtype, self.precision.dtype)
        return self.config.kv_layout(num_blocks, self.block_size, kv_dtype, "profile")

    def limits(self) -> GridLimits:
        """Raise ValueError if ``max_model_len`` exceeds the model's, or if fewer than two blocks fit in memory."""
        layout = self.kv_layout(1)
        num_blocks = self.kv_memory_bytes // layout.block_bytes
        if num_blocks < 2:
            raise ValueError(f"{self.kv_memory_bytes} bytes of KV hold no two blocks of {layout.block_bytes} bytes")
        return GridLimits(
            max_model_len=self.config.limits(self.max_model_len).max_model_len,
            max_batch_tokens=self.max_batch_tokens,
            max_batch_size=self.max_batch_size,
            num_kv_blocks=num_blocks,
            block_size=self.block_size,
        )


def measure_model(model: ProfiledModel, budget_s: float, progress: Progress) -> Profile:
    """Measure the steps of the model's grid and KV copies, in about ``budget_s``.

    Raises:
        ValueError: unusable weights, or too little memory.
    """
    steps = step_grid(model.limits())
    num_blocks = max(step.num_blocks(model.block_size) for step in steps)
    progress(0.0, "loading the model")
    with profiled_executor(model, num_blocks) as (executor, layout):
        host_bandwidth = _measure_copies(executor, layout)
        short_s = _SHORT_SHARE * budget_s
        measured, left_out = measure_steps(
            executor, steps, layout, budget_s - short_s, lambda share, text: progress((1 - _SHORT_SHARE) * share, text)
        )
    few = [entry.step for entry in measured if entry.step.num_new <= _MAX_SHORT_TOKENS][::_SHORT_EVERY]
    with profiled_executor(_with_one_layer(model), num_blocks) as (executor, layout):
        short, _ = measure_steps(
            executor, few, layout, short_s, lambda share, text: progress(1 - _SHORT_SHARE * (1 - share), text)
        )
    return Profile(measured + short, left_out, host_bandwidth)


def _with_one_layer(model: ProfiledModel) -> ProfiledModel:
    """The model cut to its first layer, with random weights."""
    config = model.config
    shape = replace(config.shape, num_layers=1)
    return replace(model, has_weights=False, config=replace(config, shape=shape, layers=config.layers[:1]))


@contextmanager
def profiled_executor(model: ProfiledModel, num_blocks: int) -> Iterator[tuple[Executor, KvLayout]]:
    """Build a worker's executor over a pool whose every byte is written; close it on exit."""
    layout = model.kv_layout(num_blocks)
    use_cores(model.cores)
    signs = torch.randint(2, (_POOL_PERIOD,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    memory = (signs * 0x80 + _POOL_BYTE).repeat(-(-layout.pool_bytes // _POOL_PERIOD))[: layout.pool_bytes]
    pool = KvPool(memory, layout.shape, getattr(torch, layout.dtype))
    with tempfile.TemporaryDirectory(prefix="pdserve-profile-") as scratch:
        folder = model.folder
        if not model.has_weights:
            folder = Path(scratch)
            write_random_weights(folder / "model.safetensors", model.config.shape, model.precision.dtype)
        executor = ModelExecutor(
            folder=folder,
            config=model.config.at_length(model.config.limits(model.max_model_len).max_model_len),
            layout=layout,
            pool=pool,
            precision=model.precision,
            num_swap_slots=_num_copied_blocks(layout),
        )
    try:
        yield executor, layout
    finally:
        executor.close()


def measure_steps(
    executor: Executor, steps: Sequence[Step], layout: KvLayout, budget_s: float, progress: Progress
) -> tuple[list[MeasuredStep], list[Step]]:
    """Run ``steps`` in shuffled rounds until the budget is spent or `MAX_ROUNDS` are done.

    Each step runs `MIN_REPEATS` times; further rounds skip steps that have used their share of the budget. Warm-up of
    short decode steps counts towards their share.

    Args:
        steps: the smallest first.

    Returns:
        The measured steps, and the last steps, left out if the budget is too short.
    """
    started_s = time.perf_counter()
    batches = [step_batch(step, layout.block_size) for step in steps]
    probed_s = list(_probe(executor, batches, budget_s * _PROBE_SHARE))
    order = list(range(len(probed_s)))
    durations_s: list[list[float]] = [[] for _ in order]
    spent_s = [0.0 for _ in order]
    shuffle = random.Random(0).shuffle
    for number in range(MAX_ROUNDS):
        shuffle(order)
        for index in order:
            began_s = time.perf_counter()
            spent = (began_s - started_s) / budget_s
            if number >= MIN_REPEATS and (spent >= 1 or spent_s[index] > budget_s / len(order)):
                continue
            progress(min(1.0, max(spent, number / MAX_ROUNDS)), f"round {number + 1}: {steps[index]}")
            if steps[index].kind is StepKind.DECODE and probed_s[index] < _WARM_UP_S:
                _warm_up(executor, batches[index])
            durations_s[index].append(_run_s(executor, batches[index]))
            spent_s[index] += time.perf_counter() - began_s
    measured = [_summary(step, layout, times_s) for step, times_s in zip(steps, durations_s, strict=False)]
    return measured, list(steps[len(order) :])


def _probe(executor: Executor, batches: Sequence[StepBatch], budget_s: float) -> Iterator[float]:
    """Run batches once each within the budget, at least the first, and yield their durations."""
    _run_s(executor, batches[0])  # what the first step of a process takes longer is not the others'
    started_s = time.perf_counter()
    for index, batch in enumerate(batches):
        if index and time.perf_counter() - started_s > budget_s:
            return
        yield _run_s(executor, batch)


def _warm_up(executor: Executor, batch: StepBatch) -> None:
    until_s = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < until_s:
        _run_s(executor, batch)


def _run_s(executor: Executor, batch: StepBatch) -> float:
    return executor.submit(batch).result().duration_s


def _summary(step: Step, layout: KvLayout, durations_s: list[float]) -> MeasuredStep:
    low_s, median_s, high_s = statistics.quantiles(durations_s, n=4, method="inclusive")
    spread = (high_s - low_s) / 2 / median_s if median_s else 0.0
    return MeasuredStep(step, layout.num_layers, median_s, min(durations_s), spread, len(durations_s))


def step_batch(step: Step, block_size: int) -> StepBatch:
    """Build the batch of ``step``: pool blocks from 0 on, none shared, sampled with the API's defaults."""
    rows, block = [], 0
    for index, (num_new, num_cached) in enumerate(step.rows):
        num_blocks = -(-(num_new + num_cached) // block_size)
        rows.append(
            BatchRow(
                sequence_id=index,
                tokens=[(7 * index + position) % 97 for position in range(num_new)],
                cached_length=num_cached,
                block_table=range(block, block + num_blocks),
                sample=SamplingParams(seed=index),
                sample_position=num_new + num_cached,
            )
        )
        block += num_blocks
    return StepBatch(step_id=0, rows=rows)


def _measure_copies(executor: Executor, layout: KvLayout) -> float:
    """Bytes per second of swapping blocks out and in again."""
    copies = [BlockCopy(block, block) for block in range(_num_copied_blocks(layout))]
    batch = StepBatch(step_id=0, rows=[], swap_outs=copies, swap_ins=copies)
    _run_s(executor, batch)  # the host allocates the slots' memory on first write
    copied_s = statistics.median(_run_s(executor, batch) for _ in range(_COPY_REPEATS))
    return 2 * len(copies) * layout.block_bytes / copied_s


def _num_copied_blocks(layout: KvLayout) -> int:
    return min(layout.num_blocks, -(-_COPY_BYTES // layout.block_bytes))
