"""The identity of a checkpoint, by which workers know that their KV is of the same model.

Asked for once by a worker as it starts. Reads headers and a few bytes of every tensor; never imports torch.
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
        variant: what the KV depends on beside the files; hashed too.

    Raises:
        ValueError: the folder holds no config.json or no safetensors, or one that is damaged.
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
    header = read_header(shard)
    digest.update(shard.name.encode() + b"\0" + header.text)
    with shard.open("rb") as file:
        for tensor in sorted(header.tensors.values(), key=attrgetter("start", "end")):
            sample_bytes = min(tensor.end - tensor.start, _SAMPLE_BYTES)
            file.seek((tensor.start + tensor.end - sample_bytes) // 2)
            digest.update(file.read(sample_bytes))
