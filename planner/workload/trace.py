"""Recorded requests from any trace format, and draws from them.

The readers (`pdserve.planner.workload.trace_lines`, `pdserve.planner.workload.trace_sharegpt`) fill a trace through
`TraceBuilder`, which also counts the requests that they skip. Never reads a file.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdserve.planner.arrays import FloatArray, IntArray
from pdserve.planner.workload.arrivals import first_row
from pdserve.planner.workload.conversations import Columns, link_turns
from pdserve.planner.workload.lengths import EmpiricalLengths
from pdserve.planner.workload.requests import Segment, SimulatedRequest

MAX_TOKENS = 10_000_000
"""Per prompt or answer: more is a mistake in the file."""

_STREAM = 3
"""Random stream of think times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """N requests in order of arrival, or of conversations if the file has no times."""

    name: str
    arrived_s: FloatArray | None
    """Relative to the first; ``None`` if the file has no times."""
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    segments: list[tuple[Segment, ...]]
    """Shareable segments of each prompt; empty if the file does not record them."""
    turns: IntArray
    """Number of earlier turns in each request's conversation."""
    num_malformed: int = 0
    """Skipped lines; only lenient reading skips any."""
    num_empty: int = 0
    """Requests left out because they have no prompt or no answer, as failed ones do."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    @property
    def num_requests(self) -> int:
        return len(self.num_prompt_tokens)

    def lengths(self) -> EmpiricalLengths:
        """Its pairs of lengths, for draws of any size, without times and shared prefixes."""
        return EmpiricalLengths(self.num_prompt_tokens, self.num_output_tokens)


@dataclass(frozen=True, slots=True)
class TracePrompts:
    """A section of a trace, in order: `pdserve.planner.workload.conversations.Contents`.

    Seed 0 begins at the trace's start, others anywhere; `pdserve.planner.workload.arrivals.Recorded` begins at the same
    row.
    """

    trace: Trace
    mean_think_s: float = 0.0
    """Mean of the exponentially distributed times before follow-up turns."""

    def draw(self, num_requests: int, seed: int) -> list[SimulatedRequest]:
        """Raises:
        ValueError: the trace has fewer requests.
        """
        trace = self.trace
        first = first_row(trace.num_requests, num_requests, seed)
        first -= int(trace.turns[first])
        rows = slice(first, first + num_requests)
        (begins,) = np.nonzero(trace.turns[rows] == 0)
        think_s = np.random.default_rng((_STREAM, seed)).exponential(self.mean_think_s, num_requests)
        columns = Columns(begins, trace.num_prompt_tokens[rows], trace.num_output_tokens[rows], think_s)
        return link_turns(columns, trace.segments[rows])


class TraceRow(NamedTuple):
    """One request from a reader."""

    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    segments: tuple[Segment, ...] = ()
    turn: int = 0


class TraceBuilder:
    """Collects rows, and counts the ones left out."""

    def __init__(self, path: Path, *, lenient: bool) -> None:
        self._path = path
        self._lenient = lenient
        self._arrived_s = array("d")
        self._num_prompt_tokens = array("q")
        self._num_output_tokens = array("q")
        self._turns = array("q")
        self._segments: list[tuple[Segment, ...]] = []
        self._num_malformed = 0
        self._num_empty = 0
        self._first_malformed = ""

    def add(self, row: TraceRow) -> None:
        """Add a request, unless its prompt or answer is empty."""
        if not row.num_prompt_tokens or not row.num_output_tokens:
            self._num_empty += 1
            return
        self._arrived_s.append(row.arrived_s)
        self._num_prompt_tokens.append(row.num_prompt_tokens)
        self._num_output_tokens.append(row.num_output_tokens)
        self._turns.append(row.turn)
        if row.segments or self._segments:
            # Earlier rows had no segments.
            self._segments.extend([()] * (len(self._turns) - 1 - len(self._segments)))
            self._segments.append(row.segments)

    def skip_empty(self) -> None:
        """Count a request without a prompt or an answer."""
        self._num_empty += 1

    def refuse(self, line: int, problem: object) -> None:
        """Skip line ``line``, which cannot be read.

        Raises:
            ValueError: reading is not lenient.
        """
        message = f"{self._path}:{line}: {problem}"
        if not self._lenient:
            raise ValueError(f"{message}: correct the line, or read leniently (--lenient) to skip such lines")
        self._num_malformed += 1
        self._first_malformed = self._first_malformed or message

    def build(self, *, has_times: bool = True, notes: tuple[str, ...] = ()) -> Trace:
        """Raises:
        ValueError: there is no request in the file.
        """
        if not self._turns:
            raise ValueError(
                f"{self._path} has no request that can be used ({self._num_malformed} malformed, "
                f"{self._num_empty} without a prompt or an answer)"
            )
        arrived_s = np.array(self._arrived_s)
        order = np.argsort(arrived_s, kind="stable") if has_times else np.arange(len(arrived_s))
        segments = self._segments
        if segments and has_times:
            segments = [segments[row] for row in order.tolist()]
        return Trace(
            name=self._path.stem,
            arrived_s=arrived_s[order] - arrived_s[order[0]] if has_times else None,
            num_prompt_tokens=np.array(self._num_prompt_tokens)[order],
            num_output_tokens=np.array(self._num_output_tokens)[order],
            segments=segments,
            turns=np.array(self._turns)[order],
            num_malformed=self._num_malformed,
            num_empty=self._num_empty,
            notes=(*self._counts(), *notes),
        )

    def _counts(self) -> tuple[str, ...]:
        counts = []
        if self._num_malformed:
            counts.append(f"{self._num_malformed} malformed skipped, the first is {self._first_malformed}")
        if self._num_empty:
            counts.append(f"{self._num_empty} without a prompt or an answer left out")
        return tuple(counts)
