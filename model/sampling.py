"""Turns a step's logits into tokens: greedy, or temperature, top-k, top-p and a draw, with log probabilities.

Called by the executors with one row of logits per sampled row of the batch. A row's result depends on its own logits,
parameters, position and choice only, never on the other rows, the worker or the attempt. Keeps no state.

A draw is Gumbel-max: the token with the highest ``logit / temperature + noise``, ties to the lowest id. The noise of a
token is ``-log(-log(u))``, where u is word ``token % 4`` of Philox4x32-10 with the seed as key and
``(position, choice, stream, token // 4)`` as counter. Every (seed, position, choice, token) has noise of its own, so a
shard of the vocabulary or a resumed answer draws the same. The words are exact everywhere; noise is computed in
float64, so that the last bit of a device's logarithm decides nothing.

Shape legend: B rows of the step, R rows being drawn, V vocabulary, G groups of 4 token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import SampledToken, TokenLogprobs
from pdserve.model.philox import Counter, Words, philox4x32, uniform

TOKEN_STREAM = 0
"""The counter's third word for drawing a token. Other uses of a request's seed take other streams."""

_LANES = 4
_WORD = 0xFFFFFFFF
_MIN_TEMPERATURE = 1e-6
"""Lower temperatures are taken as this one, lest the division overflow."""
_NOISE_RANGE = 26.01
"""Just over the largest minus the smallest noise that a 32-bit word can give (22.88 + 3.13): a token whose scaled logit
is further than this below the best one cannot win, so its noise is not computed."""


def sample(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], choices: Sequence[int]
) -> list[SampledToken]:
    """Choose one token for each row.

    Args:
        logits_BV: ``[B, V]``, any float dtype, any device; compared and summed in fp32 or better.
        params: one per row.
        positions: absolute position of the token to be sampled, prompt included.
        choices: index of the choice (n > 1) that the row belongs to.

    Raises:
        RuntimeError: a row's logits hold NaN or +inf, or nothing but -inf.
    """
    assert logits_BV.shape[0] == len(params) == len(positions) == len(choices)
    logits_BV = logits_BV.float()
    best_B, token_B = logits_BV.max(dim=-1)  # the first of equals
    _check_finite(best_B)
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if drawn:
        token_B[drawn] = _draw(
            logits_BV[drawn],
            best_B[drawn],
            [params[row] for row in drawn],
            [positions[row] for row in drawn],
            [choices[row] for row in drawn],
        )
    tokens = token_B.tolist()
    logprobs = _logprobs(logits_BV, tokens, params)
    return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def kept_tokens(logits_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Which tokens survive top-k, then top-p, at the rows' temperatures.

    Top-k keeps every token whose logit is at least the k-th highest: equals of the k-th all stay. Top-p then keeps the
    smallest prefix, in order of (probability descending, id ascending), with at least ``top_p`` of the probability that
    top-k left.

    Args:
        logits_RV: fp32 ``[R, V]``.

    Returns:
        bool ``[R, V]``, at least one true in each row.
    """
    vocab_size = logits_RV.shape[1]
    kept_RV = torch.ones_like(logits_RV, dtype=torch.bool)
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if rows:
        kept_RV[rows] = _top_k_mask(logits_RV[rows], [params[row].top_k for row in rows])
    rows = [row for row, p in enumerate(params) if p.top_p < 1]
    if rows:
        left_RV = logits_RV[rows].masked_fill(~kept_RV[rows], -torch.inf)
        scaled_RV = _scale(left_RV, left_RV.amax(dim=-1), [params[row].temperature for row in rows])
        kept_RV[rows] = _top_p_mask(scaled_RV.double().exp(), [params[row].top_p for row in rows])
    return kept_RV


def _check_finite(best_B: torch.Tensor) -> None:
    """Raise if a row's highest logit, which is NaN if any of them is, is no finite number."""
    bad = [(row, best) for row, best in enumerate(best_B.tolist()) if not isfinite(best)]
    if bad:
        values = ", ".join(f"row {row}: {best}" for row, best in bad)
        raise RuntimeError(f"logits cannot be sampled, their maximum is not finite ({values})")


def _scale(logits_RV: torch.Tensor, best_R: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """``(logit - best) / temperature``: at most 0, and never NaN."""
    temperature_R = logits_RV.new_tensor([max(t, _MIN_TEMPERATURE) for t in temperatures])
    return (logits_RV - best_R[:, None]) / temperature_R[:, None]


def _top_k_mask(logits_RV: torch.Tensor, top_ks: Sequence[int]) -> torch.Tensor:
    highest_RK = logits_RV.topk(max(top_ks), dim=-1).values
    last_R1 = torch.tensor(top_ks, device=logits_RV.device)[:, None] - 1
    return logits_RV >= highest_RK.gather(1, last_R1)


def _top_p_mask(weight_RV: torch.Tensor, top_ps: Sequence[float]) -> torch.Tensor:
    """Smallest prefix of the tokens, heaviest first, with a share ``top_p < 1`` of the row's weight (float64)."""
    top_p_R1 = weight_RV.new_tensor(top_ps)[:, None]
    total_R1 = weight_RV.sum(dim=-1, keepdim=True)
    # Tokens lighter than (1 - p) / V of the total weigh less than 1 - p together, so the prefix ends before them and
    # only the others need sorting. Half of that leaves room for rounding.
    is_candidate_RV = weight_RV >= total_R1 * (1 - top_p_R1) / (2 * weight_RV.shape[1])
    num_candidates = int(is_candidate_RV.sum(dim=-1).max())
    heaviest_RC = weight_RV.topk(num_candidates, dim=-1).values
    # The last candidate is left out: where rounding lets no sum reach the share, all candidates are kept.
    num_kept_R1 = (heaviest_RC.cumsum(dim=-1)[:, :-1] < top_p_R1 * total_R1).sum(dim=-1, keepdim=True) + 1
    lightest_R1 = heaviest_RC.gather(1, num_kept_R1 - 1)
    is_heavier_RV = weight_RV > lightest_R1
    is_equal_RV = weight_RV == lightest_R1
    num_equals_R1 = num_kept_R1 - is_heavier_RV.sum(dim=-1, keepdim=True)
    return is_heavier_RV | (is_equal_RV & (is_equal_RV.cumsum(dim=-1) <= num_equals_R1))


def _draw(
    logits_RV: torch.Tensor,
    best_R: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    choices: Sequence[int],
) -> torch.Tensor:
    """Token ids ``[R]``, drawn by Gumbel-max from what truncation leaves."""
    scaled_RV = _scale(logits_RV, best_R, [p.temperature for p in params])
    scaled_RV.masked_fill_(~kept_tokens(logits_RV, params), -torch.inf)
    num_groups = -(-scaled_RV.shape[1] // _LANES)
    missing = num_groups * _LANES - scaled_RV.shape[1]
    scaled_G4 = torch.nn.functional.pad(scaled_RV, (0, missing), value=-torch.inf).view(-1, _LANES)
    group_N = (scaled_G4 >= -_NOISE_RANGE).any(dim=-1).nonzero().flatten()  # of all rows, one row after the other
    noise_N4 = _noise(params, positions, choices, group_N.numpy(force=True), num_groups).to(scaled_RV.device)
    score_G4 = torch.full_like(scaled_G4, -torch.inf, dtype=torch.float64)
    score_G4[group_N] = scaled_G4[group_N] + noise_N4
    return score_G4.view(len(params), -1).argmax(dim=-1)  # the first of equals


def _noise(
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    choices: Sequence[int],
    group_N: npt.NDArray[np.int64],
    num_groups: int,
) -> torch.Tensor:
    """Gumbel noise, float64 ``[N, 4]``, for N groups of 4 token ids; each row has ``num_groups`` of them."""
    row_N, index_N = np.divmod(group_N, num_groups)

    def of_row(values: Iterable[int]) -> Words:
        return np.take(np.fromiter(values, np.uint64, len(params)), row_N)

    words_N4 = philox4x32(
        Counter(
            of_row(positions),
            of_row(choices),
            np.full(len(group_N), TOKEN_STREAM, np.uint64),
            index_N.astype(np.uint64),
        ),
        of_row(p.seed & _WORD for p in params),
        of_row(p.seed >> 32 & _WORD for p in params),
    )
    return torch.from_numpy(uniform(words_N4)).log_().neg_().log_().neg_()


def _logprobs(
    logits_BV: torch.Tensor, tokens: Sequence[int], params: Sequence[SamplingParams]
) -> dict[int, TokenLogprobs]:
    """Log probabilities of the rows that ask for them, by row, before temperature and truncation."""
    rows = [row for row, p in enumerate(params) if p.num_logprobs >= 0]
    if not rows:
        return {}
    logprob_RV = torch.log_softmax(logits_BV[rows], dim=-1)
    answer = {}
    for row, logprob_V in zip(rows, logprob_RV, strict=True):
        ids = _most_likely(logits_BV[row], params[row].num_logprobs)
        top = tuple(zip(ids.tolist(), logprob_V[ids].tolist(), strict=True))
        answer[row] = TokenLogprobs(float(logprob_V[tokens[row]]), top)
    return answer


def _most_likely(logits_V: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Ids of the highest logits, highest first, ties to the lowest id; as many as there are, if that is fewer."""
    num_tokens = min(num_tokens, logits_V.shape[0])
    if num_tokens == 0:
        return torch.empty(0, dtype=torch.int64, device=logits_V.device)
    threshold = logits_V.topk(num_tokens).values[-1]
    ids = (logits_V >= threshold).nonzero().flatten()
    return ids[logits_V[ids].argsort(descending=True, stable=True)[:num_tokens]]
