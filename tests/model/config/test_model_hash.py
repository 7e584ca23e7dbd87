from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

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
        changed = content.copy()
        changed[8 + header_bytes + (start + end) // 2] ^= 1
        file.write_bytes(changed)
        assert model_hash(folder) != first


def test_model_hash_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        model_hash(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no \.safetensors"):
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
