"""Compiles the Triton kernels for a GPU that is not here: registers, spills, shared memory, instructions, copies ahead.

``pdserve bench kernels --compile-only`` compiles every launch of serving for sm_90, or for the GPU of ``--capability``,
and prints one line for each. The launchers run as in serving, on small tensors in host memory, except for the launch
itself, so that exactly the requested variants are compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pdserve.bench.kernels.attention import ATTENTION_KERNELS, AttentionShape, Row, attention_case
from pdserve.kernels.kv_pool import LARGEST_VALUES, KvPool, KvPoolShape, vector_bytes
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import DrawTensors, QkNorm, TopPTensors
from pdserve.kernels.triton import configs
from pdserve.kernels.triton.experts import TritonExperts, combine, sort_pairs
from pdserve.kernels.triton.gate import gate
from pdserve.kernels.triton.norm import rms_normalise
from pdserve.kernels.triton.quantized_matmul import PackedWeight, pack, quantized_matmul, stacked
from pdserve.kernels.triton.rope import rope_and_write_kv
from pdserve.kernels.triton.sampling import draw_tokens, find_top_p
from pdserve.kernels.weight_quantisation import GroupedWeight

HOPPER = 90
MAX_SHARED_BYTES = {
    capability: kib * 1024 for capability, kib in ((80, 163), (86, 99), (89, 99), (HOPPER, 227), (100, 227), (120, 99))
}
"""Limit of one program by compute capability: 80 is 8.0, of an A100; 120 is 12.0, of consumers' Blackwell."""
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_NUM_OUTPUTS, _NUM_INPUTS = 128, 4096
"""Of a quantised weight."""


class Launch(NamedTuple):
    """One launch that serving makes."""

    name: str
    run: Callable[[], object]
    """Draws its tensors, and launches."""
    is_wgmma: bool = False
    """Whether its products are large enough for Hopper's own instruction."""


class Compiled(NamedTuple):
    """Resources of a compiled kernel."""

    num_registers: int
    """Per thread."""
    spilled_bytes: int
    shared_bytes: int
    has_wgmma: bool
    num_ahead: int
    """Groups of asynchronous copies that the loop leaves in flight where it waits for one; 0 if it waits for all."""


class WeightForm(NamedTuple):
    """What makes other code of products with a quantised weight."""

    kind: str
    group_inputs: int
    has_zeros: bool = False

    @property
    def name(self) -> str:
        groups = "" if self.group_inputs == _NUM_INPUTS else f" in groups of {self.group_inputs}"
        return f"{self.kind}{groups}{' with zeros' * self.has_zeros}"


WEIGHT_FORMS = (
    WeightForm("int8", _NUM_INPUTS),
    WeightForm("int4", 128),
    WeightForm("int8", 32),
    WeightForm("int8", 128, has_zeros=True),
    WeightForm("int4", 32),
    WeightForm("int4", 64, has_zeros=True),
    WeightForm("int4", 128, has_zeros=True),
    WeightForm("int4", _NUM_INPUTS),
    WeightForm("e4m3", _NUM_INPUTS),
    WeightForm("e4m3", 128),
    WeightForm("e2m1", 32),
)
"""Those of ``model.quantization`` first, then those of published checkpoints."""


class _Target:
    """Stand-in for the driver of a GPU."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device, whatever it is

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(launch: Launch, capability: int = HOPPER) -> list[Compiled]:
    """Compile the kernels of a launch."""
    return [_measure(kernel) for kernel in compiled_kernels(launch, capability)]


def compiled_kernels(launch: Launch, capability: int = HOPPER) -> list[Any]:
    """Compile a launch to Triton's own objects; launches that need the same kernel share its object."""
    with _compiling(capability) as kernels:
        launch.run()
    return kernels


@contextmanager
def _compiling(capability: int) -> Iterator[list[Any]]:
    """Within it, launches only compile, and append to the list."""
    kernels = []
    run, active = JITFunction.run, driver._active

    def only_compile(self: Any, *args: Any, **options: Any) -> None:
        kernels.append(run(self, *args, **{**options, "warmup": True}))

    driver.set_active(_Target(capability))
    JITFunction.run = only_compile
    try:
        with patch.object(configs, "compute_capability", lambda device: capability):
            yield kernels
    finally:
        JITFunction.run = run
        driver._active = active


def _measure(kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    # The stack holds spilled registers only.
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[0]) for what in ("REG", "STACK"))
    waits = re.findall(r"async_wait .*num = (\d+)", kernel.asm["ttgir"])
    num_ahead = max(map(int, waits), default=0)
    return Compiled(registers, stack, kernel.metadata.shared, "wgmma" in kernel.asm["ptx"], num_ahead)


def launches(capability: int = HOPPER) -> list[Launch]:
    """Every kind of launch of every kernel: dtypes, head dims, and rules that make other code. GPUs before Ada have no
    float8 KV."""
    return [launch for launch in _all_launches() if capability >= 89 or "over float8" not in launch.name]


def _all_launches() -> list[Launch]:
    attentions: list[Callable[[str], Launch]] = [
        *(partial(attention_launch, dtype=_BF16, kv_dtype=_BF16, head_dim=dim) for dim in (64, 128, 256)),
        *(
            partial(attention_launch, dtype=_BF16, kv_dtype=kv_dtype, head_dim=dim)
            for kv_dtype in LARGEST_VALUES
            for dim in (64, 80, 128, 256)
        ),
        *(partial(attention_launch, dtype=_FP32, kv_dtype=_FP32, head_dim=dim) for dim in (64, 128, 256)),
        partial(attention_launch, dtype=_FP16, kv_dtype=_FP16, head_dim=128),
        partial(attention_launch, dtype=_BF16, kv_dtype=_BF16, head_dim=128, window=4096),
        *(
            partial(attention_launch, dtype=_BF16, kv_dtype=kv_dtype, head_dim=64, window=128, has_sinks=True)
            for kv_dtype in (_BF16, *LARGEST_VALUES)
        ),
        partial(attention_launch, dtype=_BF16, kv_dtype=_BF16, head_dim=64, has_sinks=True),
        *(
            partial(attention_launch, dtype=_BF16, kv_dtype=kv_dtype, head_dim=256, window=4096, softcap=50.0)
            for kv_dtype in (_BF16, *LARGEST_VALUES)
        ),
        *(partial(attention_launch, dtype=_FP16, kv_dtype=kv_dtype, head_dim=64) for kv_dtype in LARGEST_VALUES),
        *(partial(attention_launch, dtype=_FP32, kv_dtype=kv_dtype, head_dim=256) for kv_dtype in LARGEST_VALUES),
    ]
    decode = partial(attention_launch, "decode_attention", _BF16)
    return [
        *(make(kernel) for kernel in ATTENTION_KERNELS for make in attentions),
        decode(_BF16, 128, new_tokens=(1,) * 1000),
        *(decode(kv_dtype, dim, new_tokens=(8,) * 3) for kv_dtype in (_BF16, *LARGEST_VALUES) for dim in (128, 256)),
        *(_pointwise_launch(dtype) for dtype in (_BF16, _FP16, _FP32)),
        *(rope_launch(_BF16, pool_dtype, 128) for pool_dtype in (_BF16, *LARGEST_VALUES)),
        rope_launch(_FP16, _FP16, 64),
        rope_launch(_FP32, _FP32, 256),
        *(_sampling_launch(vocab_size) for vocab_size in (32_000, 128_256, 151_936)),
        *(
            product_launch(dtype, num_tokens, num_splits, form)
            for form in WEIGHT_FORMS[:2]
            for dtype, batches in (
                (_BF16, ((1, 1), (1, 4), (17, 4), (64, 1), (64, 4), (65, 1))),
                (_FP16, ((1, 4), (64, 1), (65, 1))),
                (_FP32, ((1, 1), (1, 4))),
            )
            for num_tokens, num_splits in batches
        ),
        *(product_launch(_BF16, 65, 1, form) for form in WEIGHT_FORMS[2:]),
        *(
            experts_launch(_BF16, num_tokens, form)
            for form in (None, WEIGHT_FORMS[1], WeightForm("e4m3", 128), WeightForm("e2m1", 32))
            for num_tokens in (1, 512)
        ),
        experts_launch(_FP32, 1),
    ]


def attention_launch(
    kernel: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    *,
    new_tokens: tuple[int, ...] = (3, 2),
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
) -> Launch:
    """Attention of four query heads for each of two KV heads."""
    shape = AttentionShape(
        kernel=kernel,
        rows=tuple(map(Row, new_tokens)),
        num_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=window,
        softcap=softcap,
        has_sinks=has_sinks,
    )
    words = f"{kernel} {dtype} over {kv_dtype} D{head_dim}".replace("torch.", "")
    words += f" {len(new_tokens)} rows of {new_tokens[0]}" * (len(new_tokens) > 2)
    words += " window" * bool(window) + " softcap" * bool(softcap) + " sinks" * has_sinks
    is_wgmma = dtype != _FP32 and kernel == "prefill_attention"
    return Launch(words, lambda: attention_case(shape).own(torch.device("cpu")).run(), is_wgmma=is_wgmma)


def _pointwise_launch(dtype: torch.dtype) -> Launch:
    """The norm and all gates, of 8192 features."""

    def run() -> None:
        x_TF = torch.zeros(2, 8192, dtype=dtype)
        rms_normalise(x_TF, x_TF[0], 1e-5)
        gate(x_TF, "silu")
        gate(x_TF, "gelu_tanh")
        gate(x_TF, "swiglu_oai")

    return Launch(f"rms_normalise and gates {dtype}".replace("torch.", ""), run)


def rope_launch(
    dtype: torch.dtype, pool_dtype: torch.dtype, head_dim: int, new_tokens: tuple[int, ...] = (3, 2)
) -> Launch:
    """The rotary write with norms."""
    metadata = _metadata(new_tokens)
    weight_D = torch.zeros(head_dim, dtype=dtype)
    angles_TC = torch.zeros(metadata.num_tokens, head_dim // 2)
    run = partial(
        rope_and_write_kv,
        torch.zeros(metadata.num_tokens, 12, head_dim, dtype=dtype),
        angles_TC,
        angles_TC,
        _pool(pool_dtype, head_dim),
        0,
        metadata,
        QkNorm(weight_D, weight_D, 1e-5),
    )
    return Launch(f"rope_and_write_kv {dtype} over {pool_dtype} D{head_dim}".replace("torch.", ""), run)


def product_launch(dtype: torch.dtype, num_tokens: int, num_splits: int, form: WeightForm) -> Launch:
    """A product with a quantised weight and a bias, added to a residual, and the sum of its splits."""
    y_TF = torch.zeros(num_tokens, _NUM_OUTPUTS, dtype=dtype)
    run = partial(
        quantized_matmul,
        torch.zeros(num_tokens, _NUM_INPUTS, dtype=dtype),
        _weight(form),
        y_TF[0],
        y_TF,
        num_splits=num_splits,
    )
    name = f"quantized_matmul {dtype} by {form.name} T{num_tokens} {num_splits} splits"
    return Launch(name.replace("torch.", ""), run, is_wgmma=dtype != _FP32)


def experts_launch(dtype: torch.dtype, num_tokens: int, form: WeightForm | None = None) -> Launch:
    """Pairs with two of four experts sorted, a product with their weights and biases, and its results summed."""

    def run() -> None:
        weight = pack(torch.zeros(_NUM_OUTPUTS, _NUM_INPUTS, dtype=dtype)) if form is None else _weight(form)
        experts = TritonExperts(stacked([weight] * 4), torch.zeros(4, _NUM_OUTPUTS, dtype=dtype))
        pairs = sort_pairs(torch.zeros(num_tokens, 2, dtype=torch.int64), range(4))
        y_PF = experts(torch.zeros(2 * num_tokens, _NUM_INPUTS, dtype=dtype), pairs.starts)
        combine(y_PF, pairs.places, torch.zeros(num_tokens, 2))

    name = f"experts {dtype} by {form.name if form else dtype} T{num_tokens}"
    return Launch(name.replace("torch.", ""), run, is_wgmma=dtype != _FP32)


@cache
def _weight(form: WeightForm) -> PackedWeight:
    dtype = torch.float8_e4m3fn if form.kind == "e4m3" else torch.int8
    values_FE = torch.zeros(_NUM_OUTPUTS, _NUM_INPUTS, dtype=dtype)
    scales_FG = torch.zeros(_NUM_OUTPUTS, _NUM_INPUTS // form.group_inputs)
    zeros_FG = scales_FG if form.has_zeros else None
    return pack(GroupedWeight(values_FE, scales_FG, form.kind, form.group_inputs, zeros_FG))


def _sampling_launch(vocab_size: int) -> Launch:
    """A draw and top-p."""

    def run() -> None:
        logits_BV = torch.zeros(1, vocab_size)
        one, half = torch.zeros(1, dtype=torch.int32), torch.full((1,), 0.5)
        draw_tokens(logits_BV, DrawTensors(one, one.long(), one, one, half, half, half, one))
        find_top_p(logits_BV, TopPTensors(one, half.double(), half, half, half))

    return Launch(f"sampling V{vocab_size}", run)


def _metadata(new_tokens: tuple[int, ...]) -> AttentionMetadata:
    num_rows = len(new_tokens)
    return AttentionMetadata.build(new_tokens, [0] * num_rows, [[0]] * num_rows, num_blocks=2, block_size=16)


def _pool(dtype: torch.dtype, head_dim: int) -> KvPool:
    shape = KvPoolShape(2, 2, 1, 2, 16, head_dim)
    return KvPool(torch.zeros(2 * 2 * 2 * 16 * vector_bytes(head_dim, dtype), dtype=torch.uint8), shape, dtype)


def fits(kernel: Compiled, capability: int = HOPPER) -> bool:
    """Whether it runs on such a GPU without spilling registers."""
    return kernel.spilled_bytes == 0 and kernel.shared_bytes <= MAX_SHARED_BYTES[capability]


def compile_all(
    some: Iterable[Launch], echo: Callable[[str], None], *, capability: int = HOPPER, as_json: bool = False
) -> int:
    """Compile launches, and print a line for each of their kernels, or one JSON document.

    Returns:
        The exit status: 1 if one of them does not fit.
    """
    if not as_json:
        echo(f"{'launch':60} registers  spilled  shared KiB  ahead  wgmma")
    rows = []
    for launch in some:
        for kernel in compile_launch(launch, capability):
            rows.append({"launch": launch.name, **kernel._asdict(), "fits": fits(kernel, capability)})
            if not as_json:
                sizes = f"{kernel.num_registers:9}  {kernel.spilled_bytes:7}  {kernel.shared_bytes / 1024:10.1f}"
                echo(f"{launch.name:60} {sizes}  {kernel.num_ahead:5}  {kernel.has_wgmma}")
    if as_json:
        echo(json.dumps({"target": f"sm_{capability}", "triton": triton.__version__, "kernels": rows}))
    return 0 if all(row["fits"] for row in rows) else 1
