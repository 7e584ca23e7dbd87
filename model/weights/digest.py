"""Whether two model folders hold the same model. Imports neither torch nor numpy."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from pdserve.model.weights.files import shard_paths

_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096


def model_digest(folder: Path) -> str:
    """Digest of config.json, tokenizer.json and the weights that are loaded, of which it reads samples. Copies of a
    model are equal; two fine-tunes of one are not. Empty if one cannot be read.
    """
    digest, paths = hashlib.sha256(), [folder / "config.json", *folder.glob("tokenizer.json")]
    with suppress(ValueError):  # no weights: to emulate, config.json is enough
        paths += shard_paths(folder)
    try:
        for path in paths:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            step = max(1, size // _NUM_SAMPLES) if path.suffix == ".safetensors" else _SAMPLE_BYTES
            with path.open("rb") as file:
                for start in range(0, size, max(step, _SAMPLE_BYTES)):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError:
        return ""
    return digest.hexdigest()
