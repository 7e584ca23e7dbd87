"""Benchmark cases of sampling: a draw, and top-p, for every row of a batch of logits.

Cases of `pdserve.kernels.triton.sampling`, whose results stay on the device, as in a captured step. Peers with a
different random number generator are left out, because their draws cannot be compared.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

import torch

from pdserve.bench.kernels.contest import Contender, Contest, Work
from pdserve.kernels.operations import LAST_ID, DrawTensors, Thresholds, TopPTensors
from pdserve.kernels.torch import sampling as torch_sampling
from pdserve.kernels.triton import sampling as triton_sampling

_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawCase:
    """A token for every row, of all that there are."""

    num_rows: int
    vocab_size: int = 128_256

    @property
    def kernel(self) -> str:
        return "draw_tokens"

    @property
    def shape(self) -> str:
        return f"{self.num_rows} x {self.vocab_size}"

    @property
    def work(self) -> Work:
        return Work(_LOGIT_BYTES * self.num_rows * self.vocab_size)

    def contest(self, device: torch.device) -> Contest:
        logits_BV = _logits(self.num_rows, self.vocab_size, device)
        best_B = logits_BV.amax(dim=1)
        row_B = torch.arange(self.num_rows, dtype=torch.int32, device=device)
        draws = DrawTensors(
            row=row_B,
            seed=row_B.long() + 1,
            position=torch.full_like(row_B, 7),
            choice=torch.zeros_like(row_B),
            best=best_B,
            temperature=torch.ones_like(best_B),
            lowest=torch.full_like(best_B, -inf),
            last_equal=torch.full_like(row_B, LAST_ID),
        )
        peers = {"torch gumbel": lambda: Contender(partial(torch_sampling.draw_tokens, logits_BV, draws))}
        return Contest(Contender(partial(triton_sampling.draw_tokens, logits_BV, draws)), peers, tolerance=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopPCase:
    """Top-p of every row."""

    num_rows: int
    vocab_size: int = 128_256
    top_p: float = 0.9

    @property
    def kernel(self) -> str:
        return "find_top_p"

    @property
    def shape(self) -> str:
        return f"{self.num_rows} x {self.vocab_size}, top-p {self.top_p}"

    @property
    def work(self) -> Work:
        return Work(2 * _LOGIT_BYTES * self.num_rows * self.vocab_size)

    def contest(self, device: torch.device) -> Contest:
        logits_BV = _logits(self.num_rows, self.vocab_size, device)
        best_B = logits_BV.amax(dim=1)
        rows = TopPTensors(
            row=torch.arange(self.num_rows, dtype=torch.int32, device=device),
            top_p=torch.full_like(best_B, self.top_p, dtype=torch.float64),
            best=best_B,
            temperature=torch.ones_like(best_B),
            lowest=torch.full_like(best_B, -inf),
        )
        peers = {
            "sort": lambda: Contender(partial(_lowest_by_sorting, logits_BV, self.top_p)),
            "torch": lambda: Contender(partial(torch_sampling.find_top_p, logits_BV, rows), _lowest),
        }
        own = Contender(partial(triton_sampling.find_top_p, logits_BV, rows), _lowest)
        # A sum in another order may end one token sooner or later, whose logit is the next one.
        return Contest(own, peers, tolerance=0.001)


def _logits(num_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, device=device)


def _lowest(kept: Thresholds) -> torch.Tensor:
    return kept.lowest


def _lowest_by_sorting(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """The lowest logit that top-p keeps of every row, as most samplers find it."""
    sorted_BV = logits_BV.sort(dim=-1, descending=True).values
    ends_B1 = (sorted_BV.softmax(dim=-1).cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True)
    return sorted_BV.gather(1, ends_B1)[:, 0]
