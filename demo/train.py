"""Trains the demo model and its draft on the generated corpus, and writes both as standard checkpoints.

    scripts/train_demo_model [--folder FOLDER] [--model demo|draft|all] [--steps N]

Deterministic: the rows of a step depend only on the seed and the step's number, so an interrupted run continues from
its last save with the same result. The loss covers answers only.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear
from transformers import LlamaConfig, LlamaForCausalLM

from pdserve.demo import tokenizer as words
from pdserve.demo.corpus import PHASE_ENDS, conversation, system_message
from pdserve.demo.muon import Muon
from pdserve.model.weights.demo_model import DEMO_MODEL, DRAFT_MODEL

TOKENS_PER_STEP = 3072
NUM_SHARDS = 4
"""Shards of a step's rows, so that the sums do not depend on the number of threads."""
ROW_TOKENS, MOST_ROW_TOKENS = ((0.6, 64), (0.9, 128)), 384
"""Up to this part of the steps, conversations are cut after so many tokens: short ones teach the tasks fastest."""
SHORTEST_TURN_TOKENS = 10
WARMUP_STEPS = 100
FALL_SHARE = 0.6
LAST_SHARE = 0.2
MATRIX_LEARNING_RATE, VECTOR_LEARNING_RATE = 2.5e-3, 2e-3
WEIGHT_DECAY = 0.05
MAX_POSITIONS = 4096
"""The window of the checkpoint. Trained are conversations of up to the longest of the rows."""
SAVE_EVERY_S = 60.0
REPORT_STEPS = 50
IGNORED = -100
_INITIAL_STD = 0.02
_PERIODS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 7, 7 / 2, 7 / 3)
"""Periods of decimal places, and of the week."""
_STATE = "state.safetensors"


class Size(NamedTuple):
    """Shape and training of one of the models."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_steps: int
    num_last_steps: int
    """After those, at a learning rate that begins anew at `LAST_SHARE`."""


SIZES = {
    "demo": Size(DEMO_MODEL.name, 128, 384, 5, 4, 2, PHASE_ENDS[-1], 800),
    "draft": Size(DRAFT_MODEL.name, 64, 128, 2, 4, 2, 1800, 0),
}


class NumberedEmbedding(nn.Module):
    """The embedding table, in which the rows of numbers are linear in features of the numbers.

    What is learned of some numbers so holds for all. The features are the digits and, after "FoNE: precise single-token
    number embeddings via Fourier features" (T. Zhou et al., arXiv 2502.09741), the number's angle on circles of several
    periods, so that to add is to rotate. Only the rows themselves are written to the checkpoint.
    """

    features: Tensor

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        """The rows of the numbers 0, 1, 2, ... are the last ones of the table."""
        super().__init__()
        features = number_features()
        self.register_buffer("features", features)
        self.of_word = nn.Parameter(torch.randn(vocab_size - len(features), hidden_size) * _INITIAL_STD)
        self.of_feature = nn.Parameter(torch.randn(features.shape[1], hidden_size) * _INITIAL_STD)

    def table(self) -> Tensor:
        """[vocabulary, hidden]"""
        return torch.cat([self.of_word, self.features @ self.of_feature])


def number_features() -> Tensor:
    """[numbers, features]: digits, size, and the cosine and sine of each period."""
    numbers = torch.tensor(words.NUMBERS, dtype=torch.float64)
    places = range(len(str(words.NUMBERS[-1])))
    digits = [
        numbers.div(10**place, rounding_mode="floor").remainder(10) == digit for place in places for digit in range(10)
    ]
    angles = [2 * math.pi * numbers / period for period in _PERIODS]
    circles = [wave(angle) for angle in angles for wave in (torch.cos, torch.sin)]
    return torch.stack([*digits, numbers / 1000, *circles], dim=1).float()


class Rows(NamedTuple):
    """Training data of one step; both ``[rows, tokens]`` int64."""

    tokens: Tensor
    targets: Tensor
    """The next token where it is part of an answer, else `IGNORED`."""


def draw_rows(tokenizer: Tokenizer, step: int, num_rows: int, row_tokens: int) -> Rows:
    """The rows of a step, always the same."""
    drawn = random.Random(f"rows of step {step}")
    ids_of = tokenizer.get_vocab()
    pad, end, assistant = ids_of[words.PAD], ids_of[words.END], ids_of[words.ASSISTANT]
    texts = []
    for _ in range(num_rows):
        turns = conversation(drawn, row_tokens // SHORTEST_TURN_TOKENS, step)
        texts.append(words.render(turns, system_message(drawn)))
    rows, targets = [], []
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids = encoding.ids[: row_tokens + 1]
        ids += [pad] * (row_tokens + 1 - len(ids))
        target, is_answer = [], False
        for token, following in pairwise(ids):
            is_answer = token == assistant or (is_answer and token != end)
            target.append(following if is_answer else IGNORED)
        rows.append(ids[:-1])
        targets.append(target)
    return Rows(torch.tensor(rows), torch.tensor(targets))


class Gradients(NamedTuple):
    """Sums over one shard of a step's rows."""

    loss: float
    gradients: tuple[Tensor, ...]


class Training:
    """One model, its optimizers and how far they are."""

    def __init__(self, size: Size, tokenizer: Tokenizer, num_threads: int) -> None:
        torch.manual_seed(0)
        self.size = size
        self._tokenizer = tokenizer
        self.step = 0
        self.model = LlamaForCausalLM(_config(size, tokenizer))
        self.embedding = NumberedEmbedding(tokenizer.get_vocab_size(), size.hidden_size)
        # A thread a shard: matrices this small gain nothing from several threads each.
        self._pool = ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))
        inner = [p for name, p in self.model.named_parameters() if "embed_tokens" not in name]
        self.muon = Muon((p for p in inner if p.ndim == 2), weight_decay=WEIGHT_DECAY)
        vectors = [*(p for p in inner if p.ndim == 1), *self.embedding.parameters()]
        self._parameters = [*self.muon.matrices, *vectors]
        self.adam = torch.optim.AdamW(vectors, betas=(0.9, 0.98), weight_decay=0.0)

    def train_step(self) -> float:
        """Returns the mean loss of the answers' tokens."""
        part = self.step / self.size.num_steps
        row_tokens = next((length for end, length in ROW_TOKENS if part < end), MOST_ROW_TOKENS)
        rows = draw_rows(self._tokenizer, self.step, TOKENS_PER_STEP // row_tokens, row_tokens)
        shards = [Rows(*shard) for shard in zip(*(tensor.chunk(NUM_SHARDS) for tensor in rows), strict=True)]
        results = list(self._pool.map(self._gradients, shards))
        num_answer_tokens = int((rows.targets != IGNORED).sum())
        for parameter, *parts in zip(self._parameters, *(result.gradients for result in results), strict=True):
            parameter.grad = torch.stack(parts).sum(0) / num_answer_tokens
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self.muon.step(MATRIX_LEARNING_RATE * self._warmth())
        self.adam.param_groups[0]["lr"] = VECTOR_LEARNING_RATE * self._warmth()
        self.adam.step()
        self.step += 1
        return sum(result.loss for result in results) / num_answer_tokens

    def _gradients(self, rows: Rows) -> Gradients:
        table = self.embedding.table()
        hidden = self.model.model(inputs_embeds=embedding(rows.tokens, table), use_cache=False).last_hidden_state
        is_answer = rows.targets != IGNORED
        loss = cross_entropy(linear(hidden[is_answer], table), rows.targets[is_answer], reduction="sum")
        return Gradients(loss.item(), torch.autograd.grad(loss, self._parameters))

    def _warmth(self) -> float:
        """Part of the learning rate: a rise, a plateau, and a fall to nothing; then a second, lower fall."""
        num_steps, num_last_steps = self.size.num_steps, self.size.num_last_steps
        if self.step >= num_steps:
            return LAST_SHARE * (num_steps + num_last_steps - self.step) / num_last_steps
        rise = (self.step + 1) / WARMUP_STEPS
        fall = (num_steps - self.step) / (FALL_SHARE * num_steps)
        return min(rise, 1.0, fall)

    def write_checkpoint(self, folder: Path) -> None:
        """Write a checkpoint that a server reads: bf16 weights, tokenizer, chat template."""
        words.write_tokenizer(folder)
        with torch.no_grad():
            weights = {name: tensor.bfloat16() for name, tensor in self.model.state_dict().items()}
            weights["model.embed_tokens.weight"] = self.embedding.table().bfloat16()
        weights.pop("lm_head.weight", None)
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        config = self.model.config.to_diff_dict() | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def save(self, folder: Path) -> None:
        """Keep the state of the training in ``folder``, to be resumed."""
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / "state.draft"
        save_file({name: tensor.contiguous() for name, tensor in self._state().items()}, draft)
        draft.rename(folder / _STATE)

    @torch.no_grad()
    def resume(self, folder: Path) -> None:
        """Take up the state that `save` kept in ``folder``, if there is one."""
        if (folder / _STATE).exists():
            kept = load_file(folder / _STATE)
            for name, tensor in self._state().items():
                tensor.copy_(kept[name])
            self.step = int(kept["adam/0/step"])

    def _state(self) -> dict[str, Tensor]:
        """Every tensor that a step changes."""
        state = {f"model/{name}": p for name, p in self.model.named_parameters() if "embed_tokens" not in name}
        state |= {f"embedding/{name}": p for name, p in self.embedding.named_parameters()}
        state |= {f"muon/{index}": momentum for index, momentum in enumerate(self.muon.momenta)}
        for index, parameter in enumerate(self.adam.param_groups[0]["params"]):
            moments = self.adam.state[parameter]
            for key in ("step", "exp_avg", "exp_avg_sq"):
                fresh = torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
                state[f"adam/{index}/{key}"] = moments.setdefault(key, fresh)
        return state


def _config(size: Size, tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(words.BOS),
        eos_token_id=tokenizer.token_to_id(words.END),
        pad_token_id=tokenizer.token_to_id(words.PAD),
    )


def train(size: Size, folder: Path, state_folder: Path, *, num_threads: int, console: Console) -> None:
    """Train a model of ``size`` and write its checkpoint to ``folder``; resumes what ``state_folder`` holds."""
    tokenizer = words.write_tokenizer(state_folder)
    training = Training(size, tokenizer, num_threads)
    num_steps = size.num_steps + size.num_last_steps
    training.resume(state_folder)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    saved_s = time.monotonic()
    losses: list[float] = []
    with Progress(*columns, console=console) as progress:
        shown = progress.add_task(size.name, total=num_steps, completed=training.step)
        while training.step < num_steps:
            losses.append(training.train_step())
            progress.update(shown, completed=training.step)
            if training.step % REPORT_STEPS == 0 or training.step == num_steps:
                console.print(f"{size.name}: step {training.step} of {num_steps}, loss {sum(losses) / len(losses):.4f}")
                losses.clear()
            if time.monotonic() - saved_s > SAVE_EVERY_S or training.step == num_steps:
                training.save(state_folder)
                saved_s = time.monotonic()
    training.write_checkpoint(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEMO_MODEL.parent, help="write the checkpoints here")
    parser.add_argument("--state", type=Path, default=Path("build/demo"), help="keep what a resumed run needs here")
    parser.add_argument("--model", choices=(*SIZES, "all"), default="all", help="which to train")
    parser.add_argument("--steps", type=int, help="fewer, to try something out")
    parser.add_argument("--threads", type=int, default=NUM_SHARDS, help="of the four that can be used")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    for name in SIZES if arguments.model == "all" else (arguments.model,):
        size = SIZES[name]
        if arguments.steps:
            size = size._replace(num_steps=arguments.steps, num_last_steps=0)
        train(
            size,
            arguments.folder / size.name,
            arguments.state / size.name,
            num_threads=arguments.threads,
            console=console,
        )


if __name__ == "__main__":
    main()
