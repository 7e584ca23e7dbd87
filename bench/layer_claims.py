"""What 2:4 sparsity, nano-batches and weights gathered by layer may gain: bounds by the cost model, one layer measured.

    python -m pdserve.bench.layer_claims [--gpu NAME] [--rounds N] [--json FILE]

**Sparsity** keeps the larger two of each four inputs (Mishra et al. 2021): 9 bits of 16 in bfloat16. Counted: bits, and
the error of products by weights that are normally distributed. Timed: the products of a layer's gate and up of
Llama-3.2-1B, and the same with half of the weights in the only sparse form that torch multiplies on CPUs, with an index
for each value (CSR).

**Nano-batches** (NanoFlow, Zhu et al. 2024) overlap what needs arithmetic, memory and links. The bound overlaps all of
a step at no cost, but that two halves of a batch read all weights twice. Timed: the layer's products for two halves,
one after the other, and for the whole.

**Gathered weights** (FSDP, SiDP): ranks hold a part of each layer, and gather a layer while they compute the one before
it. From some number of tokens of each rank on, computing takes as long. Timed: a copy of the layer.

All timings are process time of one thread, cases in turns, least of all rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pdserve.bench.quantised_products import fastest_s
from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import LLAMA_3_8B_CONFIG
from pdserve.contracts.precision import Precision
from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.selection import CPU_KERNELS
from pdserve.kernels.weight_quantisation import dequantise, quantise
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import Hardware, hardware

SHAPE = ModelShape.from_hf_config(LLAMA_3_8B_CONFIG)
PRECISION = Precision(dtype="bfloat16")
NUM_OUTPUTS, NUM_INPUTS = 16384, 2048
"""Gate and up of Llama-3.2-1B."""
NUM_ROWS = (1, 16, 64)
_FREE = 1e30
"""Bytes or operations per second of a resource that costs nothing."""


def pruned(weight_FE: torch.Tensor) -> torch.Tensor:
    """The weight with the smaller two of each four inputs set to 0."""
    fours = weight_FE.reshape(len(weight_FE), -1, 4)
    kept = torch.zeros_like(fours, dtype=torch.bool).scatter_(2, fours.abs().topk(2, dim=2).indices, True)
    return (fours * kept).reshape(weight_FE.shape)


def errors() -> dict[str, dict[str, float]]:
    """Bits of a weight, and the error of products relative to their size."""
    weight_FE = torch.randn(512, NUM_INPUTS, generator=torch.Generator().manual_seed(0))
    forms = {"2:4 in bfloat16": (9.0, pruned(weight_FE))}
    for kind, bits in (("int8", 8.0), ("int4", 4.125)):
        forms[kind] = bits, dequantise(quantise(weight_FE, kind))
    return {
        name: {"bits": bits, "error": round(float((form - weight_FE).norm() / weight_FE.norm()), 3)}
        for name, (bits, form) in forms.items()
    }


def layer_ms(num_rounds: int) -> dict[int, dict[str, float]]:
    """Milliseconds of the layer's products, by rows."""
    weight_FE = torch.randn(NUM_OUTPUTS, NUM_INPUTS) * 0.02
    dense = CPU_KERNELS.pack_linear(weight_FE.bfloat16(), dtype=torch.bfloat16)
    whole = CPU_KERNELS.pack_linear(weight_FE)
    sparse = pruned(weight_FE).to_sparse_csr()
    gathered, copy = weight_FE.bfloat16(), torch.empty_like(weight_FE, dtype=torch.bfloat16)
    found = {}
    for num_rows in NUM_ROWS:
        x_TE = torch.randn(num_rows, NUM_INPUTS)
        halves = x_TE.tensor_split(2)
        runs: dict[str, Callable[[], object]] = {
            "bfloat16": partial(dense, x_TE),
            "float32": partial(whole, x_TE),
            "2:4, float32": partial(torch.mm, sparse, x_TE.T.contiguous()),
            "copy": partial(copy.copy_, gathered),
        }
        if num_rows > 1:
            runs["two halves"] = lambda halves=halves: [dense(half) for half in halves]  # type: ignore[misc]
        times = fastest_s(runs, num_rounds)
        found[num_rows] = {name: round(1e3 * taken_s, 2) for name, taken_s in times.items()}
    return found


def overlap_bound(device: Hardware, tensor_parallel: int, batch: int, context: int, num_new: int = 0) -> float:
    """How many times as fast a step may be whose parts overlap, in two halves, at most; 1 if that gains nothing.

    Args:
        batch: sequences that decode, each with ``context`` cached tokens.
        num_new: prompt tokens of the step besides.
    """
    step = [(1, context)] * batch + [(num_new, 0)] * (num_new > 0)

    def seconds(**changes: Any) -> tuple[float, float]:
        """Of kernels, and of links."""
        parts = CostModel(SHAPE, replace(device, **changes), PRECISION, tensor_parallel).parts(step)
        return parts.layers_s + parts.output_s + parts.attention_s, parts.all_reduce_s

    kernels_s, links_s = seconds()
    computing_s, _ = seconds(memory_bandwidth=_FREE)
    reading_s, _ = seconds(peak_flops=dict.fromkeys(device.peak_flops, _FREE))
    read_again_s = SHAPE.matrix_parameters * 2 / tensor_parallel / device.bandwidth
    return max(1.0, (kernels_s + links_s) / max(computing_s, reading_s + read_again_s, links_s))


def gather_tokens(device: Hardware, num_ranks: int, bandwidth: float) -> float:
    """Tokens of a rank's step from which a layer takes as long as to gather the next; inf if never below a million.

    Args:
        bandwidth: bytes per second that a rank receives.
    """
    cost = CostModel(SHAPE, device, PRECISION)
    gather_s = SHAPE.matrix_parameters * 2 * (num_ranks - 1) / num_ranks / bandwidth
    num_tokens = 1
    while cost.parts([(num_tokens, 0)]).layers_s < gather_s:
        num_tokens = max(num_tokens + 1, int(num_tokens * 1.02))
        if num_tokens > 10**6:
            return inf
    return num_tokens


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--gpu", default="h100-sxm")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    use_threads(1)
    device = hardware(arguments.gpu)
    bounds = {
        f"TP{ranks}, {batch} x {context}" + f" + {num_new} new" * (num_new > 0): round(
            overlap_bound(device, ranks, batch, context, num_new), 2
        )
        for ranks in (1, 4)
        for num_new in (0, 2048)
        for batch in (16, 128)
        for context in (512, 4096)
    }
    efficiency = device.link_efficiency
    gather = {
        f"{ranks} ranks over {name}": gather_tokens(device, ranks, bandwidth * efficiency)
        for name, bandwidth in (("links", device.link_bandwidth), ("network", device.network_bandwidth))
        for ranks in (2, 8)
    }
    result: dict[str, dict[Any, Any]] = {
        "errors": errors(),
        "ms": layer_ms(arguments.rounds),
        "overlap": bounds,
        "gather tokens": gather,
    }
    for title, values in result.items():
        table = Table(title, "")
        for name, value in values.items():
            table.add_row(str(name), str(value))
        Console(stderr=True).print(table)
    publish({"gpu": device.name, **result}, arguments.json)


if __name__ == "__main__":
    main()
