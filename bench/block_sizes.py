"""KV blocks of 1, 16 and 64 tokens: memory wasted, prefixes found, and what a decode step pays on the CPU.

    python -m pdserve.bench.block_sizes [--data FOLDER] [--commits N] [--rounds N] [--json FILE]

SGLang and LightLLM keep KV by the token, vLLM in blocks of 16. Counted: the unused end of each sequence's last block,
by the lengths of the ``chat`` preset and of the traces in ``--data``; and the prompt tokens that an earlier prompt
begins with, in whole blocks, in a coder's sessions over the newest commits (`pdserve.bench.reused_modules`), where four
bytes are a token. Timed, on one thread in process time, sizes in turns, least of all rounds: attention of a decode
step, the batch's block tables, and the hashes of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from pdserve.bench.policies import MOONCAKE
from pdserve.bench.quantised_products import fastest_s
from pdserve.bench.reused_modules import blocks, commits, reuse
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.block_hash import block_hashes
from pdserve.kernels.cpu.attention import paged_attention
from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.kv_pool import KvPool, vector_bytes
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import AttentionRule
from pdserve.planner.arrays import IntArray
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.trace_reading import read_trace

SIZES = (1, 16, 64)
TOKEN_BYTES = 4
TRACES = ("AzureLLMInferenceTrace_conv.csv", MOONCAKE)
NUM_ROWS, CONTEXT, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 1024, 32, 8, 128
"""Of the decode step: one layer of Llama-3-8B."""


def wasted(num_tokens: IntArray, size: int) -> float:
    """Share of the held tokens' room that the ends of last blocks leave unused."""
    room = -(-num_tokens // size) * size
    return 1 - float(num_tokens.sum() / room.sum())


def found_at_head(prompts: Sequence[bytes], size: int) -> float:
    """Share of all tokens in whole blocks that an earlier prompt begins with."""
    step = size * TOKEN_BYTES
    found = reuse([blocks(text[: len(text) // step * step], step)] for text in prompts)
    return found.at_head * found.blocks * size / sum(len(text) // TOKEN_BYTES for text in prompts)


def sessions(number: int) -> list[bytes]:
    """All prompts of sessions that read one file more with each turn."""
    changes = commits(Path(__file__).parent, number)
    texts = [list(files.values()) for files in changes]
    return [b"".join(each[: turn + 1]) for each in texts for turn in range(len(each))]


def microseconds(num_rounds: int) -> dict[str, dict[int, float]]:
    """Times of the parts of a decode step of one layer, and of a prompt's hashes, by size."""
    q_TND = torch.randn(NUM_ROWS, NUM_HEADS, HEAD_DIM)
    tokens = list(range(CONTEXT))
    parts: dict[str, dict[str, Callable[[], object]]] = {"attention": {}, "block tables": {}, "hashes": {}}
    for size in SIZES:
        num_blocks = NUM_ROWS * (CONTEXT // size + 1)
        shape = (num_blocks, NUM_KV_HEADS, 1, 2, size, HEAD_DIM)
        num_bytes = num_blocks * NUM_KV_HEADS * 2 * size * vector_bytes(HEAD_DIM, torch.bfloat16)
        pool = KvPool(torch.zeros(num_bytes, dtype=torch.uint8), shape, torch.bfloat16)
        order = np.random.default_rng(0).permutation(num_blocks)  # as after hours of serving
        blocks = [each.tolist() for each in np.array_split(order, NUM_ROWS)]
        build = partial(
            AttentionMetadata.build,
            [1] * NUM_ROWS,
            [CONTEXT - 1] * NUM_ROWS,
            blocks,
            num_blocks=num_blocks,
            block_size=size,
        )
        rule = AttentionRule(scale=HEAD_DIM**-0.5)
        parts["attention"][str(size)] = partial(paged_attention, q_TND, pool, 0, build(), rule)
        parts["block tables"][str(size)] = build
        parts["hashes"][str(size)] = partial(block_hashes, tokens, size)
    return {
        name: {int(size): round(1e6 * taken_s, 1) for size, taken_s in fastest_s(runs, num_rounds).items()}
        for name, runs in parts.items()
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with traces")
    parser.add_argument("--commits", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    use_threads(1)
    chat = preset("chat").contents.draw(10_000, 0)
    lengths = {"chat": np.array([each.num_prompt_tokens + each.num_output_tokens for each in chat])}
    for name in TRACES if arguments.data else ():
        trace = read_trace(arguments.data / name)
        lengths[trace.name] = trace.num_prompt_tokens + trace.num_output_tokens
    prompts = sessions(arguments.commits)
    rows: dict[str, dict[int, Any]] = {
        f"wasted, {name}": {size: round(wasted(each, size), 5) for size in SIZES} for name, each in lengths.items()
    }
    rows["found at the head, sessions"] = {size: round(found_at_head(prompts, size), 5) for size in SIZES}
    rows |= {f"{name}, us": each for name, each in microseconds(arguments.rounds).items()}
    table = Table("tokens of a block", *map(str, SIZES))
    for name, each in rows.items():
        table.add_row(name, *(str(each[size]) for size in SIZES))
    Console(stderr=True).print(table)
    publish({"rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
