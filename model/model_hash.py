"""The identity of a checkpoint, by which workers know that their KV is of the same model.

Asked for once by a worker as it starts. Reads headers and a few bytes of every tensor; never imports torch.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

_SAMPLE_BYTES = 4096


def model_hash(folder: Path, variant: str = "") -> str:
    """Identity of a checkpoint, 32 hex digits: KV made by one hash is never used under another.

    Hashes config.json, every safetensors header (names, dtypes, shapes) and 4 KiB from the middle of every tensor, so
    that a checkpoint of many GB takes well under a second. Copies of the same files on two hosts hash alike.

    Args:
        variant: what the KV depends on beside the files; hashed too.

    Raises:
        ValueError: the folder holds no config.json or no safetensors.
    """
    digest = blake2b(variant.encode(), digest_size=16, person=b"pdserve-model")
    try:
        digest.update((folder / "config.json").read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {folder}/config.json: {error.strerror}; name a folder with a model") from error
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ValueError(f"{folder} holds no .safetensors file; save the model with save_pretrained() there")
    for shard in shards:
        _hash_shard(shard, digest)
    return digest.hexdigest()


def _hash_shard(shard: Path, digest: blake2b) -> None:
    with shard.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, shard.stat().st_size))
        digest.update(shard.name.encode() + b"\0" + header)
        try:
            spans = _tensor_spans(header)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{shard} is not a safetensors file, or is cut short; download it again") from error
        for start, end in spans:
            sample_bytes = min(end - start, _SAMPLE_BYTES)
            file.seek(8 + size + (start + end - sample_bytes) // 2)
            digest.update(file.read(sample_bytes))


def _tensor_spans(header: bytes) -> list[tuple[int, int]]:
    """Where the tensors of a safetensors file lie behind its header, in order. Raises for a header of another form."""
    spans = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
    if not all(0 <= start <= end for start, end in spans):
        raise ValueError("a tensor that begins before the data or after its own end")
    return sorted((int(start), int(end)) for start, end in spans)
