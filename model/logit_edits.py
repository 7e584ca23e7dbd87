"""What a request changes in its logits before a token is drawn: banned tokens, bias, penalties. In this order.

Called by `pdserve.model.sampling`. Keeps no state; what came before is counted by `pdserve.model.token_counts`. Only
the logits that change are touched: N banned, biased or seen tokens cost N, whatever the vocabulary's size.

The order and the formulas are those of vLLM and OpenAI's API: bias is added; then the repetition penalty divides or
multiplies (Keskar et al., "CTRL", 2019, section 4.1); then the frequency penalty is subtracted once for each time that
the token is in the answer, and the presence penalty once.

Shape legend: B rows, V vocabulary, N logits that change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.request import SamplingParams
from pdserve.model.token_counts import TokenCounts


def add_bias(logits_BV: torch.Tensor, biases: Sequence[tuple[int, tuple[tuple[int, float], ...]]]) -> None:
    """Add to some logits, in place.

    Args:
        biases: (row, its ``SamplingParams.logit_bias``).
    """
    places = _to(logits_BV, np.array([(row, token) for row, entries in biases for token, _ in entries])).T
    bias_N = _to(logits_BV, np.array([bias for _, entries in biases for _, bias in entries], np.float32))
    logits_BV[places[0], places[1]] += bias_N


def ban(logits_BV: torch.Tensor, bans: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Make some tokens impossible, in place.

    Args:
        bans: (row, tokens that must not be drawn).
    """
    places = _to(logits_BV, np.array([(row, token) for row, tokens in bans for token in tokens])).T
    logits_BV[places[0], places[1]] = -torch.inf


def penalise(logits_BV: torch.Tensor, seen: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Apply repetition, frequency and presence penalties, in place. A finite logit stays finite.

    Args:
        seen: (row, its parameters, which tokens came before).
    """
    lengths = [len(counts.tokens) for _, _, counts in seen]

    def spread(values: Sequence[float]) -> torch.Tensor:
        return _to(logits_BV, np.repeat(np.array(values, np.float32), lengths))

    row_N = _to(logits_BV, np.repeat(np.array([row for row, _, _ in seen]), lengths))
    token_N = _to(logits_BV, np.concatenate([counts.tokens for _, _, counts in seen]))
    count_N = _to(logits_BV, np.concatenate([counts.in_answer for _, _, counts in seen]))
    logit_N = logits_BV[row_N, token_N]
    repetition_N = spread([params.repetition_penalty for _, params, _ in seen])
    logit_N = torch.where(logit_N > 0, logit_N / repetition_N, logit_N * repetition_N)
    logit_N -= spread([params.frequency_penalty for _, params, _ in seen]) * count_N
    logit_N -= spread([params.presence_penalty for _, params, _ in seen]) * (count_N > 0)
    logits_BV[row_N, token_N] = logit_N.clamp_(max=torch.finfo(logit_N.dtype).max)


def _to(logits_BV: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(values).to(logits_BV.device)
