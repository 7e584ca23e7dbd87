"""Products with quantised weights in Triton's interpreter, against float64."""

from __future__ import annotations

import math

import pytest
import torch
import triton.language as tl

from pdserve.kernels.selection import CPU_KERNELS
from pdserve.kernels.triton import configs
from pdserve.kernels.triton.configs import MatmulTile, split_inputs
from pdserve.kernels.triton.quantized_matmul import TritonLinear, _multiply_kernel, pack, pack_linear, quantized_matmul
from pdserve.kernels.weight_quantisation import GroupedWeight, dequantise, quantise
from tests.kernels.grouped_weights import FORMS, Form, random_weight
from tests.kernels.random_tensors import random

pytestmark = pytest.mark.usefixtures("nan_workspaces")

TILES = {"int8": MatmulTile(16, 32, 32, 4, 1), "int4": MatmulTile(16, 32, 128, 4, 1)}
both_forms = pytest.mark.parametrize("form", ["int8", "int4"])
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def held(weight: GroupedWeight) -> torch.Tensor:
    """What is kept of a weight, in float64."""
    return dequantise(weight).double()


def assert_rounded_once(y_TF: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert y_TF.dtype == dtype
    torch.testing.assert_close(y_TF.double(), expected, atol=5e-6, rtol=0.51 * torch.finfo(dtype).eps + 2e-6)


@both_forms
@pytest.mark.parametrize(("num_tokens", "num_splits"), [(1, 3), (15, 1), (16, 3), (17, 3), (65, 1)])
def test_product_with_bias_added_to_a_residual(form: str, num_tokens: int, num_splits: int) -> None:
    """Inputs that fill no tile, outputs neither; rows behind the last are not to be seen."""
    num_inputs, num_outputs = 300, 40
    weight = quantise(random(num_outputs, num_inputs) / math.sqrt(num_inputs), form)
    x_TE, bias_F = random(num_tokens + 1, num_inputs, seed=1), random(num_outputs, seed=2)
    x_TE[-1] = math.nan
    added = torch.full((num_tokens + 1, num_outputs), math.nan)
    added[:-1] = random(num_tokens, num_outputs, seed=3)
    product = x_TE[:-1].double() @ held(weight).T + bias_F.double()
    expected = added[:-1].double() + product
    tile = TILES[form]
    y_TF = quantized_matmul(x_TE[:-1], pack(weight), bias_F, added[:-1], tile=tile, num_splits=num_splits)
    assert y_TF.data_ptr() == added.data_ptr()
    assert_rounded_once(y_TF, expected, torch.float32)
    assert added[-1].isnan().all()
    y_TF = quantized_matmul(x_TE[:-1], pack(weight), bias_F, tile=tile, num_splits=num_splits)
    assert_rounded_once(y_TF, product, torch.float32)


@both_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_half_precision_is_summed_in_float32_and_rounded_once(form: str, dtype: torch.dtype, num_splits: int) -> None:
    weight = quantise(random(32, 256).to(dtype), form)
    x_TE, bias_F, added = (random(*shape, seed=4).to(dtype) for shape in ((17, 256), (32,), (17, 32)))
    expected = added.double() + x_TE.double() @ held(weight).T + bias_F.double()
    y_TF = quantized_matmul(x_TE, pack(weight), bias_F, added, tile=TILES[form], num_splits=num_splits)
    assert_rounded_once(y_TF, expected, dtype)


@both_forms
def test_tiles_of_tokens_and_outputs_are_swizzled(form: str) -> None:
    """More of both than are taken together, and not a multiple."""
    weight = quantise(random(70, 128), form)
    x_TE = random(150, 128, seed=1)
    y_TF = quantized_matmul(x_TE, pack(weight), tile=TILES[form])
    torch.testing.assert_close(y_TF.double(), x_TE.double() @ held(weight).T, atol=1e-4, rtol=1e-5)


@both_forms
@pytest.mark.parametrize("num_tokens", [3, 100])
def test_as_it_is_cut_in_serving(form: str, num_tokens: int) -> None:
    weight = quantise(random(40, 1100).bfloat16() / 33, form)
    x_TE = random(num_tokens, 1100, seed=1).bfloat16()
    y_TF = quantized_matmul(x_TE, pack(weight))
    assert_rounded_once(y_TF, x_TE.double() @ held(weight).T, torch.bfloat16)


@both_forms
@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_and_infinity_go_where_they_belong(form: str, num_splits: int) -> None:
    weight_FE = random(40, 300)
    weight_FE[7, 299], weight_FE[11, 0] = math.nan, math.inf
    x_TE = random(3, 300, seed=1)
    x_TE[2, 150] = math.nan
    y_TF = quantized_matmul(x_TE, pack(quantise(weight_FE, form)), tile=TILES[form], num_splits=num_splits)
    assert y_TF[:, [7, 11]].isnan().all()
    assert y_TF[2].isnan().all()
    assert y_TF.isfinite().sum() == 38 * 2


@both_forms
def test_a_row_does_not_depend_on_its_neighbours(form: str) -> None:
    weight = pack(quantise(random(40, 300), form))
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
    near = quantise(random(tile.outputs, num_inputs), form)
    values, scales_FG = pack(near)[:2]
    assert scales_FG is not None
    num_outputs = 2**31 // values.shape[1] + tile.outputs
    far = torch.empty(num_outputs * values.shape[1], dtype=torch.int8).view(num_outputs, -1)
    scales = torch.empty(num_outputs, scales_FG.shape[1])
    far[-tile.outputs :], scales[-tile.outputs :] = values, scales_FG
    x_TE, y_TF = random(1, num_inputs), torch.full((1, num_outputs), math.nan)
    monkeypatch.setattr(tl, "swizzle2d", lambda *_: (0, num_outputs // tile.outputs - 1))
    _multiply_kernel[1, 1, 1](
        x_TE, far, scales, None, None, y_TF, None, None, 1, NUM_INPUTS=num_inputs, NUM_OUTPUTS=num_outputs,
        NUM_EXPERTS=1, KIND=form, GROUP=128 if form == "int4" else None,
        SPLIT_INPUTS=256, TOKENS=tile.tokens, OUTPUTS=tile.outputs, INPUTS=tile.inputs, ADDS=False, GROUP_TILES=8,
    )  # fmt: skip
    expected = x_TE[:, :256].double() @ held(near)[:, :256].T
    torch.testing.assert_close(y_TF[:, -tile.outputs :].double(), expected, atol=1e-4, rtol=1e-5)
    assert y_TF[:, : -tile.outputs].isnan().all()


@every_form
@pytest.mark.parametrize("num_tokens", [1, 7, 70])
def test_every_kind_and_size_of_group(form: Form, num_tokens: int) -> None:
    weight, x_TE = random_weight(form, 20, 160), random(num_tokens, 160, seed=1)
    expected = x_TE.double() @ held(weight).T
    y_TF = quantized_matmul(x_TE, pack(weight), num_splits=2 if num_tokens == 7 else 1)
    assert_rounded_once(y_TF, expected, torch.float32)


@every_form
def test_every_form_as_it_is_cut_in_serving(form: Form) -> None:
    weight, x_TE = random_weight(form, 70, 300), random(3, 300, seed=1).bfloat16()
    assert_rounded_once(quantized_matmul(x_TE, pack(weight)), x_TE.double() @ held(weight).T, torch.bfloat16)


@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float8_is_read_exactly(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "compute_capability", lambda device: capability)
    values_FE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    weight = GroupedWeight(values_FE, torch.ones(256, 1), "e4m3", 1)
    y_TF = quantized_matmul(torch.ones(1, 1, dtype=dtype), pack(weight))
    assert torch.equal(y_TF[0].nan_to_num(nan=7.0), values_FE[:, 0].to(dtype).nan_to_num(nan=7.0))


@pytest.mark.parametrize("form", [form for form in FORMS if form.kind != "e2m1"], ids=str)  # those are refused
def test_a_scale_that_is_not_finite_is_of_its_output_alone(form: Form) -> None:
    weight = random_weight(form, 20, 160)
    weight.scales[7, 0] = math.nan
    y_TF = quantized_matmul(random(2, 160, seed=1), pack(weight))
    assert y_TF.isnan().all(dim=0).nonzero().flatten().tolist() == [7]
    assert y_TF.isfinite().sum() == 19 * 2


@every_form
def test_inputs_out_of_order(form: Form) -> None:
    permutation = torch.randperm(300, generator=torch.Generator().manual_seed(5))
    weight, x_TE = random_weight(form, 24, 300)._replace(permutation=permutation), random(2, 300, seed=1)
    linear = pack_linear(weight, dtype=torch.float32)
    assert_rounded_once(linear(x_TE), x_TE.double() @ held(weight).T, torch.float32)
    ids_T = torch.tensor([23, 0, 23])
    assert torch.equal(linear.rows(ids_T), dequantise(weight)[ids_T])


def test_what_is_not_packed() -> None:
    weight = random_weight(Form("int4", 64, has_zeros=True), 8, 192)
    for refused in (weight._replace(group_inputs=96), weight._replace(zeros=torch.full((8, 3), 0.5))):
        with pytest.raises(AssertionError):
            pack(refused)


def test_int4_bytes_hold_two_runs_of_inputs() -> None:
    values_FE = torch.zeros(1, 130, dtype=torch.int8)
    values_FE[0, [0, 1, 32, 64, 129]] = torch.tensor([7, -8, 5, -1, -8], dtype=torch.int8)
    in_groups = {group: GroupedWeight(values_FE, torch.ones(1, -(-130 // group)), "int4", group) for group in (128, 32)}
    packed = pack(in_groups[128]).values[0]
    assert packed.shape == (128,)
    assert packed[:2].tolist() == [(-1 << 4) + 7, -8 & 15]
    assert packed[64:66].tolist() == [0, -8 & 15]
    packed = pack(in_groups[32]).values[0]
    assert packed.shape == (96,)
    assert packed[:2].tolist() == [(5 << 4) + 7, -8 & 15]
    assert packed[[32, 65]].tolist() == [-1 & 15, -8 & 15]


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix(form: str, dtype: torch.dtype) -> None:
    weight_FE, bias_F = random(24, 48).to(dtype), random(24).to(dtype)
    weight = quantise(weight_FE, form)
    linear, plain = pack_linear(weight, bias_F, dtype=dtype), pack_linear(weight_FE, bias_F, dtype=dtype)
    assert isinstance(linear, TritonLinear)
    values_bytes = {"int8": 24 * 48, "int4": 24 * 128 // 2}[form]
    assert linear.num_bytes == values_bytes + 24 * 4 + 24 * dtype.itemsize
    x_TE = random(5, 48).to(dtype)
    assert_rounded_once(linear(x_TE), x_TE.double() @ held(weight).T + bias_F.double(), dtype)
    assert torch.equal(plain(x_TE), torch.nn.functional.linear(x_TE, weight_FE, bias_F))
    ids_T = torch.tensor([23, 0, 23])
    assert linear.rows(ids_T).dtype == dtype
    torch.testing.assert_close(linear.rows(ids_T).double(), held(weight)[ids_T], atol=0, rtol=torch.finfo(dtype).eps)
    y_TF = torch.zeros(5, 24, dtype=dtype)
    assert linear(x_TE, y_TF) is y_TF
    assert y_TF.any()


@both_forms
def test_products_are_those_of_the_cpu(form: str) -> None:
    """Both hold the same rounded weight, in forms of their own."""
    weight_FE, bias_F, x_TE = random(40, 300) / 17, random(40), random(3, 300, seed=1)
    weight = quantise(weight_FE, form)
    on_cpu = CPU_KERNELS.pack_linear(weight, bias_F, dtype=torch.float32)
    interpreted = pack_linear(weight, bias_F, dtype=torch.float32)
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
