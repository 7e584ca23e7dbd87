"""How long steps of a whole model take on a GPU, beside what reading its weights and KV, or its products, would take.

``python -m pdserve.bench.whole_model`` computes random weights in the shape of Llama-3.1-8B with the executor that a
worker has. A decode step is timed two deep, from result to result, as the step loop sees it; a prompt alone. What the
device can do is measured beside it, with a large copy and a large product of torch.

Needs torch and Triton only. No GPU has run it yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from pdserve.bench.kernels.run import NoGpuError, commit, cuda_device, measured_limits
from pdserve.bench.kernels.timing import CudaTimer
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import Executor, StepBatch, StepHandle, StepOutput, StepRow
from pdserve.kernels.kv_pool import KvPool
from pdserve.model.config import DecoderConfig, parse_config
from pdserve.model.executor_choice import build_executor
from pdserve.model.profiling import write_random_weights
from pdserve.model.weight_bytes import weight_bytes

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
"""config.json of meta-llama/Llama-3.1-8B, as far as a decoder depends on it."""
DTYPE = "bfloat16"
BLOCK_SIZE = 16
_WARM_STEPS = 5
_NUM_STEPS = 50
_NUM_PROMPTS = 5
_SPARE_BYTES = 8 << 30
"""Of the device's memory, beside weights and KV."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One kind of step."""

    name: str
    step_s: float
    """From result to result, or from submission to result of a prompt."""
    device_s: float
    """Of it, what the device says."""
    limit_s: float
    """What reading, or multiplying, would take."""

    @property
    def share(self) -> float:
        """Of the limit that is reached."""
        return self.limit_s / self.step_s


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured, and what the device can do."""

    config: DecoderConfig
    layout: KvLayout
    quantization: str
    bytes_per_s: float
    flop_per_s: float

    def decode_limit_s(self, num_rows: int, context: int) -> float:
        """Reading every weight but the embedding table, and all KV, once."""
        held = weight_bytes(self.config.shape, DTYPE, self.quantization)
        kv_bytes = num_rows * context * self.layout.block_bytes // self.layout.block_size
        return (held.layers + held.table + kv_bytes) / self.bytes_per_s

    def prefill_limit_s(self, num_tokens: int) -> float:
        """The products of the layers, and half of the square that attention is."""
        shape = self.config.shape
        products = 2 * shape.num_layers * shape.layer_parameters * num_tokens
        attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
        return (products + attention) / self.flop_per_s


def time_decoding(
    executor: Executor, model: Model, num_rows: int, context: int, sample: SamplingParams, num_steps: int = _NUM_STEPS
) -> Timed:
    """Steps of ``num_rows`` rows, which have about ``context`` tokens each."""
    first = context - num_steps // 2
    outputs: list[StepOutput] = []
    ended_s: list[float] = []
    in_flight: deque[StepHandle] = deque()
    for step in range(_WARM_STEPS + num_steps):
        rows = [_row(row, first + step, [] if step else [1], _blocks(first + _WARM_STEPS + num_steps), sample)
                for row in range(num_rows)]  # fmt: skip
        in_flight.append(executor.submit(StepBatch(step_id=step, rows=rows)))
        if len(in_flight) >= executor.pipeline_depth:
            outputs.append(in_flight.popleft().result())
            ended_s.append(perf_counter())
    while in_flight:
        in_flight.popleft().result()
    step_s = (ended_s[-1] - ended_s[_WARM_STEPS - 1]) / (len(ended_s) - _WARM_STEPS)
    name = f"decode {num_rows} x {context}{', drawn' if sample.temperature else ''}"
    device_s = median(output.duration_s for output in outputs[_WARM_STEPS:])
    return Timed(name, step_s, device_s, model.decode_limit_s(num_rows, context))


def time_prefill(executor: Executor, model: Model, num_tokens: int) -> Timed:
    """Prompts of ``num_tokens`` in one chunk, one after the other."""
    seconds, durations = [], []
    for prompt in range(_NUM_PROMPTS):
        row = _row(0, 0, [1] * num_tokens, _blocks(num_tokens), SamplingParams(temperature=0))
        started_s = perf_counter()
        durations.append(executor.submit(StepBatch(step_id=prompt, rows=[row])).result().duration_s)
        seconds.append(perf_counter() - started_s)
    return Timed(f"prefill {num_tokens}", median(seconds), median(durations), model.prefill_limit_s(num_tokens))


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def _row(index: int, cached: int, tokens: list[int], num_blocks: int, sample: SamplingParams) -> StepRow:
    """Of a sequence with blocks of its own; its token is the one that its row of the step before sampled, if none is
    given."""
    return StepRow(
        sequence_id=index,
        tokens=tokens,
        previous_row=-1 if tokens else index,
        cached_length=cached,
        block_table=range(index * num_blocks, (index + 1) * num_blocks),
        sample=sample,
        sample_position=cached + max(1, len(tokens)),
    )


def fitting(batches: Sequence[int], context: int, layout: KvLayout) -> list[int]:
    """Batches whose KV the pool holds."""
    per_row = _blocks(context + _WARM_STEPS + _NUM_STEPS)
    return [num_rows for num_rows in batches if num_rows * per_row <= layout.num_blocks]


def time_all(
    executor: Executor, model: Model, batches: Sequence[int], context: int, prompts: Sequence[int]
) -> list[Timed]:
    """Greedy and drawn decode steps, and prompts."""
    samples = SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.95)
    decoded = [
        time_decoding(executor, model, num_rows, context, sample)
        for num_rows in fitting(batches, context, model.layout)
        for sample in samples
    ]
    return [*decoded, *(time_prefill(executor, model, num_tokens) for num_tokens in prompts)]


def show(timed: Sequence[Timed], echo: Callable[[str], None]) -> None:
    echo(f"{'step':24} {'ms':>9} {'device ms':>10} {'limit ms':>9} {'share':>6}")
    for entry in timed:
        milliseconds = f"{entry.step_s * 1e3:9.3f} {entry.device_s * 1e3:10.3f} {entry.limit_s * 1e3:9.3f}"
        echo(f"{entry.name:24} {milliseconds} {entry.share:6.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--folder", type=Path, default=Path(), help="where the dated file of results goes")
    arguments = parser.parse_args()
    try:
        device = cuda_device()
    except NoGpuError:
        sys.stderr.write("no GPU here: torch.cuda.is_available() is false; run this on a machine with one\n")
        return 1
    config = parse_config(LLAMA_3_1_8B, {})
    measured = measured_limits(device, CudaTimer(device))
    held = weight_bytes(config.shape, DTYPE, arguments.quantization).total
    block_bytes = config.kv_layout(1, BLOCK_SIZE, DTYPE, "random").block_bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    wanted = max(
        max(arguments.batches) * _blocks(arguments.context + _WARM_STEPS + _NUM_STEPS), *map(_blocks, arguments.prompts)
    )
    layout = config.kv_layout(
        min(wanted, (free_bytes - held - _SPARE_BYTES) // block_bytes), BLOCK_SIZE, DTYPE, "random"
    )
    model = Model(
        config,
        layout,
        arguments.quantization,
        measured["torch_copy_gbytes_per_s"] * 1e9,
        measured["torch_matmul_tflops"] * 1e12,
    )
    memory = torch.zeros(layout.pool_bytes, dtype=torch.uint8, device=device)
    with tempfile.TemporaryDirectory(prefix="pdserve-whole-model-") as scratch:
        write_random_weights(Path(scratch) / "model.safetensors", config, DTYPE)
        executor = build_executor(
            folder=Path(scratch),
            config=config,
            layout=layout,
            pool=KvPool(memory, layout.shape, getattr(torch, DTYPE)),
            dtype=DTYPE,
            quantization=arguments.quantization,
            max_captured_rows=max(arguments.batches),
        )
    timed = time_all(executor, model, arguments.batches, arguments.context, arguments.prompts)
    show(timed, print)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    machine = {"measured": now, "device": torch.cuda.get_device_name(device), "commit": commit(), **measured}
    results = [asdict(entry) | {"share": entry.share} for entry in timed]
    report = {"machine": machine, "quantization": arguments.quantization, "steps": results}
    (arguments.folder / f"{now[:10]}_whole_model.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
