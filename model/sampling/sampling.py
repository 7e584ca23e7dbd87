"""Samples tokens from the logits of a step's rows: masks, bans, bias, penalties, then the likeliest token or a draw.

The executor owns a `Sampler` and packs a step's draws (`plan_draws`) with the step's other inputs. A row's token
depends only on the row's logits, parameters, history, position and choice, never on other rows, the worker or the
attempt. Parameters and tokens are tensors on the logits' device. The host waits for the device only in steps with
penalties, grammars or log probabilities.

The order is vLLM's: grammars, bans and bias, penalties, temperature, min-p and top-k, top-p, and a draw by Gumbel-max
(`pdserve.kernels.torch.sampling`). Log probabilities come from the model's raw distribution. Every truncation keeps a
prefix of the most likely tokens, so one threshold per row describes it and no mask of vocabulary size is allocated. A
batch pays only for the parameters that its rows use: a greedy batch takes one maximum.

- Grammars and bans make tokens impossible; bias is added. The repetition penalty then divides or multiplies (Keskar et
  al., "CTRL", 2019, section 4.1), the frequency penalty is subtracted once per occurrence in the answer, and the
  presence penalty once. The cost of N banned, biased or seen tokens is N, whatever the vocabulary's size.
- Min-p keeps tokens at least ``min_p`` times as likely as the most likely one. Top-k keeps tokens whose logit is at
  least the k-th highest, ties included. Top-p then keeps the smallest prefix, in order of (logit descending, id
  ascending), that holds at least ``top_p`` of the remaining probability.

Shape suffixes: B rows of logits, V vocabulary, D draws, K draws with top-k, N logits to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepRow, TokenLogprobs
from pdserve.kernels.operations import LAST_ID, DrawTensors, SamplingKernels, TopPTensors
from pdserve.model.sampling.grammars import GrammarMatchers
from pdserve.model.sampling.logprobs import RawLogprobs, raw_logprobs
from pdserve.model.sampling.token_counts import TokenCountCache, TokenCounts

MAX_DRAW_WORDS = 12
"""Upper limit of 32-bit words per draw."""

_MIN_TEMPERATURE = 1e-6
"""Lower bound on the temperature; the division would overflow below it."""

_ADDED_BY_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0.0, -inf
).astype(np.float32)
"""``[256, 8]``: what is added to the logits of eight tokens with these bits of a mask."""


class DrawPlan(NamedTuple):
    """Draws of a step, with the counts that the host needs to launch kernels."""

    words: npt.NDArray[np.int32]
    """Concatenated fields. For every draw: float64 (min-p's offset from the highest logit, top-p), a 64-bit seed, then
    32 bits each (row, position, choice, temperature). For every draw with top-k: index and k."""
    num_draws: int
    num_top_p: int
    """Draws with top-p come first."""
    max_top_k: int
    has_min_p: bool


def plan_draws(rows: Sequence[StepRow], vocab_size: int, num_guesses: Sequence[int] = ()) -> DrawPlan:
    """Plan the draws of sampling rows, one per row of logits; greedy rows need none.

    Args:
        num_guesses: of each row, those before the token to draw; none by default.
    """
    draws = [(index, row, row.sample) for index, row in enumerate(rows) if row.sample and row.sample.temperature > 0]
    if not draws:
        return _NO_DRAWS
    draws.sort(key=lambda draw: draw[2].top_p == 1)
    temperatures = [max(params.temperature, _MIN_TEMPERATURE) for _, _, params in draws]
    min_p_steps = [
        temperature * log(params.min_p) if params.min_p > 0 else -inf
        for temperature, (_, _, params) in zip(temperatures, draws, strict=True)
    ]
    positions = [row.sample_position + (num_guesses[index] if num_guesses else 0) for index, row, _ in draws]
    top_ks = [(index, params.top_k) for index, (_, _, params) in enumerate(draws) if 0 < params.top_k < vocab_size]
    fields = (
        np.array([*min_p_steps, *(params.top_p for _, _, params in draws)], np.float64),
        np.array([params.seed for _, _, params in draws], np.uint64),
        np.array([index for index, _, _ in draws], np.uint32),
        np.array(positions, np.uint32),
        np.array([row.choice for _, row, _ in draws], np.uint32),
        np.array(temperatures, np.float32),
        np.array(top_ks, np.uint32).T.ravel(),
    )
    return DrawPlan(
        words=np.concatenate([field.view(np.int32) for field in fields]),
        num_draws=len(draws),
        num_top_p=sum(params.top_p < 1 for _, _, params in draws),
        max_top_k=max((top_k for _, top_k in top_ks), default=0),
        has_min_p=any(params.min_p > 0 for _, _, params in draws),
    )


_NO_DRAWS = DrawPlan(np.zeros(0, np.int32), 0, 0, 0, False)


class Sampler:
    """Samples the rows of each step. Not thread-safe."""

    def __init__(self, kernels: SamplingKernels, matchers: GrammarMatchers | None = None) -> None:
        """
        Args:
            matchers: match the answers of rows with grammars; ``None`` if there are none.
        """
        self._kernels = kernels
        self.matchers = matchers
        self._token_counts = TokenCountCache()

    def sample(
        self,
        logits_BV: torch.Tensor,
        best_B: torch.Tensor,
        token_B: torch.Tensor,
        rows: Sequence[StepRow],
        draws: DrawPlan,
        words: torch.Tensor,
        previous_token: Callable[[int], int],
    ) -> tuple[torch.Tensor, dict[int, TokenLogprobs]]:
        """Replace each row's likeliest token in ``token_B`` by the token that its parameters choose.

        Returns each row's highest logit, float32 ``[B]``, and the log probabilities of the rows that request them. If
        the highest logit is not finite, the row cannot be sampled and its token is arbitrary.

        Args:
            logits_BV: float32; rows with grammars, bans, bias or penalties are modified in place.
            best_B, token_B: results of `likeliest`.
            rows: B sampling rows; one with guesses comes once for each of them, too.
            words: ``draws.words`` on the device, int32.
            previous_token: returns the token sampled by a row of the previous step; blocks until it is known.
        """
        raw = _raw_logprobs(logits_BV, rows)
        if self._edit(logits_BV, rows, previous_token):
            edited_B, edited_token_B = likeliest(logits_BV)
            best_B = torch.where(best_B.isfinite(), edited_B, best_B)
            token_B.copy_(edited_token_B)
        if draws.num_draws:
            draw_into(token_B, logits_BV, best_B, draws, words, self._kernels)
        if raw is None:
            return best_B, {}
        asking, logprobs = raw
        return best_B, dict(zip(asking, logprobs.of(token_B[asking].tolist()), strict=True))

    def _edit(self, logits_BV: torch.Tensor, rows: Sequence[StepRow], previous_token: Callable[[int], int]) -> bool:
        """Apply the rows' masks, bans, bias and penalties in place; return True if there were any."""
        guided = [index for index, row in enumerate(rows) if row.sample and row.sample.grammar]
        if guided:
            self._mask(logits_BV, rows, guided, previous_token)
        biases = [
            (index, token, -inf) for index, row in enumerate(rows) if index not in guided for token in row.banned_tokens
        ]
        for index, row in enumerate(rows):
            biases += [(index, token, bias) for token, bias in row.sample.logit_bias] if row.sample else []
        seen = [
            (index, row.sample, self._counts(row, previous_token))
            for index, row in enumerate(rows)
            if row.sample and row.sample.has_penalties
        ]
        if biases:
            index_N, token_N, bias_N = zip(*biases, strict=True)
            indices = (_to(logits_BV, np.array(index_N)), _to(logits_BV, np.array(token_N)))
            # Accumulates, because a banned token may also have a bias.
            logits_BV.index_put_(indices, _to(logits_BV, np.array(bias_N, np.float32)), accumulate=True)
        if seen:
            _penalise(logits_BV, seen)
        return bool(guided or biases or seen)

    def _mask(
        self,
        logits_BV: torch.Tensor,
        rows: Sequence[StepRow],
        guided: Sequence[int],
        previous_token: Callable[[int], int],
    ) -> None:
        """Make tokens impossible that would break the grammars of the ``guided`` rows, or that are banned there."""
        assert self.matchers is not None, "an executor without grammars has a row with one"
        masks = np.empty((len(guided), self.matchers.num_words), np.int32)
        start = 0
        while start < len(guided):
            row = rows[guided[start]]
            end = start + 1 + len(row.guesses)
            self.matchers.fill(masks[start:end], row, previous_token)
            start = end
        # Adding 0 or -inf, looked up by bytes of the masks, is several times faster than testing bits.
        bytes_N = _to(logits_BV, masks.view(np.uint8).reshape(-1)).int()
        added = _to(logits_BV, _ADDED_BY_BYTE).index_select(0, bytes_N).view(len(guided), -1)
        logits_BV.index_add_(0, _to(logits_BV, np.array(guided)), added[:, : logits_BV.shape[1]])

    def _counts(self, row: StepRow, previous_token: Callable[[int], int]) -> TokenCounts:
        newest = previous_token(row.previous_row) if row.previous_row >= 0 else None
        return self._token_counts.counts(row.sequence_id, row.history, row.num_prompt_tokens, newest)


def likeliest(logits_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's highest logit (NaN if any logit is NaN) and the first token that has it, int64."""
    if logits_BV.device.type != "cpu":
        best_B, token_B = logits_BV.max(dim=-1)
        return best_B, token_B
    token_B = torch.from_numpy(logits_BV.numpy().argmax(axis=-1))  # much faster than torch
    return logits_BV.gather(1, token_B[:, None])[:, 0], token_B


def draw_into(
    token_B: torch.Tensor,
    logits_BV: torch.Tensor,
    best_B: torch.Tensor,
    plan: DrawPlan,
    words: torch.Tensor,
    kernels: SamplingKernels,
) -> None:
    """Replace the tokens of rows with a draw.

    Args:
        token_B: int64.
        logits_BV: float32.
        best_B: highest logit of each row.
        words: ``plan.words`` on the device.
    """
    num_draws, num_top_p = plan.num_draws, plan.num_top_p
    doubles, singles, top_k_words = words.split_with_sizes([6 * num_draws, 4 * num_draws, len(words) - 10 * num_draws])
    min_p_step_D, top_p_D, seed_D = doubles.view(torch.int64).view(3, num_draws).unbind()
    row_D, position_D, choice_D, temperature_D = singles.view(4, num_draws).unbind()
    drawn_best_D = best_B.index_select(0, row_D)
    draws = DrawTensors(
        row=row_D,
        seed=seed_D,
        position=position_D,
        choice=choice_D,
        best=drawn_best_D,
        temperature=temperature_D.view(torch.float32),
        lowest=(drawn_best_D.double() + min_p_step_D.view(torch.float64)).float()
        if plan.has_min_p
        else torch.full_like(drawn_best_D, -inf),
        last_equal=torch.full_like(row_D, LAST_ID),
    )
    if plan.max_top_k:
        draws = draws._replace(lowest=_top_k_limits(logits_BV, draws, plan.max_top_k, top_k_words))
    if num_top_p:
        fields = (row_D, top_p_D.view(torch.float64), draws.best, draws.temperature, draws.lowest)
        if num_top_p == num_draws:
            found = kernels.find_top_p(logits_BV, TopPTensors(*fields))
            draws = draws._replace(lowest=found.lowest, last_equal=found.last_equal)
        else:
            found = kernels.find_top_p(logits_BV, TopPTensors(*(field[:num_top_p] for field in fields)))
            draws.lowest[:num_top_p], draws.last_equal[:num_top_p] = found
    # Non-finite logits, which the host finds later, may draw any number; the next step needs a valid token.
    drawn_D = kernels.draw_tokens(logits_BV, draws).long().clamp_(0, logits_BV.shape[1] - 1)
    token_B.scatter_(0, row_D.long(), drawn_D)


def _top_k_limits(
    logits_BV: torch.Tensor, draws: DrawTensors, max_top_k: int, top_k_words: torch.Tensor
) -> torch.Tensor:
    """Lowest kept logit of each draw: the maximum of the k-th highest and the previous limit."""
    draw_K, top_k_K = top_k_words.view(2, -1).long().unbind()
    is_all = len(draw_K) == len(draws.row)
    row_K = draws.row if is_all else draws.row.index_select(0, draw_K)
    highest_KC = logits_BV.index_select(0, row_K).topk(max_top_k, dim=-1).values
    limit_K = highest_KC.gather(1, top_k_K[:, None].sub_(1))[:, 0]
    if is_all:
        return torch.maximum(draws.lowest, limit_K)
    return draws.lowest.scatter_reduce_(0, draw_K, limit_K, "amax")


def _raw_logprobs(logits_BV: torch.Tensor, rows: Sequence[StepRow]) -> tuple[list[int], RawLogprobs] | None:
    """Return the rows that request log probabilities, and their raw log probabilities."""
    num_top = {
        index: row.sample.num_logprobs for index, row in enumerate(rows) if row.sample and row.sample.num_logprobs >= 0
    }
    if not num_top:
        return None
    asking = [*num_top]
    asking_RV = logits_BV if len(asking) == len(rows) else logits_BV[asking]
    return asking, raw_logprobs(asking_RV, [*num_top.values()])


def _penalise(logits_BV: torch.Tensor, seen: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Apply repetition, frequency and presence penalties, in place. A finite logit stays finite.

    Args:
        seen: (row, its parameters, counts of its earlier tokens).
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
