"""Matrices as publishers store them: words written by hand from the pages of each format, and shares of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdserve.kernels.weight_quantisation import dequantise
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.quantisation import Scheme
from pdserve.model.weights.files import layer_matrices
from pdserve.model.weights.stored import Checkpoint, read_matrix, read_stacked
from tests.model.quantised_checkpoints import FORMS, GROUP, write_quantised

UP, UP_WORD = range(8), 0x76543210
"""Eight values in four bits that count up from the low bits."""


def words(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def read(folder: Path, tensors: dict[str, torch.Tensor], scheme: Scheme, shape: tuple[int, int]) -> torch.Tensor:
    save_file({f"m.{name}": tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with Checkpoint(folder, torch.float32) as checkpoint:
        return dequantise(read_matrix(checkpoint, "m", scheme, range(shape[0]), range(shape[1])))


@pytest.mark.parametrize(("zeros_less_one", "zero_of_output_0"), [(True, 1), (False, 0)])
def test_gptq_packs_inputs_of_weights_and_outputs_of_zero_points(
    tmp_path: Path, zeros_less_one: bool, zero_of_output_0: int
) -> None:
    tensors = {
        "qweight": words([UP_WORD] * 8, [UP_WORD] * 8),
        "qzeros": words([UP_WORD]),
        "scales": torch.full((1, 8), 0.5).half(),
    }
    scheme = Scheme(kind="int4", layout="gptq", group_inputs=16, has_zeros=True, zeros_less_one=zeros_less_one)
    expected_FE = torch.tensor([[(i % 8 - zero_of_output_0 - output) / 2 for i in range(16)] for output in range(8)])
    assert torch.equal(read(tmp_path, tensors, scheme, (8, 16)), expected_FE)


def test_gptq_of_version_1_borrows_from_the_next_zero_point(tmp_path: Path) -> None:
    """It subtracts from whole words: of zero points 0 and 8 it stores 15 and 6."""
    tensors = {
        "qweight": words([0] * 8, [0] * 8),
        "qzeros": words([0x80 - 0x11111111]),
        "scales": torch.ones(1, 8),
    }
    scheme = Scheme(kind="int4", layout="gptq", group_inputs=16, has_zeros=True, zeros_less_one=True)
    assert (-read(tmp_path, tensors, scheme, (8, 16))[:, 0]).tolist() == [0, 8, 0, 0, 0, 0, 0, 0]


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    scales = torch.ones(1, 8)
    scales[0, 3] = torch.nan
    tensors = {"qweight": words([UP_WORD] * 8), "qzeros": words([0x77777777]), "scales": scales}
    scheme = Scheme(kind="int4", layout="gptq", group_inputs=8, zeros_less_one=True)
    with pytest.raises(ValueError, match=r"m\.scales has a value that is not finite; download the checkpoint again"):
        read(tmp_path, tensors, scheme, (8, 8))


def test_symmetric_gptq_has_zero_points_in_the_middle(tmp_path: Path) -> None:
    tensors = {"qweight": words([UP_WORD] * 8), "qzeros": words([0x77777777]), "scales": torch.ones(1, 8)}
    scheme = Scheme(kind="int4", layout="gptq", zeros_less_one=True)
    assert torch.equal(read(tmp_path, tensors, scheme, (8, 8))[3], torch.arange(8.0) - 8)


def test_awq_packs_outputs_with_the_even_ones_first(tmp_path: Path) -> None:
    word = 0x75316420
    tensors = {"qweight": words(*[[word]] * 16), "qzeros": words([0]), "scales": torch.ones(1, 8)}
    scheme = Scheme(kind="int4", layout="awq", group_inputs=16, has_zeros=True)
    assert torch.equal(read(tmp_path, tensors, scheme, (8, 16)), torch.arange(8.0)[:, None].expand(8, 16))


def test_pack_quantized_counts_from_the_middle(tmp_path: Path) -> None:
    tensors = {"weight_packed": words([UP_WORD, 0x3]), "weight_scale": torch.full((1, 1), 2.0)}
    scheme = Scheme(kind="int4", layout="packed")
    assert read(tmp_path, tensors, scheme, (1, 9)).tolist() == [[2.0 * (value - 8) for value in (*UP, 3)]]


def test_mxfp4_has_the_first_of_two_inputs_in_the_low_bits(tmp_path: Path) -> None:
    """And exponents with a bias of 127. Of two experts, the second; of three outputs, two; of 64 inputs, the last."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    bytes_16 = [low | (low + 1) % 16 << 4 for low in range(0, 16, 2)] * 2
    blocks = torch.zeros(2, 3, 2, 16, dtype=torch.uint8)
    blocks[1, 1:, 1] = torch.tensor(bytes_16, dtype=torch.uint8)
    scales = torch.full((2, 3, 2), 255, dtype=torch.uint8)
    scales[1, 1:, 1] = torch.tensor([127, 125])
    save_file({"m_blocks": blocks, "m_scales": scales}, tmp_path / "model.safetensors")
    scheme = Scheme(kind="e2m1", layout="blocks", group_inputs=32)
    with Checkpoint(tmp_path, torch.float32) as checkpoint:
        weight = read_stacked(checkpoint, "m", scheme, 1, range(1, 3), range(32, 64))
        assert dequantise(weight).tolist() == [values * 2, [value / 4 for value in values] * 2]
        with pytest.raises(ValueError, match="m_scales has a scale that is not a number; download"):
            read_stacked(checkpoint, "m", scheme, 0, range(3), range(64))


def test_eight_bits_of_pack_quantized(tmp_path: Path) -> None:
    tensors = {"weight_packed": words([0x7F80FF00 - (1 << 32) * 0]), "weight_scale": torch.ones(1)}
    assert read(tmp_path, tensors, Scheme(kind="int8", layout="packed"), (1, 4)).tolist() == [[-128, 127, 0, -1]]


def test_inputs_of_groups_of_unequal_size_are_refused(tmp_path: Path) -> None:
    tensors = {
        "qweight": words(*[[0] * 8] * 4),
        "qzeros": words([UP_WORD], [UP_WORD]),
        "scales": torch.ones(2, 8),
        "g_idx": torch.tensor([0] * 17 + [1] * 15, dtype=torch.int32),
    }
    scheme = Scheme(kind="int4", layout="gptq", group_inputs=16, has_zeros=True, act_order=True)
    with pytest.raises(ValueError, match=r"m\.g_idx does not give each group 16 inputs"):
        read(tmp_path, tensors, scheme, (8, 32))


@pytest.mark.parametrize("is_ordered", [False, True])
def test_config_json_says_whether_there_is_a_permutation(tmp_path: Path, is_ordered: bool) -> None:
    """All experts of a layer have one, or none."""
    group_of = torch.arange(32, dtype=torch.int32) // 16
    tensors = {
        "m.qweight": words(*[[0] * 8] * 4),
        "m.qzeros": words([UP_WORD], [UP_WORD]),
        "m.scales": torch.ones(2, 8),
        "m.g_idx": group_of if is_ordered else group_of.flip(0),
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    scheme = Scheme(kind="int4", layout="gptq", group_inputs=16, has_zeros=True, act_order=True)
    with Checkpoint(tmp_path, torch.float32) as checkpoint:
        assert read_matrix(checkpoint, "m", scheme, range(8), range(32)).permutation is not None
        scheme = replace(scheme, act_order=False)
        if is_ordered:
            assert read_matrix(checkpoint, "m", scheme, range(8), range(32)).permutation is None
        else:
            with pytest.raises(ValueError, match=r"m\.g_idx has inputs in act-order, .*set .*desc_act to true"):
                read_matrix(checkpoint, "m", scheme, range(8), range(32))


def test_groups_of_zeros_say_nothing_without_act_order(tmp_path: Path) -> None:
    """Engines read them only with act-order, and some tools write them so."""
    tensors = {
        "qweight": words([UP_WORD] * 8, [UP_WORD] * 8),
        "qzeros": words([0x77777777], [0x77777777]),
        "scales": torch.tensor([[1.0] * 8, [2.0] * 8]),
    }
    scheme = Scheme(kind="int4", layout="gptq", group_inputs=8, zeros_less_one=True)
    without_FE = read(tmp_path, tensors, scheme, (8, 16))
    assert without_FE[0].tolist() == [*range(-8, 0), *range(-16, 0, 2)]
    tensors["g_idx"] = torch.zeros(16, dtype=torch.int32)
    assert torch.equal(read(tmp_path, tensors, scheme, (8, 16)), without_FE)


@pytest.mark.parametrize("form", FORMS)
def test_a_share_is_that_of_the_whole(tmp_path: Path, form: str) -> None:
    quantised, plain = write_quantised(tmp_path, "llama", form)
    shape = DecoderConfig.from_folder(quantised).shape
    assert shape.scheme is not None
    with Checkpoint(quantised, torch.float32) as checkpoint, Checkpoint(plain, torch.float32) as reference:
        for module, (num_outputs, num_inputs) in layer_matrices(shape).items():
            expected_FE = reference.read(f"{module}.weight")
            some_inputs = range(num_inputs) if shape.scheme.act_order else range(GROUP, num_inputs)
            for rows, inputs in (
                (range(num_outputs), range(num_inputs)),
                (range(20, 61), range(num_inputs)),
                (range(20, 61), some_inputs),
            ):
                weight = read_matrix(checkpoint, module, shape.scheme, rows, inputs)
                part_FE = expected_FE[rows.start : rows.stop, inputs.start : inputs.stop]
                torch.testing.assert_close(dequantise(weight), part_FE, rtol=1e-6, atol=1e-7)
            if shape.scheme.act_order:
                with pytest.raises(ValueError, match="has inputs in act-order"):
                    read_matrix(checkpoint, module, shape.scheme, range(num_outputs), range(GROUP, num_inputs))
