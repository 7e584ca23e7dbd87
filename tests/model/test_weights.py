from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdserve.model.weights import Checkpoint


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_tensors_of_one_input_are_read_as_one(tmp_path: Path) -> None:
    given = {"gate": torch.randn(3, 4), "up": torch.randn(2, 4)}
    with Checkpoint(stored(tmp_path, given), torch.float32) as checkpoint:
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


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        Checkpoint(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read.*download it again"):
        Checkpoint(tmp_path, torch.float32)
