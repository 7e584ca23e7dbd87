"""A workload's demand on a cluster in the few numbers that closed forms need, computed from a drawn sample.

Read by `pdserve.planner.search.estimates`. Knows nothing of hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdserve.planner.arrays import IntArray
from pdserve.planner.workload.requests import SimulatedRequest


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
        turns = list(_in_turns(requests))
        rows = [row for row in turns if row[0].num_prompt_tokens + row[0].num_output_tokens <= max_model_len]
        if not rows:
            raise ValueError(
                f"all requests are longer than max_model_len {max_model_len}: raise it, or plan for shorter requests"
            )
        prompts = np.array([request.num_prompt_tokens for request, _ in rows], np.int64)
        cached = np.array([num_known for _, num_known in rows], np.int64)
        cached = np.minimum(cached, prompts - 1) // block_size * block_size
        outputs = np.array([request.num_output_tokens for request, _ in rows], np.int64)
        return cls(prompts - cached, cached, outputs, len(rows) / len(turns))

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


def _in_turns(requests: Sequence[SimulatedRequest]) -> Iterator[tuple[SimulatedRequest, int]]:
    """Each request and its follow-ups, with the number of its prompt tokens that came earlier in this order."""
    seen: set[tuple[int, ...]] = set()
    for request in requests:
        num_before = 0
        for turn in request.turns():
            num_known = num_before
            path: tuple[int, ...] = ()
            if not num_before:
                for segment in turn.segments:
                    path = (*path, segment.content, segment.num_tokens)
                    if path in seen:
                        num_known += segment.num_tokens
                    seen.add(path)
            yield turn, num_known
            num_before = turn.num_prompt_tokens + turn.num_output_tokens
