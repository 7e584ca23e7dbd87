from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.planner.workload.lengths import (
    FixedLengths,
    LengthPairs,
    Lengths,
    LogNormalLengths,
    QuantileLengths,
)

QUANTILES = QuantileLengths(
    shares=(0, 0.5, 0.9, 1),
    num_prompt_tokens=(10, 100, 500, 900),
    num_output_tokens=(1, 20, 50, 300),
    correlation=0.5,
)
DISTRIBUTIONS = [
    FixedLengths(100, 10),
    LogNormalLengths(mean_prompt_tokens=3, mean_output_tokens=1, prompt_variation=4),
    QUANTILES,
]


def draw(lengths: Lengths, num_requests: int = 200_000, seed: int = 0) -> LengthPairs:
    return lengths.draw(num_requests, np.random.default_rng(seed))


@settings(max_examples=40)
@given(lengths=st.sampled_from(DISTRIBUTIONS), num_requests=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_lengths_are_whole_and_positive_and_the_seed_s_alone(lengths: Lengths, num_requests: int, seed: int) -> None:
    pairs = draw(lengths, num_requests, seed)
    for each, again in zip(pairs, draw(lengths, num_requests, seed), strict=True):
        assert each.dtype == np.int64
        assert len(each) == num_requests
        assert (each >= 1).all()
        np.testing.assert_array_equal(each, again)


def test_fixed_lengths() -> None:
    pairs = draw(FixedLengths(7, 3), 5)
    assert [each.tolist() for each in pairs] == [[7] * 5, [3] * 5]


@pytest.mark.parametrize("correlation", [-0.6, 0.0, 0.8])
def test_lognormal_lengths_have_their_means_variations_and_correlation(correlation: float) -> None:
    pairs = draw(
        LogNormalLengths(
            mean_prompt_tokens=2000,
            mean_output_tokens=400,
            prompt_variation=1.2,
            output_variation=0.5,
            correlation=correlation,
        )
    )
    prompts, outputs = pairs
    assert prompts.mean() == pytest.approx(2000, rel=0.02)
    assert outputs.mean() == pytest.approx(400, rel=0.02)
    assert prompts.std() / prompts.mean() == pytest.approx(1.2, rel=0.05)
    assert outputs.std() / outputs.mean() == pytest.approx(0.5, rel=0.05)
    assert np.corrcoef(np.log(pairs))[0, 1] == pytest.approx(correlation, abs=0.02)


def test_quantiles_come_back() -> None:
    prompts, outputs = draw(QUANTILES)
    np.testing.assert_allclose(np.percentile(prompts, [50, 90]), [100, 500], rtol=0.02)
    np.testing.assert_allclose(np.percentile(outputs, [50, 90]), [20, 50], rtol=0.03)
    assert prompts.min() >= 10
    assert prompts.max() <= 900
    assert np.corrcoef(np.argsort(np.argsort(prompts)), np.argsort(np.argsort(outputs)))[0, 1] > 0.4


def test_a_total_bounds_answers_and_leaves_prompts() -> None:
    bounded = QuantileLengths(
        shares=QUANTILES.shares,
        num_prompt_tokens=QUANTILES.num_prompt_tokens,
        num_output_tokens=QUANTILES.num_output_tokens,
        max_total_tokens=910,
    )
    prompts, outputs = draw(bounded)
    assert (prompts + outputs).max() <= 910
    assert np.percentile(prompts, 90) == pytest.approx(500, rel=0.02)
    assert (outputs[prompts < 600]).max() > 250


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0)])
def test_no_request_is_empty(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match="at least one prompt token and one answer token"):
        FixedLengths(prompt, output)
