"""Small random models that answer in worker processes and over HTTP, and prompts for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.model.weights.random_checkpoint import write_tokenizer
from tests.model.checkpoints import write_family
from tests.model.quantised_checkpoints import write_quantised


class Model(NamedTuple):
    served: Path
    plain: Path
    """The same in float32, for transformers."""


def write_model(folder: Path, family: str, form: str | None, **changes: Any) -> Model:
    """Write a model of a family, in one of the formats of others or in floats, and a tokenizer of 512 tokens."""
    # Gemma with its embeddings as its head would repeat the prompt's last token.
    changes = {"vocab_size": 512, "max_position_embeddings": 1024, "tie_word_embeddings": False, **changes}
    if form is None:
        served = plain = write_family(folder / "plain", family, **changes)
    else:
        served, plain = write_quantised(folder, family, form, **changes)
    write_tokenizer(served, 512)
    return Model(served, plain)


def make_prompts() -> list[list[int]]:
    """64 prompts, from one token to several chunks; three in four begin with one of two shared prefixes."""
    rng = random.Random(7)
    shared = [[rng.randrange(6, 512) for _ in range(length)] for length in (40, 300)]
    prompts = [[5], [9, 17]]
    while len(prompts) < 64:
        prefix = shared[len(prompts) % 2] if len(prompts) % 4 else []
        prompts.append(prefix + [rng.randrange(6, 512) for _ in range(rng.choice((1, 3, 15, 16, 17, 60, 200)))])
    return prompts
