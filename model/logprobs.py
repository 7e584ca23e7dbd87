"""Log probabilities of sampled and of prompt tokens: those of the model's own distribution, whatever sampling does.

Called by `pdserve.model.sampling` and the executors. Keeps no state.

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
    """Of each row, most likely first."""
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
    num_rows = logits_RV.shape[0]
    if num_tokens == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=logits_RV.device)
    lowest_R1 = logits_RV.topk(num_tokens, dim=-1).values[:, -1:]
    row_N, id_N = (logits_RV >= lowest_R1).nonzero(as_tuple=True)  # by row, then by id
    count_R = torch.bincount(row_N, minlength=num_rows)
    column_N = torch.arange(len(row_N), device=row_N.device) - (count_R.cumsum(0) - count_R)[row_N]
    # Of equals at the end there may be more than wanted, in some rows: padded, sorted with ids in order, and cut.
    padded_RC = logits_RV.new_full((num_rows, int(count_R.max())), -torch.inf)
    padded_RC[row_N, column_N] = logits_RV[row_N, id_N]
    id_RC = torch.zeros_like(padded_RC, dtype=torch.int64)
    id_RC[row_N, column_N] = id_N
    order_RC = padded_RC.argsort(dim=-1, descending=True, stable=True)
    return id_RC.gather(1, order_RC[:, :num_tokens])
