"""Recorded requests from any trace format, and draws from them.

The readers (`pdserve.planner.workload.trace_lines`, `pdserve.planner.workload.trace_sharegpt`) fill a trace through
`TraceBuilder`, which also counts the requests that they skip. Never reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdserve.planner.arrays import FloatArray, IntArray
from pdserve.planner.workload.arrivals import first_row
from pdserve.planner.workload.conversations import Columns, link_turns
from pdserve.planner.workload.requests import Segment, SimulatedRequest

MAX_TOKENS = 10_000_000
"""Per prompt or answer: more is a mistake in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """N requests in C conversations, in order of arrival, or of the file if it has no times."""

    name: str
    arrived_s: FloatArray | None
    """Of conversations, relative to the first; ``None`` if the file has no times."""
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    segments: list[tuple[Segment, ...]]
    """Shareable segments of each conversation's first prompt; empty if the file does not record them."""
    begins: IntArray
    """Row of each conversation's first request."""
    think_s: FloatArray
    """Per request, from the answer before it; meaningless for first ones."""
    notes: tuple[str, ...] = ()
    """Notes for the user, of what was left out, too."""

    @property
    def num_requests(self) -> int:
        return len(self.num_prompt_tokens)

    @property
    def rate(self) -> float:
        """Requests per second, every turn counted; 0 without times that differ."""
        span_s = float(self.arrived_s[-1]) if self.arrived_s is not None else 0.0
        return self.num_requests * (1 - 1 / len(self.begins)) / span_s if span_s else 0.0


@dataclass(frozen=True, slots=True)
class TracePrompts:
    """A section of a trace, in order: `pdserve.planner.workload.conversations.Contents`.

    Seed 0 begins at the trace's start, others anywhere; `pdserve.planner.workload.arrivals.Recorded` begins at the same
    row.
    """

    trace: Trace

    def draw(self, num_requests: int, seed: int) -> list[SimulatedRequest]:
        """Whole conversations, with ``num_requests`` turns if each has as many as the mean.

        Raises:
            ValueError: the trace has fewer requests.
        """
        trace = self.trace
        num_drawn = max(1, num_requests * len(trace.begins) // trace.num_requests)
        first = first_row(len(trace.begins), num_drawn, seed)
        begins = np.append(trace.begins, trace.num_requests)[first : first + num_drawn + 1]
        rows = slice(begins[0], begins[-1])
        lengths = trace.num_prompt_tokens[rows], trace.num_output_tokens[rows]
        columns = Columns(begins[:-1] - begins[0], *lengths, trace.think_s[rows])
        return link_turns(columns, trace.segments[first : first + num_drawn])


class TraceRow(NamedTuple):
    """One request from a reader."""

    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    segments: tuple[Segment, ...] = ()
    session: str = ""
    """Name of the conversation that it begins or, if an earlier row has it, continues."""
    think_s: float = 0.0
    """From the end of the answer before it."""


class TraceBuilder:
    """Collects rows, and counts the ones left out."""

    def __init__(self, path: Path, *, lenient: bool) -> None:
        self.path = path
        self._lenient = lenient
        self._conversations: dict[object, list[TraceRow]] = {}
        """By session; a row without one is a conversation of its own."""
        self._num_malformed = 0
        self._num_empty = 0
        self._first_malformed = ""

    def add(self, row: TraceRow) -> None:
        """Add a request, unless its prompt or answer is empty."""
        if not row.num_prompt_tokens or not row.num_output_tokens:
            self._num_empty += 1
            return
        self._conversations.setdefault(row.session or object(), []).append(row)

    def refuse(self, place: object, problem: object) -> None:
        """Skip what is at ``place``, such as a line, and cannot be read.

        Raises:
            ValueError: reading is not lenient.
        """
        message = f"{self.path}:{place}: {problem}"
        if not self._lenient:
            raise ValueError(f"{message}: correct the line, or read leniently (--lenient) to skip such lines")
        self._num_malformed += 1
        self._first_malformed = self._first_malformed or message

    def build(self, *, has_times: bool = True, notes: tuple[str, ...] = ()) -> Trace:
        """Raises:
        ValueError: there is no request in the file, or more were skipped than read.
        """
        conversations = list(self._conversations.values())
        if has_times:
            conversations.sort(key=lambda turns: turns[0].arrived_s)
        rows = [row for turns in conversations for row in turns]
        if self._num_malformed > len(rows) > 0:
            raise ValueError(f"{self.path} is no such trace, since most of it cannot be read: {self._counts()[0]}")
        if not rows:
            raise ValueError(
                f"{self.path} has no request that can be used ({self._num_malformed} malformed, "
                f"{self._num_empty} without a prompt or an answer)"
            )
        arrived_s = np.array([turns[0].arrived_s for turns in conversations])
        segments = [turns[0].segments for turns in conversations]
        return Trace(
            name=self.path.stem,
            arrived_s=arrived_s - arrived_s[0] if has_times else None,
            num_prompt_tokens=np.array([row.num_prompt_tokens for row in rows]),
            num_output_tokens=np.array([row.num_output_tokens for row in rows]),
            segments=segments if any(segments) else [],
            begins=np.cumsum([0, *map(len, conversations)])[:-1],
            think_s=np.array([row.think_s for row in rows]),
            notes=(*self._counts(), *notes),
        )

    def _counts(self) -> tuple[str, ...]:
        malformed = f"{self._num_malformed} malformed skipped, the first is {self._first_malformed}"
        empty = f"{self._num_empty} without a prompt or an answer left out"
        return (malformed,) * bool(self._num_malformed) + (empty,) * bool(self._num_empty)
