"""Min-p, top-k and top-p against a sort."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.request import SamplingParams
from pdserve.model.truncation import kept_tokens


def kept_by_sort(logits: Sequence[float], params: SamplingParams) -> set[int]:
    """The definition, literally: order by (logit descending, id ascending), cut."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = logits[order[0]]
    order = [token for token in order if math.exp((logits[token] - best) / params.temperature) >= params.min_p]
    if params.top_k:
        threshold = logits[order[min(params.top_k, len(order)) - 1]]
        order = [token for token in order if logits[token] >= threshold]
    weights = [math.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order]
    mass, kept = 0.0, set()
    for token, weight in zip(order, weights, strict=True):
        kept.add(token)
        mass += weight
        if mass >= params.top_p * sum(weights):
            break
    return kept


def kept(logits_BV: torch.Tensor, params: Sequence[SamplingParams]) -> list[set[int]]:
    """The tokens that each row keeps."""
    best = logits_BV.amax(dim=-1).tolist()
    answer = []
    for row, limits in enumerate(kept_tokens(logits_BV, best, params, [p.temperature for p in params])):
        logits = enumerate(logits_BV[row].tolist())
        lowest = torch.tensor(limits.lowest, dtype=torch.float32).item()
        answer.append({t for t, logit in logits if logit > lowest or (logit == lowest and t <= limits.last_equal)})
    return answer


@settings(max_examples=60)
@given(
    # Few distinct values, so that ties straddle the cuts; powers of two, so that sums are exact.
    logits=st.lists(st.sampled_from([-3.0, -1.5, 0.0, 0.5, 2.0]), min_size=2, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.01, 0.25, 0.5, 0.8, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.1, 0.55, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_truncation_keeps_what_a_sort_keeps(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept(torch.tensor([logits]), [params]) == [kept_by_sort(logits, params)]


def test_truncation_of_a_large_vocabulary_keeps_what_a_sort_keeps() -> None:
    """Prefixes shorter and longer than what is sorted at first, beside rows that are cut in other ways."""
    logits_BV = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * 3
    logits_BV[5] = logits_BV[5].round()  # ties everywhere
    params = [
        SamplingParams(top_p=0.9, temperature=4.0),
        SamplingParams(top_k=50, top_p=0.7, temperature=0.8),
        SamplingParams(top_k=50),
        SamplingParams(min_p=0.01, top_p=0.99),
        SamplingParams(top_p=0.9, temperature=0.1),
        SamplingParams(top_p=0.9),
    ]
    answer = kept(logits_BV, params)
    for row, tokens in enumerate(answer):
        assert tokens == kept_by_sort(logits_BV[row].tolist(), params[row])
    assert len(answer[4]) < 64 < 1024 < len(answer[0])


@pytest.mark.parametrize("top_p", [5e-324, math.nextafter(1.0, 0.0)])
def test_a_share_next_to_none_or_all_keeps_something(top_p: float) -> None:
    logits_BV = torch.randn(20, 1003, generator=torch.Generator().manual_seed(0))
    sizes = {len(tokens) for tokens in kept(logits_BV, [SamplingParams(top_p=top_p)] * 20)}
    assert sizes == {1} if top_p < 0.5 else min(sizes) >= 1000
