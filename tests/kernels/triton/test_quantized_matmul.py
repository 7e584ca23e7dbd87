"""Products with quantised weights in Triton's interpreter, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import triton.language as tl

from pdserve.kernels.selection import CPU_KERNELS
from pdserve.kernels.triton.configs import MatmulTile, split_inputs
from pdserve.kernels.triton.quantized_matmul import (
    PackedWeight,
    TritonLinear,
    _multiply_kernel,
    pack_linear,
    packed,
    quantized_matmul,
)
from pdserve.kernels.weight_quantisation import dequantise, quantise

TILES = {"int8": MatmulTile(16, 32, 32, 4, 1), "int4": MatmulTile(16, 32, 128, 4, 1)}
both_forms = pytest.mark.parametrize("form", ["int8", "int4"])


@pytest.fixture(autouse=True)
def _nan_workspaces() -> Iterator[None]:
    """What `torch.empty` gives is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(form: str, weight_FE: torch.Tensor) -> tuple[PackedWeight, torch.Tensor]:
    """A weight for the kernel, and what is kept of it in float64."""
    weight = quantise(weight_FE, form)
    return packed(weight), dequantise(weight).double()


def assert_rounded_once(y_TF: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert y_TF.dtype == dtype
    torch.testing.assert_close(y_TF.double(), expected, atol=5e-6, rtol=0.51 * torch.finfo(dtype).eps + 2e-6)


@both_forms
@pytest.mark.parametrize(("num_tokens", "num_splits"), [(1, 3), (15, 1), (16, 3), (17, 3), (65, 1)])
def test_product_with_bias_added_to_a_residual(form: str, num_tokens: int, num_splits: int) -> None:
    """Inputs that fill no tile, outputs neither; rows behind the last are not to be seen."""
    num_inputs, num_outputs = 300, 40
    weight, held_FE = weights(form, random(num_outputs, num_inputs) / math.sqrt(num_inputs))
    x_TE, bias_F = random(num_tokens + 1, num_inputs, seed=1), random(num_outputs, seed=2)
    x_TE[-1] = math.nan
    added = torch.full((num_tokens + 1, num_outputs), math.nan)
    added[:-1] = random(num_tokens, num_outputs, seed=3)
    product = x_TE[:-1].double() @ held_FE.T + bias_F.double()
    expected = added[:-1].double() + product
    tile = TILES[form]
    y_TF = quantized_matmul(x_TE[:-1], weight, bias_F, added[:-1], tile=tile, num_splits=num_splits)
    assert y_TF.data_ptr() == added.data_ptr()
    assert_rounded_once(y_TF, expected, torch.float32)
    assert added[-1].isnan().all()
    y_TF = quantized_matmul(x_TE[:-1], weight, bias_F, tile=tile, num_splits=num_splits)
    assert_rounded_once(y_TF, product, torch.float32)


@both_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_half_precision_is_summed_in_float32_and_rounded_once(form: str, dtype: torch.dtype, num_splits: int) -> None:
    weight, held_FE = weights(form, random(32, 256).to(dtype))
    x_TE, bias_F, added = (random(*shape, seed=4).to(dtype) for shape in ((17, 256), (32,), (17, 32)))
    expected = added.double() + x_TE.double() @ held_FE.T + bias_F.double()
    y_TF = quantized_matmul(x_TE, weight, bias_F, added, tile=TILES[form], num_splits=num_splits)
    assert_rounded_once(y_TF, expected, dtype)


@both_forms
def test_tiles_of_tokens_and_outputs_are_swizzled(form: str) -> None:
    """More of both than are taken together, and not a multiple."""
    weight, held_FE = weights(form, random(70, 128))
    x_TE = random(150, 128, seed=1)
    y_TF = quantized_matmul(x_TE, weight, tile=TILES[form])
    torch.testing.assert_close(y_TF.double(), x_TE.double() @ held_FE.T, atol=1e-4, rtol=1e-5)


@both_forms
@pytest.mark.parametrize("num_tokens", [3, 100])
def test_as_it_is_cut_in_serving(form: str, num_tokens: int) -> None:
    weight, held_FE = weights(form, random(40, 1100).bfloat16() / 33)
    x_TE = random(num_tokens, 1100, seed=1).bfloat16()
    y_TF = quantized_matmul(x_TE, weight)
    assert_rounded_once(y_TF, x_TE.double() @ held_FE.T, torch.bfloat16)


@both_forms
@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_and_infinity_go_where_they_belong(form: str, num_splits: int) -> None:
    weight_FE = random(40, 300)
    weight_FE[7, 299], weight_FE[11, 0] = math.nan, math.inf
    x_TE = random(3, 300, seed=1)
    x_TE[2, 150] = math.nan
    y_TF = quantized_matmul(x_TE, weights(form, weight_FE)[0], tile=TILES[form], num_splits=num_splits)
    assert y_TF[:, [7, 11]].isnan().all()
    assert y_TF[2].isnan().all()
    assert y_TF.isfinite().sum() == 38 * 2


@both_forms
def test_a_row_does_not_depend_on_its_neighbours(form: str) -> None:
    weight, _ = weights(form, random(40, 300))
    x_TE = random(20, 300, seed=1)
    together = quantized_matmul(x_TE, weight, tile=TILES[form], num_splits=3)
    for row in (0, 19):
        alone = quantized_matmul(x_TE[row : row + 1], weight, tile=TILES[form], num_splits=3)
        assert torch.equal(alone, together[row : row + 1])


@both_forms
def test_weights_beyond_32_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tile of outputs alone; only memory that is touched is taken."""
    torch.use_deterministic_algorithms(False)
    num_inputs, tile = 2**15, TILES[form]
    near, held_FE = weights(form, random(tile.outputs, num_inputs))
    num_outputs = 2**31 // near.values.shape[1] + tile.outputs
    far = torch.empty(num_outputs * near.values.shape[1], dtype=torch.int8).view(num_outputs, -1)
    scales = torch.empty((num_outputs, *near.scales.shape[1:]))
    far[-tile.outputs :], scales[-tile.outputs :] = near.values, near.scales
    x_TE, y_TF = random(1, num_inputs), torch.full((1, num_outputs), math.nan)
    monkeypatch.setattr(tl, "swizzle2d", lambda *_: (0, num_outputs // tile.outputs - 1))
    _multiply_kernel[1, 1, 1](
        x_TE, far, scales, y_TF, None, None, 1,
        NUM_INPUTS=num_inputs, NUM_OUTPUTS=num_outputs, GROUP=128 if form == "int4" else None,
        SPLIT_INPUTS=256, TOKENS=tile.tokens, OUTPUTS=tile.outputs, INPUTS=tile.inputs, ADDS=False, GROUP_TILES=8,
    )  # fmt: skip
    expected = x_TE[:, :256].double() @ held_FE[:, :256].T
    torch.testing.assert_close(y_TF[:, -tile.outputs :].double(), expected, atol=1e-4, rtol=1e-5)
    assert y_TF[:, : -tile.outputs].isnan().all()


def test_int4_bytes_hold_the_halves_of_a_group() -> None:
    weight_FE = torch.zeros(1, 130)
    weight_FE[0, [0, 1, 64, 129]] = torch.tensor([7.0, -7.0, -1.0, 7.0])
    bytes_H = packed(quantise(weight_FE, "int4")).values[0]
    assert bytes_H[:2].tolist() == [(-1 << 4) + 7, -7 & 15]
    assert bytes_H[64:66].tolist() == [0, 7]


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix(form: str, dtype: torch.dtype) -> None:
    weight_FE, bias_F = random(24, 48).to(dtype), random(24).to(dtype)
    weight = quantise(weight_FE, form)
    linear, plain = pack_linear(weight, bias_F, dtype=dtype), pack_linear(weight_FE, bias_F)
    assert isinstance(linear, TritonLinear)
    values_bytes = {"int8": 24 * 48, "int4": 24 * 128 // 2}[form]
    assert linear.num_bytes == values_bytes + 24 * 4 + 24 * dtype.itemsize
    x_TE = random(5, 48).to(dtype)
    held_FE = dequantise(weight).double()
    assert_rounded_once(linear(x_TE), x_TE.double() @ held_FE.T + bias_F.double(), dtype)
    assert torch.equal(plain(x_TE), torch.nn.functional.linear(x_TE, weight_FE, bias_F))
    ids_T = torch.tensor([23, 0, 23])
    assert linear.rows(ids_T).dtype == dtype
    torch.testing.assert_close(linear.rows(ids_T).double(), held_FE[ids_T], atol=0, rtol=torch.finfo(dtype).eps)
    y_TF = torch.zeros(5, 24, dtype=dtype)
    assert linear(x_TE, y_TF) is y_TF
    assert y_TF.any()


@both_forms
def test_products_are_those_of_the_cpu(form: str) -> None:
    """Both hold the same rounded weight, in forms of their own."""
    weight_FE, bias_F, x_TE = random(40, 300) / 17, random(40), random(3, 300, seed=1)
    weight = quantise(weight_FE, form)
    on_cpu, interpreted = CPU_KERNELS.pack_linear(weight, bias_F), pack_linear(weight, bias_F)
    torch.testing.assert_close(interpreted(x_TE), on_cpu(x_TE), atol=5e-6, rtol=5e-6)
    ids_T = torch.arange(40)
    assert torch.equal(interpreted.rows(ids_T), on_cpu.rows(ids_T))


def test_inputs_are_split_where_outputs_leave_a_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kernels.triton.configs._num_processors", lambda device: 132)
    cpu = torch.device("cpu")
    assert split_inputs(cpu, 1, 64, 4096, 128) == 896  # 5 splits
    assert split_inputs(cpu, 64, 448, 4096, 128) == 4096
    assert split_inputs(cpu, 65, 64, 4096, 64) == 4096
    assert split_inputs(cpu, 1, 1, 1000, 128) == 1024
