"""Conversations of one or more turns, and the system prompts that they share.

Used by `pdserve.planner.workload.workload`. Knows neither when conversations begin nor any model's limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from pdserve.planner.arrays import FloatArray, IntArray
from pdserve.planner.workload.lengths import Lengths
from pdserve.planner.workload.requests import Segment, SimulatedRequest

_STREAM = 2
"""Separates these random numbers from those of arrivals, which use the same seed."""


class Contents(Protocol):
    """A source of conversations."""

    def draw(self, num_requests: int, seed: int) -> list[SimulatedRequest]:
        """Conversations of ``num_requests`` turns in total, each as its first turn with arrival time 0."""
        ...


@dataclass(frozen=True, slots=True)
class SystemPrompts:
    """Prefixes that many prompts share."""

    num_prompts: int
    num_tokens: int
    """Per system prompt."""
    zipf_exponent: float = 1.0
    """The k-th most popular is used in proportion to ``k ** -zipf_exponent``; 0 for a uniform choice."""

    def __post_init__(self) -> None:
        assert min(self.num_prompts, self.num_tokens) >= 1
        assert 0 <= self.zipf_exponent < np.inf

    def draw(self, num_conversations: int, random: np.random.Generator) -> IntArray:
        """Index of each conversation's system prompt."""
        weights = np.arange(1, self.num_prompts + 1, dtype=np.float64) ** -self.zipf_exponent
        return random.choice(self.num_prompts, num_conversations, p=weights / weights.sum())


@dataclass(frozen=True, slots=True)
class Turns:
    """Continuation of conversations."""

    mean_turns: float = 1.0
    """Conversations continue after each turn with constant probability: a geometric distribution."""
    mean_think_s: float = 0.0
    """From an answer's last token to the next message: exponentially distributed."""

    def __post_init__(self) -> None:
        assert 1 <= self.mean_turns < np.inf, "a conversation has a turn or more"
        assert 0 <= self.mean_think_s < np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Random conversations. Each turn's prompt is the whole conversation so far plus a new message."""

    lengths: Lengths
    """Lengths of a message and its answer. A first turn without a system prompt has its message as its prompt."""
    system_prompts: SystemPrompts | None = None
    turns: Turns = Turns()

    def draw(self, num_requests: int, seed: int) -> list[SimulatedRequest]:
        random = np.random.default_rng((_STREAM, seed))
        messages, answers = self.lengths.draw(num_requests, random)
        begins = _draw_begins(self.turns.mean_turns, num_requests, random)
        think_s = random.exponential(self.turns.mean_think_s, num_requests)
        said = np.cumsum(messages + answers)
        said_before_conversation = (said - messages - answers)[begins]
        turns_each = np.diff(np.append(begins, num_requests))
        prompts = said - answers - np.repeat(said_before_conversation, turns_each)
        segments: list[tuple[Segment, ...]] = []
        if self.system_prompts is not None:
            prompts += self.system_prompts.num_tokens
            segments = _segments(self.system_prompts, messages[begins], random)
        return link_turns(Columns(begins, prompts, answers, think_s), segments)


def _draw_begins(mean_turns: float, num_requests: int, random: np.random.Generator) -> IntArray:
    """First rows of conversations; the last conversation may be cut short."""
    if mean_turns == 1:
        return np.arange(num_requests)
    ends = np.cumsum(random.geometric(1 / mean_turns, num_requests))
    return np.concatenate(([0], ends[ends < num_requests]))


def _segments(prompts: SystemPrompts, messages: IntArray, random: np.random.Generator) -> list[tuple[Segment, ...]]:
    """Segments of first turns: a system prompt, and a private message."""
    shared = [Segment(kind, prompts.num_tokens) for kind in range(prompts.num_prompts)]
    kinds = prompts.draw(len(messages), random).tolist()
    return [
        (shared[kind], Segment(prompts.num_prompts + row, num_tokens))
        for row, (kind, num_tokens) in enumerate(zip(kinds, messages.tolist(), strict=True))
    ]


class Columns(NamedTuple):
    """Turns of conversations, one conversation after the other."""

    begins: IntArray
    """Row of each conversation's first turn."""
    num_prompt_tokens: IntArray
    """Per row, including all earlier turns."""
    num_output_tokens: IntArray
    think_s: FloatArray
    """Before each turn; meaningless for first turns."""


def link_turns(columns: Columns, segments: Sequence[tuple[Segment, ...]] = ()) -> list[SimulatedRequest]:
    """Link rows into conversations.

    Args:
        segments: of each conversation's first turn, or empty.
    """
    prompts = columns.num_prompt_tokens.tolist()
    answers = columns.num_output_tokens.tolist()
    begins = columns.begins.tolist()
    of_first = segments or [()] * len(begins)
    if len(begins) == len(prompts):
        return [
            SimulatedRequest(0.0, prompt, answer, its)
            for prompt, answer, its in zip(prompts, answers, of_first, strict=True)
        ]
    think_s = columns.think_s.tolist()
    ends = [*begins[1:], len(prompts)]
    conversations = []
    for begin, end, its in zip(begins, ends, of_first, strict=True):
        turn = None
        for row in range(end - 1, begin, -1):
            turn = SimulatedRequest(think_s[row], prompts[row], answers[row], (), turn)
        conversations.append(SimulatedRequest(0.0, prompts[begin], answers[begin], its, turn))
    return conversations
