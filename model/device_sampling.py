"""Draws tokens where the logits are, so that the host waits for nothing: what most rows ask for, and nothing else.

Called by `pdserve.model.gpu_executor` for steps of which every row is plain; other steps are sampled by
`pdserve.model.sampling`, whose tokens these are. What a draw needs is packed with the rest of the step. Keeps no state.

Shape suffixes: B rows of logits, D draws, R those of them with top-p, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.step import StepRow
from pdserve.kernels.operations import ALL_KEPT, DeviceSamplingKernels, DrawTensors, NucleusTensors
from pdserve.model.sampling import drawing_temperature

_DRAW = np.dtype(
    [
        ("min_p_step", np.float64),
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("row", np.uint32),
        ("position", np.uint32),
        ("choice", np.uint32),
        ("temperature", np.float32),
        ("top_k", np.uint32),
        ("padding", np.uint32),
    ]
)
"""``min_p_step`` is added to the highest logit: lower ones are not drawn. ``top_k`` is 0 where it leaves all."""
DRAW_WORDS = _DRAW.itemsize // 4


class DrawPlan(NamedTuple):
    """The draws of a step, and what the host must know of them to launch what they need."""

    words: npt.NDArray[np.int32]
    """`DRAW_WORDS` a draw; those with top-p come first."""
    num_draws: int
    num_nuclei: int
    max_top_k: int
    has_min_p: bool


def is_plain(row: StepRow) -> bool:
    """Whether a row that samples can be sampled here: nothing changes its logits, and one token is all it wants."""
    params = row.sample
    assert params is not None
    is_edited = params.has_penalties or params.logit_bias or row.banned_tokens
    return not is_edited and row.num_choices == 1 and params.num_logprobs < 0


def plan_draws(rows: Sequence[StepRow], vocab_size: int) -> DrawPlan:
    """The draws of the plain rows of a step, one for each row of logits; greedy ones need none."""
    records = []
    for index, row in enumerate(rows):
        params = row.sample
        assert params is not None
        if params.temperature == 0:
            continue
        temperature = drawing_temperature(params)
        min_p_step = temperature * log(params.min_p) if params.min_p > 0 else -inf
        top_k = params.top_k if params.top_k < vocab_size else 0
        position, choice = row.sample_position, row.choice
        records.append((min_p_step, params.top_p, params.seed, index, position, choice, temperature, top_k, 0))
    records.sort(key=lambda record: record[1] == 1)
    draws = np.array(records, _DRAW)
    return DrawPlan(
        words=draws.view(np.int32),
        num_draws=len(draws),
        num_nuclei=int((draws["top_p"] < 1).sum()),
        max_top_k=int(draws["top_k"].max(initial=0)),
        has_min_p=bool((draws["min_p_step"] > -inf).any()),
    )


def sample_on_device(
    logits_BV: torch.Tensor,
    best_B: torch.Tensor,
    token_B: torch.Tensor,
    plan: DrawPlan,
    words: torch.Tensor,
    kernels: DeviceSamplingKernels,
) -> None:
    """Put the tokens that are drawn in the place of the likeliest ones.

    Args:
        logits_BV: float32.
        best_B: each row's highest logit.
        token_B: int64, the token that has it; written in place.
        words: those of ``plan`` on the device, int32.
    """
    if plan.num_draws == 0:
        return
    draws = _tensors(best_B, plan, words)
    if plan.max_top_k:
        draws = draws._replace(lowest=_top_k_limits(logits_BV, draws, plan.max_top_k, _top_k(words)))
    if plan.num_nuclei:
        found = kernels.find_nuclei(logits_BV, _nuclei(draws, plan.num_nuclei, words))
        draws.lowest[: plan.num_nuclei] = found.lowest
        draws.last_equal[: plan.num_nuclei] = found.last_equal
    # Of logits that are not finite, which the host learns of later, any number may come; the next step takes a token.
    drawn_D = kernels.draw(logits_BV, draws).long().clamp_(0, logits_BV.shape[1] - 1)
    token_B[draws.row.long()] = drawn_D


def _tensors(best_B: torch.Tensor, plan: DrawPlan, words: torch.Tensor) -> DrawTensors:
    """The draws, as far as min-p limits them."""
    words_DW = words.view(plan.num_draws, DRAW_WORDS)
    pairs_DP = words.view(torch.int64).view(plan.num_draws, DRAW_WORDS // 2)
    row_D, position_D, choice_D, temperature_D = words_DW[:, 6:10].unbind(dim=1)
    best_D = best_B.index_select(0, row_D)
    if plan.has_min_p:
        lowest_D = (best_D.double() + pairs_DP[:, 0].view(torch.float64)).float()
    else:
        lowest_D = torch.full_like(best_D, -inf)
    return DrawTensors(
        row=row_D,
        seed=pairs_DP[:, 2],
        position=position_D,
        choice=choice_D,
        best=best_D,
        temperature=temperature_D.view(torch.float32),
        lowest=lowest_D,
        last_equal=torch.full_like(row_D, ALL_KEPT.last_equal),
    )


def _top_k(words: torch.Tensor) -> torch.Tensor:
    return words.view(-1, DRAW_WORDS)[:, 10]


def _top_k_limits(logits_BV: torch.Tensor, draws: DrawTensors, max_top_k: int, top_k_D: torch.Tensor) -> torch.Tensor:
    """The k-th highest logit, or the limit there was if that is higher or there is no k."""
    highest_DC = logits_BV.index_select(0, draws.row).topk(max_top_k, dim=-1).values
    limit_D = highest_DC.gather(1, (top_k_D.long() - 1).clamp(min=0)[:, None])[:, 0]
    return torch.where(top_k_D > 0, torch.maximum(limit_D, draws.lowest), draws.lowest)


def _nuclei(draws: DrawTensors, num_nuclei: int, words: torch.Tensor) -> NucleusTensors:
    top_p_D = words.view(torch.float64).view(-1, DRAW_WORDS // 2)[:, 1]
    fields = (draws.row, top_p_D, draws.best, draws.temperature, draws.lowest)
    return NucleusTensors(*(field[:num_nuclei] for field in fields))
