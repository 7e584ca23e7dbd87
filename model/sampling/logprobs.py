"""Log probabilities of sampled and prompt tokens under the model's own distribution, before any sampling parameter.

Called by `pdserve.model.sampling.sampling` and the executors. Keeps no state.

Shape legend: R rows, T prompt tokens, E hidden size, V vocabulary, K likely tokens to report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pdserve.contracts.step import TokenLogprobs

_ROWS_AT_ONCE = 128


class RawLogprobs(NamedTuple):
    """Log probabilities of rows, before any token is chosen."""

    values: torch.Tensor
    """float32 ``[R, V]``."""
    top: list[tuple[tuple[int, float], ...]]
    """(token id, log probability) of each row's most likely tokens, most likely first."""

    def of(self, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Return the log probability of one token of each row, and the row's most likely ones."""
        chosen = self.values[range(len(tokens)), list(tokens)].tolist()
        return [TokenLogprobs(logprob, top) for logprob, top in zip(chosen, self.top, strict=True)]


def raw_logprobs(logits_RV: torch.Tensor, num_top: Sequence[int]) -> RawLogprobs:
    """Compute log probabilities of every token, and select the most likely ones.

    Args:
        logits_RV: float32, as the model computed them.
        num_top: tokens to select in each row; at most the vocabulary.
    """
    logprob_RV = torch.log_softmax(logits_RV, dim=-1)
    ids_RK = most_likely(logits_RV, min(max(num_top), logits_RV.shape[1]))
    rows = zip(ids_RK.tolist(), logprob_RV.gather(1, ids_RK).tolist(), num_top, strict=True)
    return RawLogprobs(
        logprob_RV, [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in rows]
    )


def logprobs_in_pieces(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden_TE: torch.Tensor, tokens: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Log probability of one token after each of many hidden states; computes a few rows of logits at a time.

    Args:
        logits_of: turns hidden states ``[R, E]`` into float32 logits ``[R, V]``.
        hidden_TE: ``[T, E]``.
        tokens: T token ids.
        num_top: likely tokens to report with each.
    """
    entries: list[TokenLogprobs] = []
    for piece_RE in pieces_of(hidden_TE):
        piece = tokens[len(entries) : len(entries) + len(piece_RE)]
        entries += raw_logprobs(logits_of(piece_RE), [num_top] * len(piece)).of(piece)
    return entries


def pieces_of(hidden_TE: torch.Tensor) -> Sequence[torch.Tensor]:
    """Hidden states whose logits are computed at once: ``[R, E]`` each."""
    return torch.split(hidden_TE, _ROWS_AT_ONCE)


def most_likely(logits_RV: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the ids of each row's highest logits, int64 ``[R, num_tokens]``: highest first, ties to the lowest id."""
    num_wanted = min(num_tokens + 1, logits_RV.shape[1])
    highest = logits_RV.topk(num_wanted, dim=-1)
    ids_RK = _by_logit_then_id(highest.values[:, :num_tokens], highest.indices[:, :num_tokens])
    if num_tokens and num_wanted > num_tokens:
        has_tie_R = highest.values[:, num_tokens - 1] == highest.values[:, num_tokens]
        for row in has_tie_R.nonzero().flatten().tolist():  # topk picks any of equals at the end
            logits_V = logits_RV[row]
            ids_N = (logits_V >= highest.values[row, num_tokens - 1]).nonzero().flatten()
            ids_RK[row] = _by_logit_then_id(logits_V[None, ids_N], ids_N[None])[0, :num_tokens]
    return ids_RK


def _by_logit_then_id(logits_RN: torch.Tensor, ids_RN: torch.Tensor) -> torch.Tensor:
    """Sort ids by logit, highest first, and equals by id."""
    by_id_RN = ids_RN.argsort(dim=-1)
    order_RN = logits_RN.gather(1, by_id_RN).argsort(dim=-1, descending=True, stable=True)
    return ids_RN.gather(1, by_id_RN.gather(1, order_RN))
