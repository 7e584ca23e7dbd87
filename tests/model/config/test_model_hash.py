from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdserve.model.config.model_hash import model_hash
from tests.model.checkpoints import write_checkpoint


def test_model_hash_is_of_the_content(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "first", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    first = model_hash(folder)
    assert model_hash(folder, "a longer context") != first
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert model_hash(copy) == first
    (copy / "README.md").write_text("not part of the model")
    (copy / "consolidated.safetensors").write_bytes(b"not read")
    assert model_hash(copy) == first

    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert model_hash(copy) != first


def test_model_hash_sees_every_tensor(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    first = model_hash(folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    spans = [
        entry["data_offsets"] for name, entry in json.loads(content[8 : 8 + header_bytes]).items() if name[0] != "_"
    ]
    for start, end in spans:
        for place in (start, (start + end) // 2, end - 1):
            changed = content.copy()
            changed[8 + header_bytes + place] ^= 1
            file.write_bytes(changed)
            assert model_hash(folder) != first


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_model_hash_sees_the_row_of_one_token_and_the_ends_of_a_large_tensor(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    weights = torch.zeros(4096, 256)
    save_file({name: weights}, file)
    hashes = {model_hash(tmp_path)}
    rows = (0, 4095) if "proj" in name else (0, 1, 777, 2049, 4095)
    for row in rows:
        changed = weights.clone()
        changed[row, -1 if row else 0] = 1.0
        save_file({name: changed}, file)
        hashes.add(model_hash(tmp_path))
    assert len(hashes) == 1 + len(rows)


def test_model_hash_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        model_hash(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        model_hash(tmp_path)
    for content in (b"", b"\xff" * 100, (20).to_bytes(8, "little") + b'{"w": '):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="not a safetensors file"):
            model_hash(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"w": 1}',
        '{"w": {"dtype": "F32"}}',
        '{"w": {"data_offsets": [1]}}',
        '{"w": {"data_offsets": ["0", "4"]}}',
        '{"w": {"data_offsets": [-9999, 0]}}',
    ],
)
def test_model_hash_refuses_a_header_that_describes_no_tensors(tmp_path: Path, header: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ValueError, match="not a safetensors file"):
        model_hash(tmp_path)
