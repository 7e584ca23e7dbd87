"""Token ids of simulated prompts and their block hashes: equal exactly where the workload shares content.

Answers are zeros (`pdserve.planner.simulate.simulated_worker`), so the prompt of a next turn has zeros in place of the
answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pdserve.contracts.block_hash import BLOCK_HASH_BYTES, block_hash, root_hash
from pdserve.planner.workload.requests import Segment, SimulatedRequest

_FIRST_PRIVATE_CONTENT = 2**31
_STRIDE = 2654435761
"""Odd, so that contents begin at different tokens; 2**32 over the golden ratio (Knuth, TAOCP 3, section 6.4)."""


class Prompt(NamedTuple):
    """A prompt as workers receive it."""

    tokens: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    """Hashes of full blocks, or unique names for private blocks; empty if the workload shares no prefixes."""


NO_PROMPT = Prompt((), ())


class _Written(NamedTuple):
    """Tokens and hashes that a segment adds to the prompt before it."""

    tokens: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    """Hashes of the blocks that the segment completes."""


class PromptTable:
    """Writes the prompts of one workload."""

    def __init__(self, requests: Iterable[SimulatedRequest], block_size: int) -> None:
        """
        Args:
            requests: all first turns to be written.
        """
        turns = [turn for request in requests for turn in request.turns()]
        self.is_sharing = any(turn.segments or turn.follow_up is not None for turn in turns)
        """Whether some prompts may share a prefix."""
        uses = Counter([segment.content for turn in turns for segment in turn.segments])
        self._shared = {content for content, num_uses in uses.items() if num_uses > 1}
        self._block_size = block_size
        self._num_private = 0
        self._written: dict[tuple[bytes, tuple[int, ...], Segment], _Written] = {}
        """By hash of the previous block, tokens after it, and segment: shared segments are written once."""

    def write(self, request: SimulatedRequest, before: Prompt | None = None) -> Prompt:
        """The prompt of ``request``.

        Args:
            before: for a follow-up, the previous turn's prompt with its answer.
        """
        if not self.is_sharing:
            return Prompt((0,) * request.num_prompt_tokens, ())
        prompt = before or NO_PROMPT
        segments = request.segments
        if not segments:
            self._num_private += 1
            num_tokens = request.num_prompt_tokens - len(prompt.tokens)
            segments = (Segment(_FIRST_PRIVATE_CONTENT + self._num_private, num_tokens),)
        for segment in segments:
            prompt = self._append(prompt, segment)
        assert len(prompt.tokens) == request.num_prompt_tokens, f"{prompt.tokens} for {request.num_prompt_tokens}"
        return prompt

    def answered(self, prompt: Prompt, num_output_tokens: int) -> Prompt:
        """The prompt plus its answer, for the next turn."""
        return self._extend(prompt, (0,) * num_output_tokens)

    def _append(self, prompt: Prompt, segment: Segment) -> Prompt:
        if segment.content not in self._shared:
            return self._append_private(prompt, segment)
        key = (prompt.block_hashes[-1] if prompt.block_hashes else b"", self._rest(prompt), segment)
        written = self._written.get(key)
        if written is None:
            tokens = _tokens_of(segment)
            written = _Written(tokens, self._new_hashes(prompt, tokens))
            self._written[key] = written
        return Prompt(prompt.tokens + written.tokens, prompt.block_hashes + written.block_hashes)

    def _append_private(self, prompt: Prompt, segment: Segment) -> Prompt:
        """No other prompt has these tokens, so their blocks get names instead of hashes."""
        tokens = prompt.tokens + (_first_token(segment),) * segment.num_tokens
        news = range(len(prompt.block_hashes), len(tokens) // self._block_size)
        names = [(segment.content << 64 | index).to_bytes(BLOCK_HASH_BYTES, "big") for index in news]
        return Prompt(tokens, (*prompt.block_hashes, *names))

    def _extend(self, prompt: Prompt, tokens: tuple[int, ...]) -> Prompt:
        return Prompt(prompt.tokens + tokens, prompt.block_hashes + self._new_hashes(prompt, tokens))

    def _rest(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokens after the last full block."""
        return prompt.tokens[len(prompt.block_hashes) * self._block_size :]

    def _new_hashes(self, prompt: Prompt, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
        """Hashes of the blocks that ``tokens`` complete."""
        block_size = self._block_size
        pending = self._rest(prompt) + tokens
        parent = prompt.block_hashes[-1] if prompt.block_hashes else root_hash(b"")
        hashes = []
        for start in range(0, len(pending) - block_size + 1, block_size):
            parent = block_hash(parent, pending[start : start + block_size])
            hashes.append(parent)
        return tuple(hashes)


def _first_token(segment: Segment) -> int:
    return (segment.content * _STRIDE + 1) & 0xFFFFFFFF


def _tokens_of(segment: Segment) -> tuple[int, ...]:
    first = _first_token(segment)
    tokens = np.arange(first, first + segment.num_tokens, dtype=np.uint64) & 0xFFFFFFFF
    return tuple(tokens.tolist())
