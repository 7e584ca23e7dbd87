"""Random quantised weights of every kind that kernels multiply with, whatever publishers write."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pdserve.kernels.weight_quantisation import GroupedWeight, twice_e2m1

_VALUES = {"int8": range(-128, 128), "int4": range(-8, 8), "e4m3": range(-448, 449), "e2m1": range(16)}
"""Of e2m1, the codes."""


class Form(NamedTuple):
    kind: str
    group_inputs: int | None
    """``None``: one scale per output."""
    has_zeros: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{self.group_inputs or 'output'}{'-zeros' * self.has_zeros}"


FORMS = [
    Form(kind, group_inputs, has_zeros)
    for kind in _VALUES
    for group_inputs in (None, 32, 64, 128)
    for has_zeros in (False, True)
    if not (has_zeros and kind.startswith("e"))
]


def random_weight(form: Form, num_outputs: int, num_inputs: int, seed: int = 0) -> GroupedWeight:
    """Products with inputs around 1 are around 1; scales of neighbours differ by much."""
    generator, of_kind = torch.Generator().manual_seed(seed), _VALUES[form.kind]

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(of_kind.start, of_kind.stop, shape, generator=generator)

    group_inputs = form.group_inputs or num_inputs
    num_groups = -(-num_inputs // group_inputs)
    values_FE = integers(num_outputs, num_inputs).to(torch.float8_e4m3fn if form.kind == "e4m3" else torch.int8)
    values_FE = twice_e2m1(values_FE) if form.kind == "e2m1" else values_FE
    exponents_FG = 3 * torch.rand(num_outputs, num_groups, generator=generator) - 2
    scales_FG = 2**exponents_FG / (of_kind.stop * math.sqrt(num_inputs))
    return GroupedWeight(
        values_FE,
        2 ** scales_FG.log2().round() if form.kind == "e2m1" else scales_FG,
        form.kind,
        group_inputs,
        integers(num_outputs, num_groups).float() if form.has_zeros else None,
    )
