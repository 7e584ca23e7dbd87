"""Turns a step's logits into tokens: bans, bias and penalties, greedy or a draw from what truncation leaves.

Called by the executors with one row of logits per sampled row of the batch. A row's result depends on its own logits,
parameters, history, position and choices only, never on the other rows, the worker or the attempt. Keeps no state.

The order is that of vLLM: the edits of `pdserve.model.logit_edits`, temperature, `pdserve.model.truncation`, and the
draw of `pdserve.model.gumbel`. Log probabilities are those of the model's own distribution, before any of it. A batch
pays for what its rows use: the greedy ones for a maximum.

Shape legend: B rows of the step, R rows being drawn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import NamedTuple

import torch

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import SampledToken
from pdserve.model.gumbel import Draw, draw_tokens
from pdserve.model.logit_edits import add_bias, ban, penalise
from pdserve.model.logprobs import raw_logprobs
from pdserve.model.token_counts import TokenCounts
from pdserve.model.truncation import kept_tokens, scale, truncates


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
    best_B, token_B = logits_BV.max(dim=-1)  # the first of equals
    _check_finite(best_B)
    asking = [index for index, row in enumerate(rows) if row.params.num_logprobs >= 0]
    raw = raw_logprobs(logits_BV[asking], [rows[index].params.num_logprobs for index in asking]) if asking else None
    if _edit(logits_BV, rows):
        best_B, token_B = logits_BV.max(dim=-1)
        _check_finite(best_B)
    answers = [[token] * row.num_choices for token, row in zip(token_B.tolist(), rows, strict=True)]
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        is_all = len(drawn) == len(rows)
        drawn_rows = [rows[index] for index in drawn]
        drawn_tokens = _draw(logits_BV if is_all else logits_BV[drawn], best_B if is_all else best_B[drawn], drawn_rows)
        for index, row in zip(drawn, drawn_rows, strict=True):
            answers[index] = [next(drawn_tokens) for _ in range(row.num_choices)]
    sampled = [[SampledToken(token, None) for token in tokens] for tokens in answers]
    if raw is not None:
        places = [place for place, index in enumerate(asking) for _ in answers[index]]
        logprobs = iter(raw.of(places, [token for index in asking for token in answers[index]]))
        for index in asking:
            sampled[index] = [SampledToken(token, next(logprobs)) for token in answers[index]]
    return sampled


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


def _draw(logits_RV: torch.Tensor, best_R: torch.Tensor, rows: Sequence[SamplingRow]) -> Iterator[int]:
    """The drawn tokens of all rows and their choices, in order."""
    scaled_RV = scale(logits_RV, best_R, [row.params for row in rows])
    cut = [index for index, row in enumerate(rows) if truncates(row.params, logits_RV.shape[1])]
    if cut:
        kept_RV = kept_tokens(logits_RV[cut], [rows[index].params for index in cut])
        scaled_RV[cut] = scaled_RV[cut].masked_fill_(~kept_RV, -torch.inf)
    draws = [
        Draw(index, row.params.seed, row.position, choice)
        for index, row in enumerate(rows)
        for choice in range(row.choice, row.choice + row.num_choices)
    ]
    return iter(draw_tokens(scaled_RV, draws))


def _check_finite(best_B: torch.Tensor) -> None:
    """Raise if a row's highest logit, which is NaN if any of them is, is no finite number."""
    bad = [(row, best) for row, best in enumerate(best_B.tolist()) if not isfinite(best)]
    if bad:
        values = ", ".join(f"row {row}: {best}" for row, best in bad)
        raise RuntimeError(f"logits cannot be sampled, their maximum is not finite ({values})")
