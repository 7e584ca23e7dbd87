"""Hash of a checkpoint, by which workers know that their KV is of the same model.

A worker computes it once at its start from headers, the tensors with a row for each token, and samples of all others.
Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import xxhash

from pdserve.model.weights.files import StoredTensor, read_header, shard_paths

_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096
_READ_BYTES = 1 << 20


def model_hash(folder: Path, variant: str = "") -> str:
    """Identity of a checkpoint, 32 hex digits: KV made by one hash is never used under another.

    Hashes config.json, the header of each safetensors file that is loaded (names, dtypes, shapes), all of embeddings
    and output heads, because a fine-tune may differ in the rows of a few tokens only, and 16 times 4 KiB of every other
    tensor, from its beginning to its end. Copies of the same files on two hosts hash alike.

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
    for shard in shard_paths(folder):
        _hash_shard(shard, digest)
    return digest.hexdigest()


def _hash_shard(shard: Path, digest: blake2b) -> None:
    tensors = read_header(shard)
    with shard.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        digest.update(shard.name.encode() + b"\0" + header)
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
            content = xxhash.xxh3_128()
            for start, end in _hashed_parts(name, tensor):
                file.seek(start)
                while piece := file.read(min(end - start, _READ_BYTES)):
                    start += len(piece)
                    content.update(piece)
            digest.update(content.digest())


def _hashed_parts(name: str, tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    num_bytes = tensor.end - tensor.start
    if "embed" in name or "lm_head" in name or num_bytes <= _NUM_SAMPLES * _SAMPLE_BYTES:
        yield tensor.start, tensor.end
        return
    for index in range(_NUM_SAMPLES):
        start = tensor.start + (num_bytes - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1)
        yield start, start + _SAMPLE_BYTES
