from __future__ import annotations

from pathlib import Path

import torch

from pdserve.bench.gpu_model.checkpoint import TINY, write_weights
from pdserve.bench.shapes import LLAMA_8B
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.files import check_weights, shard_paths
from pdserve.model.weights.stored import Checkpoint


def test_it_has_the_parameters_of_llama_3_1_8b() -> None:
    assert ModelShape.from_hf_config(LLAMA_8B).num_parameters == 8_030_261_248


def test_a_checkpoint_is_one_that_workers_accept(tiny: Path) -> None:
    config = DecoderConfig.from_folder(tiny)
    check_weights(tiny, config.shape)
    assert config.layers[0].rope.theta == 500000
    assert [path.name for path in shard_paths(tiny)] == [f"model-{place}.safetensors" for place in ("0", "1", "tables")]


def test_weights_keep_the_size_of_what_is_computed_with_them(tiny: Path, tmp_path: Path) -> None:
    again = write_weights(tmp_path, TINY, "float32", torch.device("cpu"))
    with Checkpoint(tiny, torch.float32) as checkpoint, Checkpoint(again, torch.float32) as same:
        gate = checkpoint.read("model.layers.1.mlp.gate_proj.weight")
        assert abs(gate.std().item() * 64**0.5 - 1) < 0.05
        assert torch.equal(gate, same.read("model.layers.1.mlp.gate_proj.weight"))
        assert not torch.equal(gate, checkpoint.read("model.layers.0.mlp.gate_proj.weight"))
        assert checkpoint.read("model.norm.weight").eq(1).all()
