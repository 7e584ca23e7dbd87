"""What quantisation costs in quality: perplexity and top-1 agreement on real text, of a model trained on such text.

    python -m pdserve.bench.quantisation [--checkpoint FOLDER] [--json FILE]

No checkpoint is downloaded: a Llama of a few million weights is trained for some minutes on nine tenths of the language
reference that comes with Python (`pydoc_data.topics`), and judged on the rest. ``--checkpoint`` keeps it, or judges one
that is there already. Every configuration runs through the engine's executor, as prompts whose log probabilities are
asked for: the KV is written to a real pool and read back, in chunks.

Agreement is with the most likely token of float32 weights and KV.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE, WINDOW_TOKENS, CHUNK_TOKENS, BLOCK_SIZE = 1024, 256, 64, 16
TRAIN_STEPS, TRAIN_BATCH, LEARNING_RATE = 1200, 16, 1e-3


class Text(NamedTuple):
    """Parts of the language reference; no topic is in both."""

    train: str
    held_out: str


def language_reference() -> Text:
    """Every tenth topic, in order of name, is held out."""
    parts = [topics[name] for name in sorted(topics)]
    return Text("\n".join(part for index, part in enumerate(parts) if index % 10), "\n".join(parts[::10]))


def train(folder: Path, text: str, console: Console) -> None:
    """Write a tokenizer and a trained Llama to ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, TRAIN_STEPS, pct_start=0.05)
    for step in track(range(TRAIN_STEPS), "training", console=console):
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
