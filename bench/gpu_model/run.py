"""A whole model on a GPU, compared with the limits of its memory and tensor cores.

    python -m pdserve.bench.gpu_model [--quick] [--only PART] [--quantised] [--folder FOLDER]

Random weights in the shape of Llama 3.1 8B, in bfloat16. The limit of a decode step, with 2k tokens of context a row,
is the time to read its weights and KV at the speed of a large copy; the limit of a prompt is the time of its operations
at the speed of a large product. Both speeds are measured in the same run. Goals: 85 % of the limit at 64 rows, and 70 %
in prompts. The KV of a prompt is transferred between two pools as between two workers of one host, and compared with
copies of as many bytes to pinned memory and back.

Needs torch, Triton, safetensors and grpcio, and 16 GB for the weights where temporary files go: `TMPDIR=/dev/shm` keeps
them in memory. Rewrites a dated file of results after each row, so that results survive a lack of time. ``--device
cpu`` runs everything on a tiny model, as a check. Has not run on a GPU yet.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from pdserve.bench.gpu_model.checkpoint import TINY, write_weights
from pdserve.bench.gpu_model.handoff import measure_handoff
from pdserve.bench.gpu_model.steps import BLOCK_SIZE, OwnModel, StepSeconds, Variant
from pdserve.bench.kernels.measure import Timer, clocks_under, gpu_timer
from pdserve.bench.kernels.report import (
    Echo,
    NoGpuError,
    cuda_device,
    limits_of,
    log,
    machine,
    measured_limits,
    show_table,
    write_dated,
)
from pdserve.bench.kernels.run import free_memory
from pdserve.bench.shapes import LLAMA_8B
from pdserve.contracts.kv_layout import kv_vector_bytes
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.bytes import weight_bytes

PARTS = ("decode", "prefill", "handoff")
_QUANTISED = (("int8", "auto"), ("int4", "auto"), ("none", "int8"), ("none", "float8_e4m3fn"))
_ACTIVATION_BYTES = 6 * 10**9
"""Left for activations, logits and graphs."""
_HEADER = ("shape", "precision", "ms", "tokens/s", "% of limit", "device ms", "host ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Shapes to measure."""

    sizes: Mapping[str, Any]
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
    sizes=LLAMA_8B,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    only: str = ""
    """One of `PARTS`; empty for all."""
    quick: bool = False
    quantised: bool = False
    """Decode with quantised weights and KV, too."""
    device: str = "cuda"
    folder: Path = Path()
    """Folder of the dated file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One shape of one phase."""

    phase: str
    """``decode``, ``prefill`` or ``handoff``."""
    precision: str
    num_rows: int
    context_tokens: int
    """Context of the last decode step; else the prompt."""
    num_tokens: int
    """Tokens computed by a step."""
    step_s: float
    limit_s: float
    device_s: float | None = None
    host_s: float | None = None

    @property
    def limit_share(self) -> float:
        return self.limit_s / self.step_s

    @property
    def shape(self) -> str:
        return f"{self.num_rows} x {self.context_tokens}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.num_tokens / self.step_s, "limit_share": self.limit_share}

    def cells(self) -> list[str]:
        return [
            self.shape,
            self.precision,
            f"{self.step_s * 1e3:.3f}",
            f"{self.num_tokens / self.step_s:.0f}",
            f"{self.limit_share:.1%}",
            *("-" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in (self.device_s, self.host_s)),
        ]


class DeviceLostError(Exception):
    """The device can measure nothing any more."""


def kv_token_bytes(shape: ModelShape, variant: Variant) -> int:
    """KV of one token, in all layers."""
    return shape.num_layers * shape.num_kv_heads * 2 * kv_vector_bytes(shape.head_dim, variant.pool_dtype)


def decode_bytes(shape: ModelShape, variant: Variant, num_rows: int, context_tokens: float) -> float:
    """Bytes that a decode step reads: the matrices of all layers, the output projection, and each row's KV."""
    weights = weight_bytes(shape, variant.dtype, variant.quantization)
    return weights.layers + weights.table + num_rows * context_tokens * kv_token_bytes(shape, variant)


def prefill_flops(shape: ModelShape, num_tokens: int) -> float:
    """Operations of a prompt: two per token and weight it is multiplied by, causal attention, and one row of logits."""
    products = 2.0 * num_tokens * shape.token_parameters + 2.0 * shape.table_parameters
    # Two products, of each query with half of the keys on average.
    attention = 2.0 * num_tokens * num_tokens * shape.num_layers * shape.num_heads * shape.head_dim
    return products + attention


def decode_shapes(
    plan: Plan, shape: ModelShape, variant: Variant, num_free_bytes: int | None
) -> Iterator[tuple[int, int]]:
    """Rows and context of the decode steps that fit, with at least half of the context.

    Args:
        num_free_bytes: memory of the device before anything is there; None for enough.
    """
    for num_rows in plan.decode_rows:
        context = plan.context_tokens
        if num_free_bytes is not None:
            weights = weight_bytes(shape, variant.dtype, variant.quantization).total
            room_tokens = (num_free_bytes - weights - _ACTIVATION_BYTES) // kv_token_bytes(shape, variant)
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


@dataclass(frozen=True, slots=True)
class Bench:
    """A checkpoint on a device, and the document that receives its measurements."""

    folder: Path
    plan: Plan
    device: torch.device
    document: dict[str, Any]
    """Written to its file after each row; ``torch_matmul_tflops`` and ``torch_copy_gbytes_per_s`` give the limits."""
    results: Path
    rows: list[Row]

    def steps(self, variant: Variant, *, decode: bool, prefill: bool) -> None:
        """Measure the executor."""
        shapes = self._shapes(variant) if decode else []
        with self._guarded(variant.name):
            log(f"loading and capturing, {variant.name}")
            most_rows = max((rows for rows, _ in shapes), default=1)
            blocks = num_blocks(self.plan, shapes)
            model = OwnModel(self.folder, variant, self.device, num_blocks=blocks, max_rows=most_rows)
            for rows, context in shapes:
                with self._guarded(f"{rows} rows"):
                    self._add_decode(variant, rows, context, model.decode(rows, context, self.plan.num_steps))
                    if self.device.type == "cuda":
                        clocks = clocks_under(lambda: model.step_once(rows, context), self.device)  # noqa: B023
                        self.document["clocks"][f"decoding {rows} rows, {variant.name}"] = clocks
            for num_tokens in self.plan.prompt_tokens if prefill else ():
                with self._guarded(f"{num_tokens} tokens"):
                    limit_s = prefill_flops(self._shape, num_tokens) / (1e12 * self.document["torch_matmul_tflops"])
                    seconds = model.prefill(num_tokens, self.plan.num_prompts)._asdict()
                    self._add("prefill", variant, 1, num_tokens, num_tokens, limit_s, **seconds)

    def handoff(self) -> None:
        """Measure the transfer of the shortest prompt's KV from one pool to another."""
        variant, num_tokens = Variant(dtype=self.plan.dtype), min(self.plan.prompt_tokens)
        with self._guarded("handoff"):
            config = DecoderConfig.from_folder(self.folder)
            layout = config.kv_layout(-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, variant.pool_dtype, "random")
            log(f"handing off {layout.pool_bytes / 1e6:.0f} MB")
            handoff_s, link_s = measure_handoff(layout, self.device)
            self._add("handoff", variant, 1, num_tokens, num_tokens, link_s, step_s=handoff_s)

    @property
    def _shape(self) -> ModelShape:
        return DecoderConfig.from_folder(self.folder).shape

    def _shapes(self, variant: Variant) -> list[tuple[int, int]]:
        shapes = list(decode_shapes(self.plan, self._shape, variant, free_bytes(self.device)))
        for num_rows in set(self.plan.decode_rows) - {rows for rows, _ in shapes}:
            note = f"{num_rows} rows are not measured with {variant.name}: not half of their context fits the device"
            if note not in self.document["notes"]:
                self.document["notes"].append(note)
        return shapes

    def _add_decode(self, variant: Variant, num_rows: int, context: int, seconds: StepSeconds) -> None:
        num_bytes = decode_bytes(self._shape, variant, num_rows, context - (self.plan.num_steps - 1) / 2)
        limit_s = num_bytes / (1e9 * self.document["torch_copy_gbytes_per_s"])
        self._add("decode", variant, num_rows, context, num_rows, limit_s, **seconds._asdict())

    def _add(
        self, phase: str, variant: Variant, num_rows: int, context_tokens: int, num_tokens: int, limit_s: float,
        **seconds: float,
    ) -> None:  # fmt: skip
        row = Row(
            phase=phase, precision=variant.name, num_rows=num_rows, context_tokens=context_tokens,
            num_tokens=num_tokens, limit_s=limit_s, **seconds,
        )  # fmt: skip
        self.rows.append(row)
        self.write()
        log(f"{phase} {row.shape}, {variant.name}: {row.step_s * 1e3:.3f} ms, {row.limit_share:.1%}")

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
        free_memory(self.device)
        self.write()

    def write(self) -> Path:
        self.document["rows"] = [row.as_dict() for row in self.rows]
        words = ("gpu_model", self.document["part"], self.document["hardware"] or "unknown")
        return write_dated(self.document, self.results, *words)


def run(settings: Settings, echo: Echo) -> int:
    """Measure, and return the exit status: 1 if a measurement failed.

    Raises:
        ValueError: unknown part.
        NoGpuError: there is no GPU.
    """
    if settings.only and settings.only not in PARTS:
        raise ValueError(f"there is no part {settings.only!r}: use one of {', '.join(PARTS)}")
    if settings.device != "cpu" and not torch.cuda.is_available():
        raise NoGpuError("no GPU here: --device cpu tries all of it on a tiny model")
    device = torch.device("cpu") if settings.device == "cpu" else cuda_device()
    plan = ON_CPU if device.type == "cpu" else QUICK if settings.quick else LLAMA
    document = describe(device, plan, "_".join(filter(None, (settings.only, "quick" * settings.quick))))
    with tempfile.TemporaryDirectory(prefix="pdserve-") as scratch:
        log("drawing and writing weights")
        folder = write_weights(Path(scratch), plan.sizes, plan.dtype, device)
        bench = Bench(folder, plan, device, document, settings.folder, [])
        try:
            _measure(bench, settings)
        except DeviceLostError:
            log("the device is lost: earlier measurements are kept")
    bench.write()
    show(document, bench.rows, echo)
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


def _measure(bench: Bench, settings: Settings) -> None:
    plain = Variant(dtype=bench.plan.dtype)
    if settings.only in ("", "decode", "prefill"):
        bench.steps(plain, decode=settings.only != "prefill", prefill=settings.only != "decode")
    if settings.only in ("", "handoff"):
        bench.handoff()
    for quantization, kv_dtype in _QUANTISED if settings.quantised else ():
        bench.steps(replace(plain, quantization=quantization, kv_dtype=kv_dtype), decode=True, prefill=False)


def show(document: Mapping[str, Any], rows: list[Row], echo: Echo) -> None:
    """Print a table for each phase, clocks, notes and failures."""
    sheet = ""
    if "peak_tflops" in document:
        sheet = f"; by its data sheet {document['peak_tflops']:.3g} and {document['peak_gbytes_per_s']:.4g}"
    echo(
        f"{document['device']}: torch's large product {document['torch_matmul_tflops']:.3g} TFLOP/s, "
        f"its large copy {document['torch_copy_gbytes_per_s']:.4g} GB/s{sheet}"
    )
    in_order = sorted(rows, key=lambda row: (row.phase, row.num_rows, row.context_tokens))
    for phase, of_phase in groupby(in_order, key=lambda row: row.phase):
        title = f"{phase}, a {'step' if phase == 'decode' else 'prompt'}"
        show_table(title, _HEADER, [row.cells() for row in of_phase], echo)
    for name, clocks in document["clocks"].items():
        echo(f"{name}: {', '.join(f'{key} {value}' for key, value in clocks.items()) or 'clocks unknown'}")
    for line in (*document["notes"], *(f"FAILED: {failure}" for failure in document["failures"])):
        echo(line)


def _wall_timer(run: Callable[[], Any]) -> float:
    run()
    started_s = perf_counter()
    run()
    return perf_counter() - started_s
