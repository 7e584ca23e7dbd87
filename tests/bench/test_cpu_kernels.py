from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve.bench import cpu_kernels
from pdserve.bench.cpu_kernels import FORMS, MAX_WEIGHTS, NUM_ROWS, Case, cases
from pdserve.bench.shapes import SHAPES


def test_cases_are_the_products_of_a_layer() -> None:
    listed = list(cases(list(SHAPES)))
    assert len({case.name for case in listed}) == len(listed) == len(SHAPES) * 4 * len(NUM_ROWS)
    for case in listed:
        assert 1 <= case.num_copies * case.num_inputs * case.num_outputs <= MAX_WEIGHTS
    tiny = {case.product: (case.num_inputs, case.num_outputs) for case in listed if case.shape == "tiny"}
    # 8 query heads and 2 x 4 KV heads of 32.
    assert tiny == {"qkv": (256, 512), "output": (256, 256), "gate_up": (256, 1376), "down": (688, 256)}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_computes_the_product(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("tiny", "output", 256, 64, 1, 3)
    torch.manual_seed(0)
    weight_FE = torch.randn(64, 256)
    monkeypatch.setattr(torch, "randn", lambda *sizes: weight_FE)
    multiply = cpu_kernels._matrix(form, case)
    x_TE = torch.rand(3, 256)
    expected = x_TE @ (weight_FE / 16).T
    tolerance = {"int4": 0.2, "int8": 0.03}.get(form, 0.02)
    assert float((multiply(x_TE) - expected).abs().amax() / expected.abs().amax()) < tolerance


def test_rates_are_ratios_to_torch() -> None:
    seconds = dict.fromkeys(FORMS, 1e-3) | {"torch": 2e-3}
    entry: dict[str, Any] = cpu_kernels._entry(Case("tiny", "output", 1000, 500, 1, 2), seconds)
    assert entry["forms"]["int8"] == {"us": 1000.0, "gflops": 2.0, "weight_gbytes_per_s": 0.5, "times_torch": 2.0}
    assert entry["forms"]["torch"]["times_torch"] == 1.0
