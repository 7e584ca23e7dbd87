"""Hash of a checkpoint, by which workers know that their KV is of the same model.

A worker computes it once at its start from headers and a few bytes of every tensor. Never imports torch.
"""

from __future__ import annotations

from hashlib import blake2b
from operator import attrgetter
from pathlib import Path

from pdserve.model.weights.files import read_header

_SAMPLE_BYTES = 4096


def model_hash(folder: Path, variant: str = "") -> str:
    """Identity of a checkpoint, 32 hex digits: KV made by one hash is never used under another.

    Hashes config.json, every safetensors header (names, dtypes, shapes) and 4 KiB from the middle of every tensor, so
    that a checkpoint of many GB takes well under a second. Copies of the same files on two hosts hash alike.

    Args:
        variant: whatever else the KV depends on; hashed too.

    Raises:
        ValueError: config.json or safetensors are missing or damaged.
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
    tensors = read_header(shard)
    with shard.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        digest.update(shard.name.encode() + b"\0" + header)
        for tensor in sorted(tensors.values(), key=attrgetter("start", "end")):
            sample_bytes = min(tensor.end - tensor.start, _SAMPLE_BYTES)
            file.seek((tensor.start + tensor.end - sample_bytes) // 2)
            digest.update(file.read(sample_bytes))
