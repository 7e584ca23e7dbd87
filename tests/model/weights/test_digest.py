"""Copies of a model are equal, and other models are not."""

from __future__ import annotations

from pathlib import Path

from pdserve.model.weights.digest import model_digest


def test_a_digest_tells_fine_tunes_of_one_model_apart(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10_000_000))
    (tmp_path / "config.json").write_text("{}")
    zeros = model_digest(tmp_path)
    (tmp_path / "notes.log").write_text("not part of the model")
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same weights in another form")
    (tmp_path / "chat_template.jinja").write_text("read by routers")
    (tmp_path / "gone.json").symlink_to("nowhere")
    assert model_digest(tmp_path) == zeros
    weights.write_bytes(b"\1" * 10_000_000)
    ones = model_digest(tmp_path)
    (tmp_path / "config.json").write_text("{} ")
    assert len({"", zeros, ones, model_digest(tmp_path)}) == 4
    assert model_digest(tmp_path / "absent") == ""
