"""Measures how long a model's steps take on this machine, as a worker would run them.

`pdserve profile` and benchmarks call it. `profiled_executor` builds what a worker builds, with random weights where
there is only a config.json; `measure_steps` asks any `pdserve.contracts.step.Executor` for steps of a grid, round after
round, so that a noisy second falls on all of them. Fits nothing, prints nothing.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from pdserve.model.weights.files import tensor_shapes

MAX_ROUNDS = 25
MIN_REPEATS = 3
_PROBE_SHARE = 0.2
"""Of the budget, for running every step once; steps that this has no time for are left out, the largest first."""
_SHORT_SHARE = 0.15
"""Of the budget, for steps of a model of one layer, which tell overhead per layer from overhead per step."""
_SHORT_EVERY = 4
_MAX_SHORT_TOKENS = 64
_WARM_UP_S = 0.02
"""Decode steps that are shorter run so long before one counts: a worker's follow each other, and find in caches what
those before have read. Longer ones read more than caches hold."""
_COPY_BYTES = 2**27
"""Blocks of so many bytes together are copied, if the pool has them: more than caches hold."""
_COPY_REPEATS = 5
_POOL_BYTE = 0x3C
"""In every byte of the pool: a small number in each dtype. A pool that was never written is one page of zeros to the
system, which caches hold however large the pool is."""
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TILE_VALUES = 2**20

Progress = Callable[[float, str], None]
"""Told the share of the budget that is spent, and what is being done."""


class MeasuredStep(NamedTuple):
    """How long one step took."""

    step: Step
    num_layers: int
    """Of the model that ran it."""
    median_s: float
    fastest_s: float
    spread: float
    """Half the distance between the quartiles of its repeats, as a share of the median: the noise of the machine."""
    num_repeats: int


class Profile(NamedTuple):
    """What was measured, before anything is fitted to it."""

    steps: list[MeasuredStep]
    left_out: list[Step]
    """Steps of the grid that the budget had no time for."""
    host_bandwidth: float
    """Bytes per second of copying KV blocks between the pool and the host."""


FLOAT32 = Precision()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledModel:
    """What is measured: a model, how it is held, and on which cores."""

    name: str
    folder: Path
    config: DecoderConfig
    has_weights: bool
    """The folder holds safetensors; without, weights are random."""
    precision: Precision = FLOAT32
    block_size: int = 16
    cores: tuple[int, ...]
    """Of this machine; one thread computes on each."""
    kv_memory_bytes: int
    """Of the pool that is measured in, at most."""
    max_batch_tokens: int = 2048
    max_batch_size: int = 256
    max_model_len: int = 0
    """0 takes the checkpoint's own limit."""

    def limits(self) -> GridLimits:
        """Raises ValueError when ``max_model_len`` is beyond the model's, or not even two blocks fit in the memory."""
        layout = self.config.kv_layout(
            1, self.block_size, resolve_kv_dtype(self.precision.kv_dtype, self.precision.dtype), "profile"
        )
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
    """Measure the steps of the model's grid and the copying of KV, in about ``budget_s``.

    Raises:
        ValueError: the weights are unusable, or the memory is too small.
    """
    limits = model.limits()
    steps = step_grid(limits)
    num_blocks = max(step.num_blocks(model.block_size) for step in steps)
    kv_dtype = resolve_kv_dtype(model.precision.kv_dtype, model.precision.dtype)
    layout = model.config.kv_layout(num_blocks, model.block_size, kv_dtype, "profile")
    progress(0.0, "loading the model")
    with profiled_executor(model, layout) as executor:
        host_bandwidth = _measure_copies(executor, layout)
        measured, left_out = measure_steps(
            executor, steps, layout, (1 - _SHORT_SHARE) * budget_s, _part(progress, 0.0, 1 - _SHORT_SHARE)
        )
    short = _with_one_layer(model)
    few = [entry.step for entry in measured if entry.step.num_new <= _MAX_SHORT_TOKENS][::_SHORT_EVERY]
    layout = short.config.kv_layout(num_blocks, model.block_size, kv_dtype, "profile")
    with profiled_executor(short, layout) as executor:
        measured += measure_steps(executor, few, layout, _SHORT_SHARE * budget_s, _part(progress, 1 - _SHORT_SHARE, 1))[
            0
        ]
    return Profile(measured, left_out, host_bandwidth)


def _part(progress: Progress, begin: float, end: float) -> Progress:
    """Progress of a part of the work, from ``begin`` to ``end``."""
    return lambda share, text: progress(begin + share * (end - begin), text)


def _with_one_layer(model: ProfiledModel) -> ProfiledModel:
    """Its first layer, with random weights."""
    config = model.config
    shape = replace(config.shape, num_layers=1)
    return replace(model, has_weights=False, config=replace(config, shape=shape, layers=config.layers[:1]))


@contextmanager
def profiled_executor(model: ProfiledModel, layout: KvLayout) -> Iterator[Executor]:
    """The executor that a worker would build, over a pool of ``layout`` in which every byte was written."""
    use_cores(model.cores)
    memory = torch.full((layout.pool_bytes,), _POOL_BYTE, dtype=torch.uint8)
    pool = KvPool(memory, layout.shape, getattr(torch, layout.dtype))
    with tempfile.TemporaryDirectory(prefix="pdserve-profile-") as scratch:
        folder = model.folder
        if not model.has_weights:
            folder = Path(scratch)
            write_random_weights(folder / "model.safetensors", model.config, model.precision.dtype)
        executor = ModelExecutor(
            folder=folder,
            config=model.config.at_length(model.config.limits(model.max_model_len).max_model_len),
            layout=layout,
            pool=pool,
            dtype=model.precision.dtype,
            quantization=model.precision.quantization,
            num_swap_slots=_num_copied_blocks(layout),
        )
    try:
        yield executor
    finally:
        executor.close()


def write_random_weights(path: Path, config: DecoderConfig, dtype: str) -> None:
    """A safetensors file with every tensor of the model; values repeat, which takes no longer or shorter to multiply.

    Raises:
        OSError: no room for it.
    """
    kind: torch.dtype = getattr(torch, dtype)
    tile = (torch.randn(_TILE_VALUES) * 0.02).to(kind).view(torch.uint8).numpy().tobytes()
    header, end = {}, 0
    for name, shape in tensor_shapes(config.shape).items():
        begin, end = end, end + torch.Size(shape).numel() * kind.itemsize
        header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, len(tile)):
            file.write(tile[: end - begin])


def measure_steps(
    executor: Executor, steps: Sequence[Step], layout: KvLayout, budget_s: float, progress: Progress
) -> tuple[list[MeasuredStep], list[Step]]:
    """Run ``steps`` in rounds, each in another order, until the budget is spent or `MAX_ROUNDS` are done.

    Each step runs `MIN_REPEATS` times, and further rounds leave out those that had their share of the budget. A short
    decode step runs for a while before each time that counts, which is part of its share.

    Args:
        steps: the smallest first: where time does not suffice the last ones are left out.

    Returns:
        What was measured, and which steps were left out.
    """
    started_s = time.perf_counter()
    batches = [_batch(step, layout.block_size) for step in steps]
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
    """Run every batch once, and give the durations of those that there was time for; of the first one in any case."""
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


def _batch(step: Step, block_size: int) -> StepBatch:
    """``step`` with blocks of the pool from the first on, no two rows sharing one, sampled as the API's default is."""
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
    """Bytes per second of copying blocks out and in again."""
    copies = [BlockCopy(block, block) for block in range(_num_copied_blocks(layout))]
    batch = StepBatch(step_id=0, rows=[], swap_outs=copies, swap_ins=copies)
    _run_s(executor, batch)  # the host gives slots their memory as they are first written
    copied_s = statistics.median(_run_s(executor, batch) for _ in range(_COPY_REPEATS))
    return 2 * len(copies) * layout.block_bytes / copied_s


def _num_copied_blocks(layout: KvLayout) -> int:
    return min(layout.num_blocks, -(-_COPY_BYTES // layout.block_bytes))
