from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdserve.model.weights import Checkpoint, shard_paths
from tests.model.checkpoints import write_checkpoint


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    with Checkpoint(folder, torch.float32) as checkpoint:
        checkpoint.check(shapes, ("inv_freq",))


def test_tensors_of_one_input_are_read_as_one(tmp_path: Path) -> None:
    given = {"gate": torch.randn(3, 4), "up": torch.randn(2, 4), "rotary.inv_freq": torch.randn(2)}
    with Checkpoint(stored(tmp_path, given), torch.float32) as checkpoint:
        checkpoint.check({"gate": (3, 4), "up": (2, 4)}, ("inv_freq",))
        both, one = checkpoint.read("gate", "up"), checkpoint.read("up")
    assert torch.equal(both, torch.cat((given["gate"], given["up"])))
    assert torch.equal(one, given["up"])


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    folder = stored(tmp_path, {"w": torch.ones(4)})
    with Checkpoint(folder, torch.float32) as checkpoint:
        held = checkpoint.read("w")
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-16, 2)
        opened.write(bytes(16))
    assert held.tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_to_the_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    given = {"w": torch.randn(4, 4)}
    with Checkpoint(stored(tmp_path, given), dtype) as checkpoint:
        assert torch.equal(checkpoint.read("w"), given["w"].to(dtype))


def test_every_mismatch_is_named_at_once(tmp_path: Path) -> None:
    given = {
        "good": torch.zeros(2),
        "extra": torch.zeros(1),
        "long": torch.zeros(3),
        "quantised": torch.zeros(2, dtype=torch.int8),
    }
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("good", "long", "absent", "quantised"), (2,))
    with pytest.raises(ValueError, match="do not match config") as error:
        load(stored(tmp_path, given), shapes)
    for problem in ("missing absent", "unexpected extra", "long has shape [3], not [2]", "quantised has dtype I8"):
        assert problem in str(error.value)
    assert "good" not in str(error.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, max_shard_size="100KB")
    lost = shard_paths(folder)[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"lacks {lost.name}"):
        load(folder, {})


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"metadata": {}}', '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"w": 1}}']
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json names no shards"):
        load(tmp_path, {})


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "sub/model.safetensors", ".", ""])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Only files that `model_hash` sees are read."""
    folder = tmp_path / "model"
    for place in (tmp_path, folder, folder / "sub"):
        place.mkdir(exist_ok=True)
        stored(place, {"w": torch.zeros(2)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match=r"index\.json names .* which is no \.safetensors file beside it"):
        load(folder, {"w": (2,)})


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = stored(tmp_path, {"w": torch.zeros(100)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read.*download it again"):
        load(folder, {"w": (100,)})


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin are pickles.*save_pretrained"):
        load(tmp_path, {})


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load(tmp_path, {})
