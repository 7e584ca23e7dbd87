"""Log probabilities of sampled and of prompt tokens under the model's own distribution, whatever sampling does.

Called by `pdserve.model.sampling.sampling` and the executors. Keeps no state.

Shape legend: R rows, T prompt tokens, E hidden size, V vocabulary, K tokens to name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pdserve.contracts.step import TokenLogprobs

_ROWS_AT_ONCE = 128


class RawLogprobs(NamedTuple):
    """Log probabilities of some rows, before any token is chosen."""

    values: torch.Tensor
    """float32 ``[R, V]``."""
    top_ids: list[list[int]]
    """By row, most likely first."""
    top_logprobs: list[list[float]]

    def of(self, rows: Sequence[int], tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Entry by entry: the log probability of a token of a row, and the row's likely ones."""
        chosen = self.values[list(rows), list(tokens)].tolist()
        top = [tuple(zip(*pair, strict=True)) for pair in zip(self.top_ids, self.top_logprobs, strict=True)]
        return [TokenLogprobs(logprob, top[row]) for logprob, row in zip(chosen, rows, strict=True)]


def raw_logprobs(logits_RV: torch.Tensor, num_top: Sequence[int]) -> RawLogprobs:
    """Log probabilities of every token, and the most likely ones by name.

    Args:
        logits_RV: float32, as the model computed them.
        num_top: of each row, how many tokens to name; the whole vocabulary if it has fewer.
    """
    logprob_RV = torch.log_softmax(logits_RV, dim=-1)
    ids_RK = most_likely(logits_RV, min(max(num_top), logits_RV.shape[1]))
    ids, values = ids_RK.tolist(), logprob_RV.gather(1, ids_RK).tolist()
    return RawLogprobs(
        logprob_RV,
        [row[:count] for row, count in zip(ids, num_top, strict=True)],
        [row[:count] for row, count in zip(values, num_top, strict=True)],
    )


def logprobs_in_pieces(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden_TE: torch.Tensor, tokens: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Log probability of one token after each of many hidden states, whose logits never exist all at once.

    Args:
        logits_of: turns hidden states ``[R, E]`` into float32 logits ``[R, V]``.
        hidden_TE: ``[T, E]``.
        tokens: T of them.
        num_top: how many likely tokens to name beside each.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, len(tokens), _ROWS_AT_ONCE):
        piece = tokens[start : start + _ROWS_AT_ONCE]
        raw = raw_logprobs(logits_of(hidden_TE[start : start + _ROWS_AT_ONCE]), [num_top] * len(piece))
        entries += raw.of(range(len(piece)), piece)
    return entries


def most_likely(logits_RV: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Ids of each row's highest logits, int64 ``[R, num_tokens]``: highest first, ties to the lowest id."""
    num_wanted = min(num_tokens + 1, logits_RV.shape[1])
    highest = logits_RV.topk(num_wanted, dim=-1)
    ids_RK = _by_logit_then_id(highest.values[:, :num_tokens], highest.indices[:, :num_tokens])
    if num_tokens and num_wanted > num_tokens:
        has_tie_R = highest.values[:, num_tokens - 1] == highest.values[:, num_tokens]
        for row in has_tie_R.nonzero().flatten().tolist():  # of equals at the end, which of them is left to chance
            logits_V = logits_RV[row]
            ids_N = (logits_V >= highest.values[row, num_tokens - 1]).nonzero().flatten()
            ids_RK[row] = _by_logit_then_id(logits_V[None, ids_N], ids_N[None])[0, :num_tokens]
    return ids_RK


def _by_logit_then_id(logits_RN: torch.Tensor, ids_RN: torch.Tensor) -> torch.Tensor:
    """The ids, those of higher logits first and equals in ascending order."""
    by_id_RN = ids_RN.argsort(dim=-1)
    order_RN = logits_RN.gather(1, by_id_RN).argsort(dim=-1, descending=True, stable=True)
    return ids_RN.gather(1, by_id_RN.gather(1, order_RN))
