"""The dtype of a checkpoint, for which ``model.dtype: auto`` stands. Never imports torch."""

from __future__ import annotations

import json
from pathlib import Path

from pdserve.contracts.errors import ConfigError
from pdserve.contracts.precision import DTYPES


def checkpoint_dtype(path: Path) -> str:
    """Dtype that the configuration of the checkpoint at ``path``, a folder or its config.json, names. float32 if it
    names none, or cannot be read, which others report.

    Raises:
        ConfigError: it names a dtype that is not served.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
        parts = (config, config.get("text_config") or {})
        found = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    except (OSError, ValueError, AttributeError, RecursionError):
        found = []
    dtype = next((str(name).removeprefix("torch.") for name in found if name), "float32")
    if dtype not in DTYPES:
        raise ConfigError(f"{file}: dtype {dtype!r} is not served; set model.dtype to one of {', '.join(DTYPES)}")
    return dtype
