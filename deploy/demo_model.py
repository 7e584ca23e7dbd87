"""The model that is served when none is named: a small one of pdserve's own, whose answers can be checked.

It is part of the package and read where it lies; an installation may have dropped it.
"""

from __future__ import annotations

from pathlib import Path

from pdserve.contracts.errors import DeployError
from pdserve.model.demo_model import DEMO_MODEL

QUESTION = "What is 17 + 25?"
"""For the command that the banner shows: the demo model answers 42."""


def demo_model_folder() -> Path:
    """The folder of the demo model.

    Raises:
        DeployError: this installation has none.
    """
    if not (DEMO_MODEL / "config.json").is_file():
        raise DeployError(
            f"no model is named, and the demo model is not in {DEMO_MODEL}; name a model with --model FOLDER "
            "(config.json, safetensors, tokenizer) or as model.path in the deployment file"
        )
    return DEMO_MODEL
