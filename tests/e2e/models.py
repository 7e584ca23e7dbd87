"""Small random models that answer over HTTP."""

from __future__ import annotations

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
