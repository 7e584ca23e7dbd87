"""Linear layers, RMS norm and gate of both implementations against float64."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.kernels.cpu.dense import multiplies_bfloat16
from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.operations import DecoderKernels, Linear
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from pdserve.kernels.torch.dense import matrix_dtype
from pdserve.kernels.weight_quantisation import dequantise, quantise
from tests.kernels.gates import ACTIVATIONS, reference_gate
from tests.kernels.random_tensors import random

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Around one row, two, a tile, a few tiles, a block, and more than one block; one panel, several, and parts of one.
NUM_ROWS = (0, 1, 2, 3, 5, 6, 7, 12, 23, 24, 25, 49, 70, 192, 193, 300)
SHAPES = ((1, 1), (16, 3), (17, 255), (33, 256), (48, 257), (65, 600), (150, 96))
QUANTISED = ("int8", "int4")
IN_BFLOAT16 = " in bf16"
"""Ends the name of a form that is multiplied in bfloat16, where the CPU has instructions for it."""

both_kernels = pytest.mark.parametrize("kernels", [CPU_KERNELS, TORCH_KERNELS], ids=["cpu", "torch"])
all_dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
every_weight = pytest.mark.parametrize(
    "form", [*DTYPES, *QUANTISED, *(form + IN_BFLOAT16 for form in ("bf16", *QUANTISED))]
)


def cpu_linear(form: str, weight_FE: torch.Tensor, bias_F: torch.Tensor | None = None) -> Linear:
    dtype = torch.bfloat16 if form.endswith(IN_BFLOAT16) else torch.float32
    form = form.removesuffix(IN_BFLOAT16)
    weight = quantise(weight_FE, form) if form in QUANTISED else weight_FE.to(DTYPES[form])
    return CPU_KERNELS.pack_linear(weight, bias_F, dtype=dtype)


def random_rows(form: str, num_rows: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Values that products in bfloat16 do not round, for a form that has them."""
    x_TE = random(num_rows, num_inputs, seed=seed)
    return x_TE.bfloat16().float() if form.endswith(IN_BFLOAT16) else x_TE


def held(form: str, weight_FE: torch.Tensor) -> torch.Tensor:
    """What ``form`` keeps of a weight, in float64."""
    form = form.removesuffix(IN_BFLOAT16)
    if form in QUANTISED:
        return dequantise(quantise(weight_FE, form)).double()
    return weight_FE.to(DTYPES[form]).double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=2e-5)


@every_weight
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_product_of_any_shape(form: str, shape: tuple[int, int], biased: bool) -> None:
    num_outputs, num_inputs = shape
    weight_FE = random(num_outputs, num_inputs) / math.sqrt(num_inputs)
    bias_F = random(num_outputs, seed=1) if biased else None
    linear = cpu_linear(form, weight_FE, bias_F)
    for num_rows in NUM_ROWS:
        x_TE = random_rows(form, num_rows, num_inputs, seed=num_rows)
        expected = x_TE.double() @ held(form, weight_FE).T + (0 if bias_F is None else bias_F.double())
        y_TF = linear(x_TE)
        assert y_TF.dtype == torch.float32
        assert_close(y_TF, expected)


@all_dtypes
def test_both_kernels_agree(dtype: torch.dtype) -> None:
    weight_FE, bias_F, x_TE = (random(40, 64) / 8).to(dtype), random(40).to(dtype), random(9, 64)
    expected = TORCH_KERNELS.pack_linear(weight_FE.float(), bias_F.float())(x_TE)
    assert_close(CPU_KERNELS.pack_linear(weight_FE, bias_F)(x_TE), expected.double())
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    y_TF = TORCH_KERNELS.pack_linear(weight_FE, bias_F)(x_TE.to(dtype))
    assert y_TF.dtype == dtype
    torch.testing.assert_close(y_TF.float(), expected, atol=tolerance, rtol=tolerance)


@every_weight
def test_a_row_depends_on_neither_its_neighbours_nor_the_number_of_threads(form: str) -> None:
    linear = cpu_linear(form, random(200, 700) / 26, random(200))
    x_TE = random(400, 700)
    together = linear(x_TE)
    for num_threads in (1, 2, 3):
        use_threads(num_threads)
        for num_rows in NUM_ROWS:
            assert torch.equal(linear(x_TE[:num_rows]), together[:num_rows])
            assert torch.equal(linear(x_TE[400 - num_rows :]), together[400 - num_rows :])


@every_weight
def test_a_token_of_a_prompt_gets_what_it_gets_alone(form: str) -> None:
    """In batches of 1 to 2,048 rows on one thread and two: bit for bit."""
    linear = cpu_linear(form, random(70, 300) / 17)
    x_TE = random(2048, 300)
    use_threads(1)
    alone = torch.cat([linear(x_TE[row : row + 1]) for row in range(2048)])
    for num_threads in (1, 2):
        use_threads(num_threads)
        for num_rows in (2, 3, 11, 13, 48, 49, 383, 385, 1023, 2048):
            assert torch.equal(linear(x_TE[-num_rows:]), alone[-num_rows:])


@pytest.mark.parametrize("form", ["bf16", *QUANTISED])
@pytest.mark.parametrize("num_inputs", [1, 2, 15, 17, 31, 33, 256, 700])
def test_products_in_bfloat16_are_those_of_rounded_activations(form: str, num_inputs: int) -> None:
    linear, plain = (cpu_linear(each, random(40, num_inputs)) for each in (form + IN_BFLOAT16, form))
    for num_rows in (1, 3, 60):
        x_TE = random(num_rows, num_inputs, seed=1)
        if multiplies_bfloat16():
            assert torch.equal(linear(x_TE), linear(x_TE.bfloat16().float()))
            assert not torch.equal(linear(x_TE), plain(x_TE))
        else:
            assert torch.equal(linear(x_TE), plain(x_TE))


@pytest.mark.parametrize("form", [*DTYPES, "bf16" + IN_BFLOAT16])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 70])
def test_nan_and_infinity_go_where_they_belong(form: str, num_rows: int) -> None:
    weight_FE = random(40, 300)
    weight_FE[7, 299] = math.nan
    weight_FE[11, 0] = math.inf
    x_TE = random(num_rows, 300).abs() + 1
    y_TF = cpu_linear(form, weight_FE)(x_TE)
    assert y_TF[:, 7].isnan().all()
    assert (y_TF[:, 11] == math.inf).all()
    assert y_TF.isfinite().sum() == 38 * num_rows
    x_TE[num_rows - 1, 299] = math.nan
    y_TF = cpu_linear(form, weight_FE)(x_TE)
    assert y_TF[num_rows - 1].isnan().all()
    assert y_TF[: num_rows - 1].isfinite().sum() == 38 * (num_rows - 1)


@every_weight
@pytest.mark.parametrize("num_rows", [1, 2, 5, 70])
def test_a_product_is_added_in_place(form: str, num_rows: int) -> None:
    linear = cpu_linear(form, random(40, 300), random(40))
    x_TE, y_TF = random(num_rows, 300), random(num_rows, 40, seed=1)
    expected = y_TF.double() + linear(x_TE).double()
    assert linear(x_TE, y_TF) is y_TF
    torch.testing.assert_close(y_TF.double(), expected, rtol=1e-6, atol=1e-5)
    for bias_F in (None, random(40)):
        held = TORCH_KERNELS.pack_linear(random(40, 300), bias_F)
        y_TF = random(num_rows, 40, seed=1)
        assert held(x_TE, y_TF) is y_TF
        assert_close(y_TF, random(num_rows, 40, seed=1).double() + held(x_TE).double())


def test_every_float16_is_read_exactly() -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).view(256, 256)
    linear = CPU_KERNELS.pack_linear(values)
    assert torch.equal(linear.rows(torch.arange(256)).nan_to_num(nan=7.0), values.float().nan_to_num(nan=7.0))


@every_weight
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_the_weight(form: str, shape: tuple[int, int]) -> None:
    weight_FE = random(*shape)
    ids_T = torch.randint(shape[0], (23,), generator=torch.Generator().manual_seed(0))
    rows_TE = cpu_linear(form, weight_FE).rows(ids_T)
    assert rows_TE.dtype == torch.float32
    torch.testing.assert_close(rows_TE, held(form, weight_FE)[ids_T].float(), atol=0, rtol=1e-7)


@both_kernels
def test_rows_of_both_kernels(kernels: DecoderKernels) -> None:
    weight_FE = random(10, 6)
    assert torch.equal(kernels.pack_linear(weight_FE).rows(torch.tensor([9, 0, 9])), weight_FE[[9, 0, 9]])


def test_bytes_are_those_of_the_dtype() -> None:
    weight_FE, bias_F = random(64, 100), random(64)
    assert {form: cpu_linear(form, weight_FE, bias_F).num_bytes for form in (*DTYPES, *QUANTISED)} == {
        "fp32": 64 * 100 * 4 + 64 * 4,
        "bf16": 64 * 100 * 2 + 64 * 4,
        "fp16": 64 * 100 * 2 + 64 * 4,
        "int8": 64 * 100 + 64 * 4 + 64 * 4,
        "int4": 64 * 100 // 2 + 64 * 4 + 64 * 4,
    }
    for form in ("bf16", *QUANTISED):
        plain = cpu_linear(form, weight_FE, bias_F)
        assert cpu_linear(form + IN_BFLOAT16, weight_FE, bias_F).num_bytes == plain.num_bytes
    assert cpu_linear("int4", random(64, 300)).num_bytes == 64 * 300 // 2 + 64 * 3 * 4


@pytest.mark.parametrize("form", [*QUANTISED, *(form + IN_BFLOAT16 for form in QUANTISED)])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 70])
def test_a_weight_that_is_not_finite_makes_its_output_nan_when_quantised(form: str, num_rows: int) -> None:
    weight_FE = random(20, 300)
    weight_FE[3, 4], weight_FE[5, 260] = math.nan, -math.inf
    y_TF = cpu_linear(form, weight_FE)(random(num_rows, 300))
    assert y_TF.isnan().all(dim=0).nonzero().flatten().tolist() == [3, 5]
    assert y_TF.isfinite().sum() == 18 * num_rows


@pytest.mark.parametrize("num_rows", [1, 2, 7, 70])
def test_int4_scales_are_those_of_their_group(num_rows: int) -> None:
    """Groups so different that a scale of another one would show, and a last one of few inputs."""
    weight_FE = random(40, 260) * torch.logspace(-4, 4, 3).repeat_interleave(128)[:260]
    x_TE = random(num_rows, 260) / torch.logspace(-4, 4, 3).repeat_interleave(128)[:260]
    y_TF = cpu_linear("int4", weight_FE)(x_TE)
    expected = x_TE.double() @ held("int4", weight_FE).T
    torch.testing.assert_close(y_TF.double(), expected, atol=2e-4, rtol=2e-5)


@both_kernels
@pytest.mark.parametrize("width", [1, 7, 16, 100, 256, 4097])
def test_rms_norm(kernels: DecoderKernels, width: int) -> None:
    weight_E = random(width, seed=1)
    for num_rows in (0, 1, 3, 50):
        x_TE = torch.logspace(-4, 2, num_rows)[:, None] * random(num_rows, width)
        x_64 = x_TE.double()
        expected = x_64 / (x_64.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight_E
        assert_close(kernels.rms_normalise(x_TE, weight_E, 1e-5), expected)


@both_kernels
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 8, 13, 688])
def test_gate(kernels: DecoderKernels, activation: str, width: int) -> None:
    for num_rows in (0, 1, 3, 60):
        gate_up_TF = 3 * random(num_rows, 2 * width)
        expected = reference_gate(gate_up_TF, activation)
        assert_close(kernels.gate(gate_up_TF, activation), expected)


# Below 1e-36 e^x overflows and silu is 0. The cube in gelu's exponent magnifies rounding where the result is tiny.
@pytest.mark.parametrize(
    ("activation", "relative", "absolute"), [("silu", 5e-7, 1e-36), ("gelu_tanh", 2e-6, 1e-9)], ids=["silu", "gelu"]
)
def test_gate_is_accurate_and_sound_from_end_to_end(activation: str, relative: float, absolute: float) -> None:
    gate_T = torch.cat((torch.linspace(-120, 120, 100_001), torch.logspace(-30, 30, 61), -torch.logspace(-30, 30, 61)))
    gate_up_TF = torch.stack((gate_T, torch.ones_like(gate_T)), dim=1)
    actual = CPU_KERNELS.gate(gate_up_TF, activation)[:, 0].double()
    torch.testing.assert_close(actual, activate(gate_T.double(), activation), rtol=relative, atol=absolute)
    special = CPU_KERNELS.gate(torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [0.0, math.nan]]), activation)
    assert special[:, 0].isnan().tolist() == [True, False, True]
    assert special[1, 0] == math.inf


@both_kernels
def test_limits_of_a_gate(kernels: DecoderKernels) -> None:
    """The gate has none below; NaN stays."""
    gate_up_TF = torch.tensor([[100.0, 9.0], [-100.0, 9.0], [-3.0, -9.0], [math.nan, 1.0], [1.0, math.nan]])
    y_T = kernels.gate(gate_up_TF.repeat_interleave(9, dim=1), "swiglu_oai")[:, 0]
    assert_close(y_T[:3].clone(), torch.tensor([56.0, 0.0, 18.0 / (1 + math.exp(5.106))], dtype=torch.float64))
    assert y_T[3:].isnan().all()


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """By the definition, with no cancellation where the result is small."""
    if activation == "silu":
        return x * torch.sigmoid(x)
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def test_cpu_kernels_refuse_what_they_would_misread() -> None:
    linear = CPU_KERNELS.pack_linear(random(8, 4))
    for x_TE in (random(2, 5), random(2, 4).bfloat16(), random(4, 2).T):
        with pytest.raises(AssertionError):
            linear(x_TE)
    with pytest.raises(AssertionError):
        linear(random(2, 4), random(3, 8))
    with pytest.raises(AssertionError):
        linear.rows(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(AssertionError):
        CPU_KERNELS.rms_normalise(random(2, 4), random(3), 1e-5)
    with pytest.raises(AssertionError):
        CPU_KERNELS.gate(random(2, 4).half(), "silu")
    with pytest.raises(AssertionError):
        CPU_KERNELS.pack_linear(random(8, 4), random(7))


def test_torch_holds_matrices_in_a_dtype_that_this_cpu_multiplies() -> None:
    assert matrix_dtype(torch.float32) is torch.float32
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert matrix_dtype(torch.bfloat16) is (torch.bfloat16 if native else torch.float32)
