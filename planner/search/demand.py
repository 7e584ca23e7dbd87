"""A workload's demand on a cluster in the few numbers that closed forms need, computed from a drawn sample.

Read by `pdserve.planner.search.estimates`. Knows nothing of hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdserve.planner.arrays import IntArray
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.planner.workload.workload_statistics import measure


@dataclass(frozen=True, eq=False)
class Demand:
    """Lengths of N requests, counting every turn of a conversation; excludes requests that are too long."""

    num_new_tokens: IntArray
    """Per prompt, tokens that even an unlimited prefix cache misses; at least 1."""
    num_cached_tokens: IntArray
    """The remaining prompt tokens."""
    num_output_tokens: IntArray
    served_share: float
    """Share of requests that are not too long."""

    @classmethod
    def of(cls, requests: Sequence[SimulatedRequest], *, block_size: int, max_model_len: int) -> Demand:
        """Demand of ``requests``; whole blocks of ``block_size`` tokens are shared.

        Raises:
            ValueError: all requests are longer than ``max_model_len``.
        """
        all_turns = measure(requests)
        fits = all_turns.num_prompt_tokens + all_turns.num_output_tokens <= max_model_len
        if not fits.any():
            raise ValueError(
                f"all requests are longer than max_model_len {max_model_len}: raise it, or plan for shorter requests"
            )
        prompts, outputs = all_turns.num_prompt_tokens[fits], all_turns.num_output_tokens[fits]
        cached = np.minimum(all_turns.num_cacheable_tokens[fits], prompts - 1) // block_size * block_size
        return cls(prompts - cached, cached, outputs, float(fits.mean()))

    @cached_property
    def mean_new_tokens(self) -> float:
        return float(self.num_new_tokens.mean())

    @cached_property
    def mean_prompt_tokens(self) -> float:
        return float((self.num_new_tokens + self.num_cached_tokens).mean())

    @cached_property
    def mean_output_tokens(self) -> float:
        return float(self.num_output_tokens.mean())

    @cached_property
    def mean_gaps(self) -> float:
        """Decoded tokens per answer: all but the first."""
        return float((self.num_output_tokens - 1).mean())

    @cached_property
    def one_token_share(self) -> float:
        """Share of one-token answers, which have no TPOT."""
        return float((self.num_output_tokens == 1).mean())

    @cached_property
    def mean_decode_context(self) -> float:
        """Mean tokens in the cache before a decode row, over all such rows."""
        num_gaps = self.num_output_tokens - 1
        if not num_gaps.any():
            return self.mean_prompt_tokens
        contexts = self.num_new_tokens + self.num_cached_tokens + num_gaps / 2
        return float((contexts * num_gaps).sum() / num_gaps.sum())
