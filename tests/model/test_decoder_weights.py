from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from pdserve.kernels.operations import Linear
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from pdserve.model.config import DecoderConfig
from pdserve.model.decoder_weights import load_decoder_weights, weight_bytes
from tests.model.checkpoints import FAMILIES, write_checkpoint, write_family


def test_weights_of_another_shape_are_refused_as_a_whole(tmp_path: Path) -> None:
    wide = write_checkpoint(tmp_path / "wide")
    narrow = write_checkpoint(tmp_path / "narrow", intermediate_size=96)
    with pytest.raises(ValueError, match="do not match config") as error:
        load_decoder_weights(wide, DecoderConfig.from_folder(narrow), torch.float32, CPU_KERNELS)
    for problem in (
        "model.layers.0.mlp.gate_proj.weight has shape [112, 64], not [96, 64]",
        "model.layers.1.mlp.down_proj.weight has shape [64, 112], not [64, 96]",
    ):
        assert problem in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_bytes_are_those_that_are_held(tmp_path: Path, dtype: torch.dtype, family: str) -> None:
    folder = write_family(tmp_path, family)
    config = DecoderConfig.from_folder(folder)
    weights = load_decoder_weights(folder, config, dtype, CPU_KERNELS)
    held = {id(linear): linear.num_bytes for linear in (weights.embedding, weights.lm_head)}
    num_bytes = sum(held.values()) + sum(
        linear.num_bytes for layer in weights.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    norms = [weights.norm, *(norm for layer in weights.layers for norm in (layer.attention_norm, layer.mlp_norm))]
    num_bytes += sum(norm.nbytes for norm in norms)
    # Compiled kernels fill matrices up to whole panels; here, that is the vocabulary of 211.
    assert 0.97 * num_bytes <= weight_bytes(config.shape, dtype) <= 1.02 * num_bytes


def test_one_matrix_at_a_time_is_in_memory_beside_what_the_kernels_hold(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen2")
    taken: list[weakref.ref[torch.Tensor]] = []

    def pack(weight_FE: torch.Tensor, bias_F: torch.Tensor | None = None, quantization: str = "") -> Linear:
        assert all(weight() is None for weight in taken)
        taken.append(weakref.ref(weight_FE))
        return TORCH_KERNELS.pack_linear(weight_FE[:1].clone())

    kernels = TORCH_KERNELS._replace(pack_linear=pack)
    load_decoder_weights(folder, DecoderConfig.from_folder(folder), torch.float32, kernels)
    assert len(taken) == 2 + 4 * 2
