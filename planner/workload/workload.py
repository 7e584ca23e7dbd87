"""Workloads: requests and their arrivals, drawn once per seed and then scaled to any rate.

Used by the search, the CLI and the benchmarks. Layouts and rates are compared on the same draw (common random
numbers): the same lengths, in the same order, with the same arrival pattern. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.arrays import FloatArray
from pdserve.planner.workload.arrivals import POISSON, Arrivals, Recorded
from pdserve.planner.workload.conversations import Contents
from pdserve.planner.workload.requests import Clamped, Segment, SimulatedRequest
from pdserve.planner.workload.trace import Trace, TracePrompts
from pdserve.planner.workload.workload_statistics import WorkloadStatistics, measure


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSample:
    """One draw of a workload."""

    conversations: list[SimulatedRequest]
    """First turns, each with its follow-ups."""
    unit_times: FloatArray
    """Start times at one conversation per second."""
    clamped: Clamped
    """Report it to the user."""

    @property
    def num_requests(self) -> int:
        """Includes every turn."""
        return sum(1 for conversation in self.conversations for _ in conversation.turns())

    def longest(self, *, with_answer: bool = True) -> int:
        """Tokens of the longest prompt, with its answer or without."""
        turns = (turn for each in self.conversations for turn in each.turns())
        return max(turn.num_prompt_tokens + with_answer * turn.num_output_tokens for turn in turns)

    def at_rate(self, requests_per_s: float) -> list[SimulatedRequest]:
        """The requests to simulate, in order of arrival.

        Args:
            requests_per_s: counts every turn, so conversations begin less often. Think times do not scale.

        Raises:
            ValueError: the rate is not above 0.
        """
        if not 0 < requests_per_s < np.inf:
            raise ValueError(f"a rate of {requests_per_s} requests/s is not possible: use a number above 0")
        conversations_per_s = requests_per_s * len(self.conversations) / self.num_requests
        arrived_s = (self.unit_times / conversations_per_s).tolist()
        return [replace(it, arrived_s=at_s) for at_s, it in zip(arrived_s, self.conversations, strict=True)]

    def statistics(self) -> WorkloadStatistics:
        """Statistics of the draw."""
        return measure(self.conversations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A kind of traffic."""

    name: str
    contents: Contents
    arrivals: Arrivals = POISSON
    slo: SloConfig | None = None
    """Usual objectives, if there are any."""
    source: str = ""
    """Origin of its figures, in a sentence."""
    max_tokens: int = 0
    """As in `SimulatedRequest`."""

    def recorded_requests_per_s(self, num_requests: int, seed: int = 0) -> float | None:
        """The recorded rate of a draw, every turn counted; ``None`` if its times are not from a trace."""
        if not isinstance(self.arrivals, Recorded):
            return None
        sample = self.draw(num_requests, seed)
        num_drawn = len(sample.conversations)
        return self.arrivals.stretch_per_s(num_drawn, seed) * sample.num_requests / num_drawn

    def draw(self, num_requests: int, seed: int = 0, *, max_model_len: int = 0) -> WorkloadSample:
        """Draw a sample; equal arguments give bit-identical samples.

        Args:
            num_requests: counts every turn. The last conversation is cut short to match.
            max_model_len: longer prompts and answers are shortened and counted; 0 for no limit.

        Raises:
            ValueError: fewer than one, or more than a trace has.
        """
        if num_requests < 1:
            raise ValueError(f"a workload needs at least one request, not {num_requests}")
        if max_model_len < 0 or max_model_len == 1:
            raise ValueError(f"max_model_len {max_model_len} leaves no room for a prompt and an answer")
        conversations = self.contents.draw(num_requests, seed)
        clamped = Clamped()
        if max_model_len:
            conversations, clamped = _clamp(conversations, max_model_len)
        if self.max_tokens:
            conversations = [each.limited(self.max_tokens) for each in conversations]
        return WorkloadSample(
            conversations=conversations,
            unit_times=self.arrivals.unit_times(len(conversations), seed),
            clamped=clamped,
        )


def trace_workload(trace: Trace, *, arrivals: Arrivals | None = None) -> Workload:
    """A trace's requests in order, at its own times or at those of another arrival process.

    Args:
        arrivals: by default the trace's own, or a Poisson process if it has no times that differ.
    """
    if arrivals is None:
        arrivals = POISSON if trace.arrived_s is None or not trace.rate else Recorded(trace.arrived_s)
    return Workload(name=trace.name, contents=TracePrompts(trace), arrivals=arrivals)


def _clamp(conversations: list[SimulatedRequest], max_model_len: int) -> tuple[list[SimulatedRequest], Clamped]:
    fitted, clamped = [], Clamped()
    for conversation in conversations:
        turns = list(conversation.turns())
        longest = turns[-1]
        if longest.num_prompt_tokens + longest.num_output_tokens > max_model_len:
            conversation, its = _clamp_conversation(turns, max_model_len)
            clamped = Clamped(*(sum(counts) for counts in zip(clamped, its, strict=True)))
        fitted.append(conversation)
    return fitted, clamped


def _clamp_conversation(turns: list[SimulatedRequest], max_model_len: int) -> tuple[SimulatedRequest, Clamped]:
    """The turns that fit, the last one shortened if necessary: lengths only grow from turn to turn."""
    kept = [turn for turn in turns[1:] if turn.num_prompt_tokens < max_model_len]
    kept.insert(0, turns[0])
    num_left_out = len(turns) - len(kept)
    last = kept.pop()
    num_prompt_tokens = min(last.num_prompt_tokens, max_model_len - 1)
    num_output_tokens = min(last.num_output_tokens, max_model_len - num_prompt_tokens)
    segments = _cut(last.segments, num_prompt_tokens)
    turn = SimulatedRequest(last.arrived_s, num_prompt_tokens, num_output_tokens, segments)
    for before in reversed(kept):
        turn = SimulatedRequest(
            before.arrived_s, before.num_prompt_tokens, before.num_output_tokens, before.segments, turn
        )
    return turn, Clamped(
        int(num_prompt_tokens < last.num_prompt_tokens), int(num_output_tokens < last.num_output_tokens), num_left_out
    )


def _cut(segments: tuple[Segment, ...], num_tokens: int) -> tuple[Segment, ...]:
    """The first ``num_tokens`` of ``segments``; a follow-up's, which hold its message alone, are never longer."""
    kept = []
    for segment in segments:
        if num_tokens <= 0:
            break
        kept.append(segment._replace(num_tokens=min(segment.num_tokens, num_tokens)))
        num_tokens -= segment.num_tokens
    return tuple(kept)
