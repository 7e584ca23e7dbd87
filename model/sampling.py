"""Turns a step's logits into tokens: bans, bias and penalties, greedy or a draw from what truncation leaves.

Called by the executors with one row of logits per sampled row of the batch. A row's result depends on its own logits,
parameters, history, position and choices only, never on the other rows, the worker or the attempt. Keeps no state.

The order is that of vLLM: the edits of `pdserve.model.logit_edits`, temperature, `pdserve.model.truncation`, and a draw
by Gumbel-max (`pdserve.kernels.torch_gumbel`). Log probabilities are those of the model's own distribution, before any
of it. A batch pays for what its rows use: a greedy one for a maximum.

Shape legend: B rows of the step, R of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import torch

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import SampledToken
from pdserve.kernels.operations import ALL_KEPT, Draw
from pdserve.kernels.selection import select_sampling_kernels
from pdserve.model.logit_edits import add_bias, ban, penalise
from pdserve.model.logprobs import raw_logprobs
from pdserve.model.token_counts import TokenCounts
from pdserve.model.truncation import kept_tokens, truncates

_MIN_TEMPERATURE = 1e-6
"""Lower temperatures are taken as this one, lest the division overflow."""


class SamplingRow(NamedTuple):
    """How to sample after one row of logits."""

    params: SamplingParams
    position: int
    """Absolute position of the token to be sampled, prompt included."""
    choice: int = 0
    num_choices: int = 1
    """Tokens to sample: for ``choice`` and the choices after it."""
    banned_tokens: Sequence[int] = ()
    counts: TokenCounts | None = None
    """What came before, where ``params.has_penalties``."""


@torch.inference_mode()
def sample(logits_BV: torch.Tensor, rows: Sequence[SamplingRow]) -> list[list[SampledToken]]:
    """Choose ``num_choices`` tokens for each row.

    Args:
        logits_BV: ``[B, V]``, any float dtype, any device; compared and summed in fp32 or better. Of rows with bans,
            bias or penalties the logits may be changed in place.
        rows: B of them.

    Raises:
        RuntimeError: a row's logits hold NaN or +inf, or nothing but -inf; or all of its tokens are banned.
    """
    assert logits_BV.shape[0] == len(rows)
    logits_BV = logits_BV.float()
    best, likeliest = _highest(logits_BV)
    asking = [index for index, row in enumerate(rows) if row.params.num_logprobs >= 0]
    raw = None
    if asking:
        asking_RV = logits_BV if len(asking) == len(rows) else logits_BV[asking]
        raw = raw_logprobs(asking_RV, [rows[index].params.num_logprobs for index in asking])
    if _edit(logits_BV, rows):
        best, likeliest = _highest(logits_BV)
    answers = [[token] * row.num_choices for token, row in zip(likeliest, rows, strict=True)]
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        draw_tokens = select_sampling_kernels(logits_BV).draw_tokens
        draws = _draws(logits_BV, best, rows, drawn)
        for draw, token in zip(draws, draw_tokens(logits_BV, draws), strict=True):
            answers[draw.row][draw.choice - rows[draw.row].choice] = token
    sampled = [[SampledToken(token, None) for token in tokens] for tokens in answers]
    if raw is not None:
        places = [place for place, index in enumerate(asking) for _ in answers[index]]
        logprobs = iter(raw.of(places, [token for index in asking for token in answers[index]]))
        for index in asking:
            sampled[index] = [SampledToken(token, next(logprobs)) for token in answers[index]]
    return sampled


def drawing_temperature(params: SamplingParams) -> float:
    """That of a draw, where it is over 0."""
    return max(params.temperature, _MIN_TEMPERATURE)


def _edit(logits_BV: torch.Tensor, rows: Sequence[SamplingRow]) -> bool:
    """Apply the rows' bans, bias and penalties, in place; returns whether there were any."""
    bans = [(index, row.banned_tokens) for index, row in enumerate(rows) if row.banned_tokens]
    biases = [(index, row.params.logit_bias) for index, row in enumerate(rows) if row.params.logit_bias]
    seen = [(index, row.params, row.counts) for index, row in enumerate(rows) if row.counts is not None]
    if bans:
        ban(logits_BV, bans)
    if biases:
        add_bias(logits_BV, biases)
    if seen:
        penalise(logits_BV, seen)
    return bool(bans or biases or seen)


def _draws(
    logits_BV: torch.Tensor, best: Sequence[float], rows: Sequence[SamplingRow], drawn: Sequence[int]
) -> list[Draw]:
    """The draws of some rows, one for each of their choices, from what truncation leaves."""
    temperatures = {index: drawing_temperature(rows[index].params) for index in drawn}
    cut = [index for index in drawn if truncates(rows[index].params)]
    kept = dict.fromkeys(drawn, ALL_KEPT)
    if cut:
        logits_RV = logits_BV if len(cut) == len(rows) else logits_BV[cut]
        of_cut = [best[index] for index in cut], [rows[index].params for index in cut]
        kept.update(zip(cut, kept_tokens(logits_RV, *of_cut, [temperatures[index] for index in cut]), strict=True))
    return [
        Draw(index, row.params.seed, row.position, choice, best[index], temperatures[index], kept[index])
        for index, row in ((index, rows[index]) for index in drawn)
        for choice in range(row.choice, row.choice + row.num_choices)
    ]


def _highest(logits_BV: torch.Tensor) -> tuple[list[float], list[int]]:
    """Each row's highest logit and the first token that has it.

    Raises:
        RuntimeError: a highest logit, which is NaN if any of the row is, is no finite number.
    """
    if logits_BV.device.type == "cpu":
        token_B = torch.from_numpy(logits_BV.numpy().argmax(axis=-1))  # a small part of the time that torch takes
        best_B = logits_BV.gather(1, token_B[:, None])[:, 0]
    else:
        best_B, token_B = logits_BV.max(dim=-1)
    best, tokens = best_B.tolist(), token_B.tolist()
    bad = [f"row {row}: {value}" for row, value in enumerate(best) if not isfinite(value)]
    if bad:
        raise RuntimeError(f"logits cannot be sampled, their maximum is not finite ({', '.join(bad)})")
    return best, tokens
