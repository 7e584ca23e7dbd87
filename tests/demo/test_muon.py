from __future__ import annotations

import pytest
import torch
from torch import nn

from pdserve.demo.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 6, 20), (2, 20, 6)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    turned = left.mT @ orthogonal(matrices) @ right.mT
    off_diagonal = turned - torch.diag_embed(turned.diagonal(dim1=1, dim2=2))
    assert off_diagonal.abs().max() < 1e-4, "the singular vectors stay"


def test_a_step_goes_down_the_gradient_and_drops_it() -> None:
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)] + [nn.Parameter(torch.randn(6, 4))]
    target = [torch.randn_like(matrix) for matrix in matrices]
    muon = Muon(matrices, weight_decay=0.0)

    def distance() -> torch.Tensor:
        return torch.stack([((m - t) ** 2).sum() for m, t in zip(matrices, target, strict=True)]).sum()

    before = distance().item()
    for _ in range(50):
        distance().backward()  # type: ignore[no-untyped-call]
        muon.step(0.1)
        assert all(matrix.grad is None for matrix in matrices)
    assert distance().item() < 0.2 * before
