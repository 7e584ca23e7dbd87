"""Token ids for simulated prompts: equal where contents are said to be equal, different everywhere else.

Answers are zeros (`pdserve.engine.scheduler.Scheduler.advance`), and so a next turn's prompt has zeros where the answer
was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdserve.planner.requests import Segment, SimulatedRequest

_FIRST_PRIVATE_CONTENT = 2**31
_STRIDE = 2654435761
"""Odd, so that contents begin at different tokens; 2**32 over the golden ratio (Knuth, TAOCP 3, section 6.4)."""


def shares_prefixes(requests: Sequence[SimulatedRequest]) -> bool:
    """Whether some prompt could begin like another."""
    return any(request.segments or request.follow_up is not None for request in requests)


class PromptBook:
    """Writes the prompts of one workload."""

    def __init__(self, *, is_sharing: bool) -> None:
        self.is_sharing = is_sharing
        self._num_private = 0

    def tokens(self, request: SimulatedRequest, before: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The prompt of ``request``.

        Args:
            before: of a follow-up, the prompt of the turn before and its answer.
        """
        if not self.is_sharing:
            return (0,) * request.num_prompt_tokens
        segments = request.segments
        if not segments:
            self._num_private += 1
            num_tokens = request.num_prompt_tokens - len(before)
            segments = (Segment(_FIRST_PRIVATE_CONTENT + self._num_private, num_tokens),)
        tokens = before + tuple(token for segment in segments for token in _tokens_of(segment))
        assert len(tokens) == request.num_prompt_tokens, f"{len(tokens)} tokens for {request.num_prompt_tokens}"
        return tokens


def _tokens_of(segment: Segment) -> list[int]:
    first = segment.content * _STRIDE
    tokens: list[int] = ((np.arange(first + 1, first + 1 + segment.num_tokens, dtype=np.uint64)) & 0xFFFFFFFF).tolist()
    return tokens
