"""Rows of logits that are sampled on the host, and the limits within which they are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import SampledToken, StepRow
from pdserve.kernels.operations import DrawTensors, SamplingKernels
from pdserve.kernels.selection import CPU_SAMPLING
from pdserve.model.sampling.sampling import Sampler, likeliest, plan_draws


def sampling_row(
    params: SamplingParams,
    position: int = 0,
    choice: int = 0,
    *,
    banned: Sequence[int] = (),
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
) -> StepRow:
    return StepRow(
        sequence_id=0,
        tokens=[1],
        cached_length=0,
        block_table=[0],
        sample=params,
        sample_position=position,
        choice=choice,
        banned_tokens=banned,
        history=[*prompt, *answer],
        num_prompt_tokens=len(prompt),
    )


def sample(
    logits_BV: torch.Tensor, rows: Sequence[StepRow], kernels: SamplingKernels = CPU_SAMPLING
) -> list[SampledToken]:
    """As an executor has them sampled. Logits of rows with bans, bias or penalties are changed in place."""
    draws = plan_draws(rows, logits_BV.shape[1])
    best_B, token_B = likeliest(logits_BV)
    words = torch.from_numpy(draws.words)
    best_B, logprobs = Sampler(kernels).sample(logits_BV, best_B, token_B, rows, draws, words, _no_previous_token)
    assert best_B.isfinite().all()
    return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(token_B.tolist())]


def drawn_sets(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], kernels: SamplingKernels = CPU_SAMPLING
) -> list[set[int]]:
    """The tokens that each row may draw."""
    seen: list[DrawTensors] = []

    def draw_tokens(logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
        seen.append(draws)
        return torch.zeros_like(draws.row)

    sample(logits_BV, [sampling_row(one) for one in params], kernels._replace(draw_tokens=draw_tokens))
    [draws] = seen
    ids_V = torch.arange(logits_BV.shape[1])
    answer: list[set[int]] = [set()] * len(params)
    for row, lowest, last_equal in zip(
        draws.row.tolist(), draws.lowest.tolist(), draws.last_equal.tolist(), strict=True
    ):
        logits_V = logits_BV[row]
        is_kept_V = (logits_V > lowest) | ((logits_V == lowest) & (ids_V <= last_equal))
        answer[row] = set(is_kept_V.nonzero().flatten().tolist())
    return answer


def _no_previous_token(row: int) -> int:
    raise AssertionError("no row follows a token of the previous step")
