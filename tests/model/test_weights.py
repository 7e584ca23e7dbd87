from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdserve.model.weights import load_weights, shard_paths
from tests.model.checkpoints import write_checkpoint


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, destinations: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    load_weights(folder, destinations, dtype=dtype, ignored_suffixes=("inv_freq",))


def test_tensors_land_in_their_part_of_a_fused_weight(tmp_path: Path) -> None:
    given = {"gate": torch.randn(3, 4), "up": torch.randn(2, 4), "rotary.inv_freq": torch.randn(2)}
    fused = torch.zeros(5, 4)
    load(stored(tmp_path, given), {"gate": fused[:3], "up": fused[3:]})
    assert torch.equal(fused, torch.cat((given["gate"], given["up"])))


def test_values_are_rounded_to_the_dtype_and_held_in_the_destinations(tmp_path: Path) -> None:
    given = {"w": torch.randn(4, 4)}
    held = torch.zeros(4, 4)
    load(stored(tmp_path, given), {"w": held}, torch.bfloat16)
    assert torch.equal(held, given["w"].bfloat16().float())


def test_every_mismatch_is_named_at_once(tmp_path: Path) -> None:
    given = {
        "good": torch.zeros(2),
        "extra": torch.zeros(1),
        "long": torch.zeros(3),
        "quantised": torch.zeros(2, dtype=torch.int8),
    }
    destinations = {name: torch.zeros(2) for name in ("good", "long", "absent", "quantised")}
    with pytest.raises(ValueError, match="do not match config") as error:
        load(stored(tmp_path, given), destinations)
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
        load(folder, {"w": torch.zeros(2)})


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = stored(tmp_path, {"w": torch.zeros(100)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read.*download it again"):
        load(folder, {"w": torch.zeros(100)})


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin are pickles.*save_pretrained"):
        load(tmp_path, {})


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load(tmp_path, {})
