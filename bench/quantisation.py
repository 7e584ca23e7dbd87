"""Quality cost of quantisation: perplexity and top-1 agreement on real text.

    python -m pdserve.bench.quantisation [--checkpoint FOLDER] [--train-steps 400] [--json FILE]

No checkpoint is downloaded: a Llama of a few million weights trains for some minutes on nine tenths of the language
reference that comes with Python (`pydoc_data.topics`), and is evaluated on the rest. ``--checkpoint`` keeps the model,
or evaluates an existing one. Every configuration runs through the engine's executor, as prompts with log
probabilities: the KV is written to a real pool and read back, in chunks.

Agreement compares the most likely token with that of float32 weights and KV.
"""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pdserve.bench.script import publish, script_parser
from pdserve.contracts.placement import WorkerConfig, WorkerRole
from pdserve.contracts.step import Executor, StepBatch, StepRow, TokenLogprobs
from pdserve.engine.worker.backend import choose_backend
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.config.decoder_config import DecoderConfig

VOCAB_SIZE, WINDOW_TOKENS, CHUNK_TOKENS, BLOCK_SIZE, BATCH_WINDOWS = 1024, 256, 64, 16, 8
TRAIN_BATCH, LEARNING_RATE = 16, 2e-3

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "float32, int8 weights": {"dtype": "float32", "quantization": "int8"},
    "float32, int4 weights": {"dtype": "float32", "quantization": "int4"},
    "float32, int8 KV": {"dtype": "float32", "kv_dtype": "int8"},
    "float32, float8 KV": {"dtype": "float32", "kv_dtype": "float8_e4m3fn"},
    "bfloat16, int8 weights and KV": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
    "bfloat16, int4 weights, int8 KV": {"dtype": "bfloat16", "quantization": "int4", "kv_dtype": "int8"},
}


class Text(NamedTuple):
    """Parts of the language reference; no topic is in both."""

    train: str
    held_out: str


def language_reference() -> Text:
    """Every tenth topic, in order of name, is held out."""
    parts = [topics[name] for name in sorted(topics)]
    return Text("\n".join(part for index, part in enumerate(parts) if index % 10), "\n".join(parts[::10]))


def train(folder: Path, text: str, num_steps: int, console: Console) -> None:
    """Write a tokenizer and a trained Llama to ``folder``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=2 * WINDOW_TOKENS,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, num_steps, pct_start=0.05)
    for step in track(range(num_steps), "training", console=console):
        starts = torch.randint(len(tokens) - WINDOW_TOKENS, (TRAIN_BATCH,))
        batch = torch.stack([tokens[start : start + WINDOW_TOKENS] for start in starts.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            console.print(f"step {step}: loss {loss.item():.3f}")
    model.save_pretrained(folder)


class Judged(NamedTuple):
    """Predictions of one configuration for the held-out text, by position."""

    logprobs: np.ndarray
    """Log probabilities of the text's own tokens."""
    likeliest: np.ndarray
    """Token ids."""


def judge(folder: Path, windows: list[list[int]], name: str, settings: dict[str, Any], console: Console) -> Judged:
    """Log probabilities of every window's tokens but the first, by an executor as a worker builds it."""
    config = WorkerConfig(
        worker_id="judge",
        role=WorkerRole.MIXED,
        model_path=str(folder),
        block_size=BLOCK_SIZE,
        num_kv_blocks=BATCH_WINDOWS * WINDOW_TOKENS // BLOCK_SIZE,
        max_model_len=WINDOW_TOKENS,
        **settings,
    )
    backend = choose_backend(config)
    memory = PoolMemory.create(backend.layout)
    (executor,) = backend.build_executors(memory).executors
    judged: list[TokenLogprobs] = []
    for first in track(range(0, len(windows), BATCH_WINDOWS), name, console=console):
        judged += _judge_batch(executor, windows[first : first + BATCH_WINDOWS])
    executor.close()
    return Judged(np.array([entry.logprob for entry in judged]), np.array([entry.top[0][0] for entry in judged]))


def _judge_batch(executor: Executor, windows: list[list[int]]) -> Iterator[TokenLogprobs]:
    """Windows side by side: the entries of one chunk of all windows follow those of the chunk before."""
    num_blocks = WINDOW_TOKENS // BLOCK_SIZE
    for start in range(0, WINDOW_TOKENS, CHUNK_TOKENS):
        rows = [
            StepRow(
                sequence_id=index,
                tokens=window[start : start + CHUNK_TOKENS],
                cached_length=start,
                block_table=range(index * num_blocks, (index + 1) * num_blocks),
                sample=None,
                prompt_targets=window[start + 1 : start + CHUNK_TOKENS + 1],
                num_prompt_logprobs=1,
            )
            for index, window in enumerate(windows)
        ]
        output = executor.submit(StepBatch(step_id=start, rows=rows)).result()
        for index in range(len(rows)):
            yield from output.prompt_logprobs[index]


def compare(folder: Path, text: str, console: Console) -> list[dict[str, Any]]:
    """Perplexity and agreement of every configuration, the reference first."""
    tokens = PreTrainedTokenizerFast.from_pretrained(folder).encode(text)
    windows = [tokens[i : i + WINDOW_TOKENS] for i in range(0, len(tokens) - WINDOW_TOKENS + 1, WINDOW_TOKENS)]
    table = []
    reference: Judged | None = None
    for name, settings in CONFIGURATIONS.items():
        judged = judge(folder, windows, name, settings, console)
        reference = reference or judged
        table.append(
            {
                "configuration": name,
                "perplexity": round(math.exp(-judged.logprobs.mean()), 4),
                "top1_agreement": round(float((judged.likeliest == reference.likeliest).mean()), 5),
                "mean_logprob_difference": round(float(np.abs(judged.logprobs - reference.logprobs).mean()), 5),
                "tokens": len(judged.logprobs),
            }
        )
    return table


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="keep the trained checkpoint here, or judge the one there")
    parser.add_argument("--train-steps", type=int, default=400, help="some seconds for ten of them")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    text = language_reference()
    with tempfile.TemporaryDirectory() as work:
        folder: Path = arguments.checkpoint or Path(work) / "model"
        if not (folder / "config.json").exists():
            train(folder, text.train, arguments.train_steps, console)
        table = compare(folder, text.held_out, console)
        num_parameters = DecoderConfig.from_folder(folder).shape.num_parameters
    result = {
        "text": "pydoc_data.topics of Python " + platform.python_version() + ", every tenth topic",
        "model": {"parameters": num_parameters, "train_steps": arguments.train_steps},
        "configurations": table,
    }
    publish(result, arguments.json)


if __name__ == "__main__":
    main()
