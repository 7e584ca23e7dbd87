"""Products with quantised weights of any kind, group, zero points and order, against float64."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.selection import CPU_KERNELS, TORCH_KERNELS
from pdserve.kernels.weight_quantisation import GroupedWeight, dequantise, e2m1_codes, twice_e2m1
from tests.kernels.grouped_weights import Form, random_weight
from tests.kernels.random_tensors import random

PER_OUTPUT = 10**6
FORMS = [
    *(Form("int4", group, has_zeros) for group in (32, 64, 96, 128, 512, PER_OUTPUT) for has_zeros in (False, True)),
    *(Form("int8", group, has_zeros) for group in (32, 128, PER_OUTPUT) for has_zeros in (False, True)),
    *(Form(kind, 13, True) for kind in ("int8", "int4")),  # an odd number, which is not multiplied in bfloat16
    *(Form("e4m3", group) for group in (32, 128, PER_OUTPUT)),
    *(Form("e2m1", group) for group in (32, PER_OUTPUT)),
]
# Rows of each path of the kernel; inputs that fill no group, outputs that fill no panel.
NUM_ROWS = (1, 2, 7, 12, 50, 300)
NUM_OUTPUTS, NUM_INPUTS = 150, 650

# In bfloat16 where the CPU has instructions for it.
both_products = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def permuted(weight: GroupedWeight, seed: int = 0) -> GroupedWeight:
    return weight._replace(permutation=torch.randperm(NUM_INPUTS, generator=torch.Generator().manual_seed(seed)))


@every_form
@pytest.mark.parametrize("is_permuted", [False, True], ids=["", "permuted"])
@both_products
def test_product_and_rows(form: Form, is_permuted: bool, dtype: torch.dtype) -> None:
    weight, bias_F = random_weight(form, NUM_OUTPUTS, NUM_INPUTS), random(NUM_OUTPUTS)
    weight = permuted(weight) if is_permuted else weight
    whole_FE = dequantise(weight).double()
    linear = CPU_KERNELS.pack_linear(weight, bias_F, dtype=dtype)
    for num_rows in NUM_ROWS:
        # Not rounded, and of a sum that is not near 0.
        x_TE = (random(num_rows, NUM_INPUTS, seed=num_rows) + 0.5).to(dtype).float()
        size_TF = x_TE.abs().double() @ whole_FE.abs().T + bias_F.abs().double()
        error_TF = linear(x_TE).double() - (x_TE.double() @ whole_FE.T + bias_F.double())
        assert (error_TF.abs() <= (4e-6 if form.has_zeros else 1e-6) * size_TF).all()
    ids_T = torch.tensor([149, 0, 37])
    assert torch.equal(linear.rows(ids_T), dequantise(weight)[ids_T])
    y_TF = TORCH_KERNELS.pack_linear(weight, bias_F)(x_TE).double()
    torch.testing.assert_close(y_TF, x_TE.double() @ whole_FE.T + bias_F.double(), atol=2e-3, rtol=2e-5)


@every_form
@both_products
def test_a_row_depends_on_neither_its_neighbours_nor_the_number_of_threads(form: Form, dtype: torch.dtype) -> None:
    linear = CPU_KERNELS.pack_linear(random_weight(form, 400, NUM_INPUTS), dtype=dtype)
    x_TE = random(300, NUM_INPUTS)
    together_TF = linear(x_TE)
    for num_threads in (1, 2):
        use_threads(num_threads)
        for num_rows in NUM_ROWS:
            assert torch.equal(linear(x_TE[-num_rows:]), together_TF[-num_rows:])


@pytest.mark.parametrize("num_rows", [1, 2, 7, 70])
@both_products
def test_every_pair_of_values_of_four_bits(num_rows: int, dtype: torch.dtype) -> None:
    """A panel holds outputs side by side in a byte: each pair, of which one is the lowest, too."""
    values_FE = torch.arange(-8, 8, dtype=torch.int8).repeat(4, 16)
    values_FE = torch.cat((values_FE.repeat(4, 1), values_FE.repeat_interleave(16, dim=1)[:, :256].repeat(4, 1)))
    weight = GroupedWeight(values_FE, torch.ones(32, 1), "int4", 256)
    for width in (16, 8):  # of AVX-512, of others
        order = torch.arange(32).view(2, -1, width).transpose(0, 1).flatten()
        linear = CPU_KERNELS.pack_linear(weight._replace(values=values_FE[order]), dtype=dtype)
        x_TE = torch.eye(256)[:num_rows] + torch.eye(256)[-num_rows:]
        assert torch.equal(linear(x_TE), x_TE @ values_FE[order].float().T)
        assert torch.equal(linear.rows(torch.arange(32)), values_FE[order].float())


@pytest.mark.parametrize("form", [None, Form("e2m1", 32), Form("int4", 128), Form("int8", None)], ids=str)
@pytest.mark.parametrize("num_inputs", [2880, 1440])
def test_inputs_of_gpt_oss(form: Form | None, num_inputs: int) -> None:
    """No multiple of 128, and on two ranks none of 64."""
    weight = random_weight(form, 70, num_inputs) if form else random(70, num_inputs).bfloat16() / 54
    whole_FE = dequantise(weight).double() if isinstance(weight, GroupedWeight) else weight.double()
    linear, experts = CPU_KERNELS.pack_linear(weight), CPU_KERNELS.pack_experts([weight] * 3)
    for num_rows in (1, 7, 60):
        x_TE = random(num_rows, num_inputs, seed=num_rows)
        torch.testing.assert_close(linear(x_TE).double(), x_TE.double() @ whole_FE.T, atol=2e-5, rtol=2e-5)
        starts_Y = torch.tensor([0, num_rows // 2, num_rows // 2, num_rows])
        assert torch.equal(experts(x_TE, starts_Y), linear(x_TE))


@both_products
def test_every_e4m3_is_read_exactly_and_nan_stays(dtype: torch.dtype) -> None:
    values_FE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
    linear = CPU_KERNELS.pack_linear(GroupedWeight(values_FE, torch.ones(8, 1), "e4m3", 32), dtype=dtype)
    rows_FE = linear.rows(torch.arange(8))
    has_nan = [3, 7]
    assert rows_FE[has_nan].isnan().all()
    of_numbers = [row for row in range(8) if row not in has_nan]
    assert torch.equal(rows_FE[of_numbers], values_FE.float()[of_numbers])
    x_TE = torch.full((1, 32), 2.0**-100)  # products of which are not lost
    expected_TF = x_TE.double() @ values_FE.double().T
    torch.testing.assert_close(linear(x_TE).double()[:, of_numbers], expected_TF[:, of_numbers], rtol=1e-6, atol=0)
    grouped = GroupedWeight(values_FE.view(4, 64), torch.ones(4, 2), "e4m3", 32)
    rows_FE = CPU_KERNELS.pack_linear(grouped, dtype=dtype).rows(torch.arange(4))
    assert rows_FE.isnan().any(dim=0).tolist() == [False] * 32 + [True] * 32


@both_products
def test_every_e2m1_is_read_exactly(dtype: torch.dtype) -> None:
    """In both halves of a panel, with every other one."""
    codes_FE = torch.arange(16, dtype=torch.int8).repeat(4, 16)
    codes_FE = torch.cat((codes_FE.repeat(4, 1), codes_FE.repeat_interleave(16, dim=1)[:, :256].repeat(4, 1)))
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    expected_FE = torch.cat((table, -table))[codes_FE.int()]
    assert torch.equal(e2m1_codes(twice_e2m1(codes_FE)), codes_FE.where(codes_FE != 8, 0))
    for width in (16, 8):  # of AVX-512, of others
        order = torch.arange(32).view(2, -1, width).transpose(0, 1).flatten()
        weight = GroupedWeight(twice_e2m1(codes_FE)[order], torch.full((32, 8), 0.5), "e2m1", 32)
        linear = CPU_KERNELS.pack_linear(weight, dtype=dtype)
        assert torch.equal(linear.rows(torch.arange(32)), expected_FE[order])
        for x_TE in (torch.eye(256)[:1], torch.eye(256)[::3].contiguous()):
            assert torch.equal(linear(x_TE), x_TE @ expected_FE[order].T)


def test_bytes_of_groups_and_zero_points() -> None:
    weight = random_weight(Form("int4", 128, has_zeros=True), 64, NUM_INPUTS)
    assert CPU_KERNELS.pack_linear(weight).num_bytes == 64 * (NUM_INPUTS // 2 + 6 * 5)
    weight = random_weight(Form("e2m1", 32), 64, NUM_INPUTS)
    assert CPU_KERNELS.pack_linear(weight).num_bytes == 64 * (NUM_INPUTS // 2 + 21)
    weight = permuted(random_weight(Form("int8", 32), 64, NUM_INPUTS))
    assert CPU_KERNELS.pack_linear(weight).num_bytes == 64 * (NUM_INPUTS + 21 * 4) + NUM_INPUTS * 8
    weight = random_weight(Form("int8", None, has_zeros=True), 64, NUM_INPUTS)
    assert CPU_KERNELS.pack_linear(weight).num_bytes == 64 * (NUM_INPUTS + 5)


@pytest.mark.parametrize("form", [None, *FORMS], ids=str)
@pytest.mark.parametrize("is_permuted", [False, True], ids=["", "permuted"])
@both_products
def test_experts_multiply_as_each_alone(form: Form | None, is_permuted: bool, dtype: torch.dtype) -> None:
    """Bit for bit, with none, few and many rows each, and rows of none behind them."""
    counts = (0, 1, 0, 3, 60, 2, 1, 0)
    if form is None:
        weights: list[torch.Tensor | GroupedWeight] = [random(150, NUM_INPUTS, seed=seed).bfloat16() for seed in counts]
    else:
        first = random_weight(form, NUM_OUTPUTS, NUM_INPUTS)
        first = permuted(first) if is_permuted else first
        order = torch.randperm(NUM_OUTPUTS, generator=torch.Generator().manual_seed(1))
        other = first._replace(values=first.values.view(torch.int8)[order].view(first.values.dtype))
        if first.permutation is not None:
            other = other._replace(permutation=first.permutation.flip(0))
        weights = [first if count % 2 else other for count in counts]
    experts = CPU_KERNELS.pack_experts(weights, dtype=dtype)
    linears = [CPU_KERNELS.pack_linear(weight, dtype=dtype) for weight in weights]
    assert experts.num_bytes == sum(linear.num_bytes for linear in linears)
    starts_Y = torch.tensor([0, *counts]).cumsum(dim=0)
    x_PE = random(70, NUM_INPUTS)
    for num_threads in (1, 2, 3):
        use_threads(num_threads)
        y_PF = experts(x_PE, starts_Y)
        assert y_PF.shape == (70, NUM_OUTPUTS)
        for linear, start, end in zip(linears, starts_Y[:-1].tolist(), starts_Y[1:].tolist(), strict=True):
            assert torch.equal(y_PF[start:end], linear(x_PE[start:end]))
    nothing = torch.zeros(9, dtype=torch.int64)
    assert experts(x_PE[:0], nothing).shape == (0, NUM_OUTPUTS)
