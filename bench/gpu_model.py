"""A whole model on a GPU, compared with the limits of its memory and tensor cores.

    python -m pdserve.bench.gpu_model [--quick] [--only PART] [--quantised] [--folder FOLDER]

Random weights in the shape of Llama 3.1 8B, in bfloat16. The limit of a decode step, with 2k tokens of context a row,
is the time to read its weights and KV at the speed of a large copy; the limit of a prompt is the time of its operations
at the speed of a large product. Both speeds are measured in the same run. Goals: 85 % of the limit at 64 rows, and 70 %
in prompts. Steps are submitted as the step loop does, on a GPU two in flight; no sequences are kept: decode steps read
random KV from the pool, and prompts overwrite each other. The KV of a prompt is transferred between two pools as
between two workers of one host, without a step loop or other load, and compared with copies of as many bytes to pinned
memory and back.

Needs torch, Triton, safetensors and grpcio, and 16 GB for the weights where temporary files go: `TMPDIR=/dev/shm` keeps
them in memory. Rewrites a dated file of results after each row, so that results survive a lack of time. ``--device
cpu`` runs everything on a tiny model, as a check. Has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from pdserve.bench.kernels.attention import random_pool
from pdserve.bench.kernels.measure import Timer, clocks_under, gpu_timer
from pdserve.bench.kernels.report import (
    NoGpuError,
    cuda_device,
    limits_of,
    machine,
    measured_limits,
    write_dated,
)
from pdserve.bench.kernels.run import free_memory
from pdserve.bench.script import Echo, log, show_table
from pdserve.bench.shapes import LLAMA_3_8B_CONFIG
from pdserve.bench.transfer import EPOCH, TOKEN, Messages, offer_orders, pull_order, wait_until_pulled
from pdserve.contracts.kv_layout import KvLayout, kv_vector_bytes, resolve_kv_dtype
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepBatch, StepHandle, StepOutput, StepRow
from pdserve.engine.worker.staged_transfer import StagedTransfer
from pdserve.kernels.kv_pool import KvPool
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.executors.model import ModelExecutor
from pdserve.model.weights.bytes import weight_bytes
from pdserve.model.weights.random_checkpoint import write_random_weights

PARTS = ("decode", "prefill", "handoff")
BLOCK_SIZE = 16
TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
}
_QUANTISED = (("int8", "auto"), ("int4", "auto"), ("none", "int8"), ("none", "float8_e4m3fn"))
_ACTIVATION_BYTES = 6 * 10**9
"""Left for activations, logits and graphs."""
_WARM_STEPS = 4
_NUM_HANDOFFS = 6
"""The first of them warms up pages and connections, and does not count."""
_GREEDY = SamplingParams(temperature=0)
_HEADER = ("shape", "precision", "ms", "tokens/s", "% of limit", "device ms", "host ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Shapes to measure."""

    sizes: Mapping[str, Any]
    """Those of config.json that are not Llama 3's."""
    dtype: str
    decode_rows: tuple[int, ...]
    context_tokens: int
    num_steps: int
    """Steps of each decode shape."""
    prompt_tokens: tuple[int, ...]
    num_prompts: int
    """Prompts of each length."""
    matrix_size: int
    """Size of the matrices whose products and copies give the device's speed."""


LLAMA = Plan(
    sizes={},
    dtype="bfloat16",
    decode_rows=(1, 16, 64, 256),
    context_tokens=2048,
    num_steps=32,
    prompt_tokens=(2048, 8192),
    num_prompts=8,
    matrix_size=8192,
)
QUICK = replace(LLAMA, decode_rows=(1, 64), num_steps=16, prompt_tokens=(2048,), num_prompts=4)
ON_CPU = Plan(
    sizes=TINY,
    dtype="float32",
    decode_rows=(1, 3),
    context_tokens=64,
    num_steps=6,
    prompt_tokens=(40,),
    num_prompts=3,
    matrix_size=256,
)
"""A check that everything runs; its figures mean nothing."""


class DeviceLostError(Exception):
    """The device can measure nothing any more."""


def plain(dtype: str) -> Precision:
    """Weights and KV in one dtype."""
    return Precision(dtype=dtype, quantization="none")


def pool_dtype(precision: Precision) -> str:
    return resolve_kv_dtype(precision.kv_dtype, precision.dtype)


def name_of(precision: Precision) -> str:
    weights = precision.dtype if precision.quantization == "none" else precision.quantization
    return f"{weights} weights, {pool_dtype(precision)} KV"


def kv_token_bytes(shape: ModelShape, precision: Precision) -> int:
    """KV of one token, in all layers."""
    return shape.num_layers * shape.num_kv_heads * 2 * kv_vector_bytes(shape.head_dim, pool_dtype(precision))


def decode_bytes(shape: ModelShape, precision: Precision, num_rows: int, context_tokens: float) -> float:
    """Bytes that a decode step reads: the matrices of all layers, the output projection, and each row's KV."""
    weights = weight_bytes(shape, precision.dtype, precision.quantization)
    return weights.layers + weights.table + num_rows * context_tokens * kv_token_bytes(shape, precision)


def prefill_flops(shape: ModelShape, num_tokens: int) -> float:
    """Operations of a prompt: two per token and weight it is multiplied by, causal attention, and one row of logits."""
    products = 2.0 * num_tokens * shape.token_parameters + 2.0 * shape.table_parameters
    # Two products, of each query with half of the keys on average.
    attention = 2.0 * num_tokens * num_tokens * shape.num_layers * shape.num_heads * shape.head_dim
    return products + attention


def decode_shapes(
    plan: Plan, shape: ModelShape, precision: Precision, num_free_bytes: int | None
) -> Iterator[tuple[int, int]]:
    """Rows and context of the decode steps that fit, with at least half of the context.

    Args:
        num_free_bytes: memory of the device before anything is there; None for enough.
    """
    for num_rows in plan.decode_rows:
        context = plan.context_tokens
        if num_free_bytes is not None:
            weights = weight_bytes(shape, precision.dtype, precision.quantization).total
            room_tokens = (num_free_bytes - weights - _ACTIVATION_BYTES) // kv_token_bytes(shape, precision)
            context = min(context, room_tokens // num_rows // BLOCK_SIZE * BLOCK_SIZE)
        if 2 * context >= plan.context_tokens:
            yield num_rows, context


def free_bytes(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    free_memory(device)
    return torch.cuda.mem_get_info(device)[0]


def num_blocks(plan: Plan, shapes: list[tuple[int, int]]) -> int:
    """Blocks of a pool for any one of the shapes, or any one prompt."""
    most = max((rows * -(-context // BLOCK_SIZE) for rows, context in shapes), default=0)
    return max(most, -(-max(plan.prompt_tokens) // BLOCK_SIZE))


def write_weights(folder: Path, plan: Plan) -> Path:
    """Write config.json and weights of a Llama to ``folder``, without a tokenizer, and return it."""
    of_long = {"max_position_embeddings": 16384, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": plan.dtype}
    config = {**LLAMA_3_8B_CONFIG, **plan.sizes, **of_long}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_random_weights(folder / "model.safetensors", ModelShape.from_hf_config(config), plan.dtype)
    return folder


def noise_pool(layout: KvLayout, device: torch.device) -> KvPool:
    return random_pool(layout.shape, getattr(torch, layout.dtype), device)


class StepSeconds(NamedTuple):
    """Medians of some steps."""

    step_s: float
    """Between the ends of steps, as the host sees them."""
    device_s: float
    """Between the step's events on the device."""
    host_s: float
    """The host's time to submit it."""


class _Timed(NamedTuple):
    output: StepOutput
    ended_s: float
    host_s: float


class OwnModel:
    """A checkpoint and a pool, on a device."""

    def __init__(
        self, folder: Path, precision: Precision, device: torch.device, *, num_blocks: int, max_rows: int
    ) -> None:
        """
        Args:
            max_rows: rows of the largest decode step.
        """
        config = DecoderConfig.from_folder(folder)
        self.shape = config.shape
        self.layout = config.kv_layout(num_blocks, BLOCK_SIZE, pool_dtype(precision), "random")
        self._executor = ModelExecutor(
            folder=folder,
            config=config,
            layout=self.layout,
            pool=noise_pool(self.layout, device),
            precision=precision,
            max_captured_rows=max_rows,
        )
        self._block_ids = random.Random(0).sample(range(num_blocks), num_blocks)

    def decode(self, num_rows: int, context_tokens: int, num_steps: int) -> StepSeconds:
        """Time ``num_steps`` decode steps, the last with ``context_tokens`` tokens a row."""
        first = context_tokens - num_steps - _WARM_STEPS
        tables = self._tables(num_rows, context_tokens)
        lengths = range(first, context_tokens)
        return self._medians(_decode_batch(index, tables, length) for index, length in enumerate(lengths))

    def prefill(self, num_tokens: int, num_steps: int) -> StepSeconds:
        """Time prompts of ``num_tokens``, one a step, all in the same blocks and without special tokens."""
        tokens = random.Random(0).choices(range(3, self.shape.vocab_size), k=num_tokens)
        table = self._tables(1, num_tokens)[0]
        return self._medians(_prefill_batch(index, tokens, table) for index in range(num_steps + _WARM_STEPS))

    def step_once(self, num_rows: int, context_tokens: int) -> None:
        """Run one decode step to its end."""
        batch = _decode_batch(0, self._tables(num_rows, context_tokens), context_tokens - 1)
        self._executor.submit(batch).result()

    def _tables(self, num_rows: int, num_tokens: int) -> list[list[int]]:
        """Scattered blocks for each row."""
        each = self.layout.num_blocks_for(num_tokens)
        assert num_rows * each <= self.layout.num_blocks, f"{num_rows} x {num_tokens} tokens do not fit"
        return [self._block_ids[row * each : (row + 1) * each] for row in range(num_rows)]

    def _run(self, batches: Iterable[StepBatch]) -> Iterator[_Timed]:
        """Submit ahead of results as the step loop does."""
        in_flight: deque[tuple[StepHandle, float]] = deque()

        def ended() -> _Timed:
            handle, host_s = in_flight.popleft()
            return _Timed(handle.result(), perf_counter(), host_s)

        for batch in batches:
            started_s = perf_counter()
            handle = self._executor.submit(batch)
            in_flight.append((handle, perf_counter() - started_s))
            if len(in_flight) == self._executor.pipeline_depth:
                yield ended()
        while in_flight:
            yield ended()

    def _medians(self, batches: Iterable[StepBatch]) -> StepSeconds:
        """Without the first steps, which warm up."""
        measured = list(self._run(batches))[_WARM_STEPS - 1 :]
        gaps = [after.ended_s - before.ended_s for before, after in pairwise(measured)]
        return StepSeconds(
            statistics.median(gaps),
            statistics.median(timed.output.duration_s for timed in measured[1:]),
            statistics.median(timed.host_s for timed in measured[1:]),
        )


def _decode_batch(index: int, tables: Sequence[Sequence[int]], cached: int) -> StepBatch:
    """One row per table; its token is the one that the step before sampled, except in the first batch."""
    rows = [
        StepRow(
            sequence_id=row,
            tokens=[] if index else [1],
            previous_row=row if index else -1,
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


class HandoffSeconds(NamedTuple):
    """Medians."""

    handoff_s: float
    """From the grant until the KV is in the other pool."""
    link_s: float
    """Copies of as many bytes from the device to pinned memory, and back."""


class _Side(NamedTuple):
    """One worker's pool, with a staging file and a transfer process, as in `pdserve.engine.worker.worker`."""

    pool_blocks: torch.Tensor
    memory: PoolMemory
    transfer: StagedTransfer


def measure_handoff(layout: KvLayout, device: torch.device) -> HandoffSeconds:
    """Transfer all blocks of a pool of ``layout``.

    Raises:
        RuntimeError: a pull failed, or delivered other bytes.
    """
    messages: Messages = queue.SimpleQueue()
    with _side(layout, device, messages) as source, _side(layout, device, messages) as target:
        seconds = [_hand_off(number, layout, source, target, messages) for number in range(1, _NUM_HANDOFFS + 1)]
        if not torch.equal(source.pool_blocks, target.pool_blocks):
            raise RuntimeError("the pulled bytes are not what was granted")
        return HandoffSeconds(statistics.median(seconds[1:]), link_s(source.pool_blocks))


@contextmanager
def _side(layout: KvLayout, device: torch.device, messages: Messages) -> Iterator[_Side]:
    memory = PoolMemory.create(layout)
    blocks = noise_pool(layout, device).blocks
    died = partial(messages.put, None)
    start = partial(
        TransferProcess.start, memory=memory, worker_epoch=EPOCH, host="127.0.0.1", cluster_token=TOKEN,
        transport="auto", cpu_cores=(), on_death=died,
    )  # fmt: skip
    transfer = StagedTransfer(
        HostStaging(blocks, memory), lambda on_message: start(on_message=on_message), messages.put, died
    )
    try:
        yield _Side(blocks, memory, transfer)
    finally:
        transfer.close()
        memory.close()


def _hand_off(number: int, layout: KvLayout, source: _Side, target: _Side, messages: Messages) -> float:
    """Seconds of one transfer; its blocks count as rewritten."""
    for block in range(layout.num_blocks):
        source.memory.generations[block] = number
    handle, (offer, grant) = offer_orders(layout, layout.num_blocks, generation=number)
    source.transfer.send(offer)
    started_s = perf_counter()
    source.transfer.send(grant)
    target.transfer.send(pull_order(source.transfer.address, handle, layout.num_blocks, pull_id=number))
    wait_until_pulled(messages)
    return perf_counter() - started_s


def link_s(on_device: torch.Tensor) -> float:
    """Median seconds of copying all of it to pinned memory and back."""
    is_cuda = on_device.device.type == "cuda"
    on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=is_cuda)
    seconds = []
    for _ in range(_NUM_HANDOFFS):
        started_s = perf_counter()
        on_host.copy_(on_device)
        on_device.copy_(on_host)
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - started_s)
    return statistics.median(seconds[1:])


Row = dict[str, Any]
"""One shape of ``decode``, ``prefill`` or ``handoff``, with its precision, seconds of a step, of its limit and, of a
step, on the device and of the host, and from these tokens/s and the share of the limit. ``context_tokens`` is the
context of the last decode step, or the prompt; ``num_tokens`` are those that a step computes."""


class Bench:
    """A checkpoint on a device, and the document that receives its measurements."""

    def __init__(self, folder: Path, plan: Plan, device: torch.device, document: dict[str, Any], results: Path) -> None:
        """
        Args:
            document: written to its file in ``results`` after each row; ``torch_matmul_tflops`` and
                ``torch_copy_gbytes_per_s`` give the limits.
        """
        self._folder, self._plan, self._device, self._results = folder, plan, device, results
        self.document = document
        self.rows: list[Row] = document.setdefault("rows", [])
        self.config = DecoderConfig.from_folder(folder)

    def steps(self, precision: Precision, *, decode: bool, prefill: bool) -> None:
        """Measure the executor."""
        plan, shape, name = self._plan, self.config.shape, name_of(precision)
        shapes = self._shapes(precision) if decode else []
        with self._guarded(name):
            log(f"loading and capturing, {name}")
            most_rows = max((rows for rows, _ in shapes), default=1)
            blocks = num_blocks(plan, shapes)
            model = OwnModel(self._folder, precision, self._device, num_blocks=blocks, max_rows=most_rows)
            for rows, context in shapes:
                with self._guarded(f"{rows} rows"):
                    seconds = model.decode(rows, context, plan.num_steps)
                    num_bytes = decode_bytes(shape, precision, rows, context - (plan.num_steps - 1) / 2)
                    limit_s = num_bytes / (1e9 * self.document["torch_copy_gbytes_per_s"])
                    self._add("decode", precision, rows, context, rows, limit_s, **seconds._asdict())
                    if self._device.type == "cuda":
                        clocks = clocks_under(lambda: model.step_once(rows, context), self._device)  # noqa: B023
                        self.document["clocks"][f"decoding {rows} rows, {name}"] = clocks
            for num_tokens in plan.prompt_tokens if prefill else ():
                with self._guarded(f"{num_tokens} tokens"):
                    limit_s = prefill_flops(shape, num_tokens) / (1e12 * self.document["torch_matmul_tflops"])
                    seconds = model.prefill(num_tokens, plan.num_prompts)
                    self._add("prefill", precision, 1, num_tokens, num_tokens, limit_s, **seconds._asdict())

    def handoff(self) -> None:
        """Measure the transfer of the shortest prompt's KV from one pool to another."""
        precision, num_tokens = plain(self._plan.dtype), min(self._plan.prompt_tokens)
        with self._guarded("handoff"):
            num_needed = -(-num_tokens // BLOCK_SIZE)
            layout = self.config.kv_layout(num_needed, BLOCK_SIZE, pool_dtype(precision), "random")
            log(f"handing off {layout.pool_bytes / 1e6:.0f} MB")
            handoff_s, limit_s = measure_handoff(layout, self._device)
            self._add("handoff", precision, 1, num_tokens, num_tokens, limit_s, step_s=handoff_s)

    def _shapes(self, precision: Precision) -> list[tuple[int, int]]:
        shapes = list(decode_shapes(self._plan, self.config.shape, precision, free_bytes(self._device)))
        for num_rows in set(self._plan.decode_rows) - {rows for rows, _ in shapes}:
            what = f"{num_rows} rows are not measured with {name_of(precision)}"
            self.document["notes"].append(f"{what}: not half of their context fits the device")
        return shapes

    def _add(
        self, phase: str, precision: Precision, num_rows: int, context_tokens: int, num_tokens: int, limit_s: float,
        *, step_s: float, device_s: float | None = None, host_s: float | None = None,
    ) -> None:  # fmt: skip
        row = {
            "phase": phase,
            "precision": name_of(precision),
            "num_rows": num_rows,
            "context_tokens": context_tokens,
            "num_tokens": num_tokens,
            "step_s": step_s,
            "limit_s": limit_s,
            "device_s": device_s,
            "host_s": host_s,
            "tokens_per_s": num_tokens / step_s,
            "limit_share": limit_s / step_s,
        }
        self.rows.append(row)
        self.write()
        log(f"{phase} {', '.join(cells(row)[:2])}: {step_s * 1e3:.3f} ms, {row['limit_share']:.1%}")

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Report a failure, and go on.

        Raises:
            DeviceLostError: the device is lost with it.
        """
        try:
            yield
        except DeviceLostError:
            raise
        except Exception as error:  # Earlier and later measurements are worth having.
            line = f"{what}: {(str(error) or repr(error)).splitlines()[0]}"
            self.document["failures"].append(line)
            log(f"FAILED: {line}")
            if isinstance(error, torch.AcceleratorError):
                self.write()
                raise DeviceLostError from error
        free_memory(self._device)
        self.write()

    def write(self) -> Path:
        words = ("gpu_model", self.document["part"], self.document["hardware"] or "unknown")
        return write_dated(self.document, self._results, *words)


def run(
    echo: Echo, *, only: str = "", quick: bool = False, quantised: bool = False, device: str = "cuda", folder: Path
) -> int:
    """Measure, and return the exit status: 1 if a measurement failed.

    Args:
        only: one of `PARTS`; empty for all.
        quantised: decode with quantised weights and KV, too.
        folder: of the dated file.

    Raises:
        NoGpuError: there is no GPU.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise NoGpuError("no GPU here: --device cpu tries all of it on a tiny model")
    where = torch.device("cpu") if device == "cpu" else cuda_device()
    plan = ON_CPU if device == "cpu" else QUICK if quick else LLAMA
    document = describe(where, plan, "_".join(filter(None, (only, "quick" * quick))))
    usual = plain(plan.dtype)
    with tempfile.TemporaryDirectory(prefix="pdserve-") as scratch:
        log("writing weights")
        bench = Bench(write_weights(Path(scratch), plan), plan, where, document, folder)
        try:
            if only != "handoff":
                bench.steps(usual, decode=only != "prefill", prefill=only != "decode")
            if only in ("", "handoff"):
                bench.handoff()
            for quantization, kv_dtype in _QUANTISED if quantised else ():
                precision = replace(usual, quantization=quantization, kv_dtype=kv_dtype)
                bench.steps(precision, decode=True, prefill=False)
        except DeviceLostError:
            log("the device is lost: earlier measurements are kept")
    bench.write()
    show(document, echo)
    return 1 if document["failures"] else 0


def describe(device: torch.device, plan: Plan, part: str) -> dict[str, Any]:
    """A document without rows: machine, limits of its data sheet, and measured limits."""
    document = {"part": part, **machine(device), "clocks": {}, "notes": [], "failures": []}
    timer: Timer = gpu_timer
    if device.type == "cpu":
        timer = _wall_timer
    elif document["hardware"]:
        sheet = limits_of(document["hardware"])
        document |= {"peak_tflops": sheet.flops / 1e12, "peak_gbytes_per_s": sheet.bandwidth / 1e9}
    return document | measured_limits(device, timer, size=plan.matrix_size)


def _wall_timer(run: Any) -> float:
    run()
    started_s = perf_counter()
    run()
    return perf_counter() - started_s


def cells(row: Row) -> list[str]:
    """In the order of `_HEADER`."""
    return [
        f"{row['num_rows']} x {row['context_tokens']}",
        row["precision"],
        f"{row['step_s'] * 1e3:.3f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['limit_share']:.1%}",
        *("-" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in (row["device_s"], row["host_s"])),
    ]


def show(document: Mapping[str, Any], echo: Echo) -> None:
    """Print a table for each phase, clocks, notes and failures."""
    sheet = ""
    if "peak_tflops" in document:
        sheet = f"; by its data sheet {document['peak_tflops']:.3g} and {document['peak_gbytes_per_s']:.4g}"
    echo(
        f"{document['device']}: torch's large product {document['torch_matmul_tflops']:.3g} TFLOP/s, "
        f"its large copy {document['torch_copy_gbytes_per_s']:.4g} GB/s{sheet}"
    )
    in_order = sorted(document["rows"], key=lambda row: (row["phase"], row["num_rows"], row["context_tokens"]))
    for phase, of_phase in groupby(in_order, key=lambda row: str(row["phase"])):
        title = f"{phase}, a {'step' if phase == 'decode' else 'prompt'}"
        show_table(title, _HEADER, [cells(row) for row in of_phase], echo)
    for name, clocks in document["clocks"].items():
        echo(f"{name}: {', '.join(f'{key} {value}' for key, value in clocks.items()) or 'clocks unknown'}")
    for line in (*document["notes"], *(f"FAILED: {failure}" for failure in document["failures"])):
        echo(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, default="", help="by default all")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and steps")
    parser.add_argument("--quantised", action="store_true", help="decode with quantised weights and KV, too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder of the dated file of results")
    try:
        return run(print, **vars(parser.parse_args()))
    except NoGpuError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
