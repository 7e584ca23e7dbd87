"""Muon, the optimizer of the demo model's matrices: momentum, orthogonalised.

Muon (K. Jordan et al., 2024, kellerjordan.github.io/posts/muon), with updates of AdamW's size (J. Liu et al., "Muon is
scalable for LLM training", arXiv 2502.16982, section 2.2). torch.optim.Muon computes the same in bfloat16, which on
CPUs without bfloat16 arithmetic takes several times as long as the rest of a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MOMENTUM = 0.95
_UPDATE_RMS = 0.2
"""Root mean square of the elements of AdamW's usual updates."""


class Muon:
    """Steps of matrices; those of one shape are made orthogonal together."""

    def __init__(self, matrices: Iterable[nn.Parameter], *, weight_decay: float) -> None:
        self.matrices = list(matrices)
        self.momenta = [torch.zeros_like(matrix) for matrix in self.matrices]
        self._weight_decay = weight_decay
        self._alike: dict[torch.Size, list[int]] = {}
        for index, matrix in enumerate(self.matrices):
            self._alike.setdefault(matrix.shape, []).append(index)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every matrix from its gradient, and drop that."""
        for shape, indices in self._alike.items():
            updates = []
            for index in indices:
                gradient, momentum = self.matrices[index].grad, self.momenta[index]
                assert gradient is not None
                momentum.lerp_(gradient, 1 - _MOMENTUM)
                updates.append(gradient.lerp(momentum, _MOMENTUM))
                self.matrices[index].grad = None
            scale = learning_rate * _UPDATE_RMS * max(shape) ** 0.5
            for index, update in zip(indices, orthogonal(torch.stack(updates)), strict=True):
                self.matrices[index].mul_(1 - learning_rate * self._weight_decay).sub_(update, alpha=scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """About U V^T of each U S V^T, by Newton-Schulz iterations: singular values come near 1.

    ``matrices``: [count, rows, columns].
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x
