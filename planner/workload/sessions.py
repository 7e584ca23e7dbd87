"""Sessions of recorded requests: joins the turns of a trace that names blocks but no sessions; draws whole sessions.

Called by `pdserve.planner.workload.trace_reading` and `pdserve.planner.workload.traffic`. Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from pdserve.planner.workload.conversations import Columns, link_turns
from pdserve.planner.workload.requests import Segment, SimulatedRequest
from pdserve.planner.workload.trace import Trace

_STREAM = 3
"""Separates these random numbers from those of arrivals and lengths, which use the same seed."""
_FIRST_PRIVATE_CONTENT = 2**30
"""Above those of traces, which are counted from 0."""


def in_sessions(trace: Trace) -> Trace:
    """``trace`` with each request that goes on from an earlier one as the next turn of its session.

    A request goes on from the last one whose full blocks all begin its own prompt, if the last of these was new in that
    session, so that no system prompt joins strangers, and if its prompt is longer than that prompt and answer. One
    request goes on from each at most: others that branch off there begin sessions. A trace that names its sessions
    stays as it is.

    Raises:
        ValueError: the trace has no times, or names no blocks.
    """
    if len(trace.begins) < trace.num_requests:
        return trace
    arrived_s = trace.arrived_s
    if arrived_s is None or not trace.segments:
        raise ValueError(f"{trace.name} has no blocks (hash_ids) and times that tell sessions: leave out --sessions")
    num_block_tokens = max(segment.num_tokens for segments in trace.segments for segment in segments)
    num_tokens = trace.num_prompt_tokens + trace.num_output_tokens
    new_in: dict[int, int] = {}
    """First row of the session that each block was new in."""
    last_of: dict[int, int] = {}
    """Row of the prompt that ends with this block, until another goes on from it."""
    sessions: dict[int, list[int]] = {}
    """Rows by the last one."""
    for row, segments in enumerate(trace.segments):
        blocks = [segment.content for segment in segments if segment.num_tokens == num_block_tokens]
        block = next((each for each in reversed(blocks) if each in last_of), -1)
        turns = []
        if block >= 0 and num_tokens[last_of[block]] < trace.num_prompt_tokens[row]:
            turns = sessions.pop(last_of.pop(block))
        sessions[row] = [*turns, row]
        first = sessions[row][0]
        for each in reversed(blocks):
            if new_in.setdefault(each, first) != first:
                break  # those before it are known, too
        if blocks and new_in[blocks[-1]] == first:
            last_of[blocks[-1]] = row
    return _joined(trace, sorted(sessions.values()))


def _joined(trace: Trace, sessions: list[list[int]]) -> Trace:
    """``trace`` with these rows as turns; first ones in order."""
    assert trace.arrived_s is not None
    rows = np.concatenate(sessions)
    firsts = [turns[0] for turns in sessions]
    arrived_s = trace.arrived_s[rows]
    note = (
        f"{len(rows) - len(sessions):,} requests go on from an earlier one: each is sent as long after its answer as "
        "it came after that request"
    )
    return replace(
        trace,
        arrived_s=trace.arrived_s[firsts],
        num_prompt_tokens=trace.num_prompt_tokens[rows],
        num_output_tokens=trace.num_output_tokens[rows],
        segments=[trace.segments[row] for row in firsts],
        begins=np.cumsum([0, *map(len, sessions)])[:-1],
        think_s=np.diff(arrived_s, prepend=arrived_s[:1]),
        notes=(*trace.notes, note),
    )


@dataclass(frozen=True, slots=True)
class RedrawnSessions:
    """Sessions of a trace, drawn with replacement: `pdserve.planner.workload.conversations.Contents`.

    They share the blocks that sessions of the trace share; the rest of a first prompt is new in each.
    """

    trace: Trace

    def draw(self, num_requests: int, seed: int) -> list[SimulatedRequest]:
        trace = self.trace
        num_turns = np.diff(np.append(trace.begins, trace.num_requests))
        chosen = np.random.default_rng((_STREAM, seed)).integers(len(num_turns), size=num_requests)
        ends = np.cumsum(num_turns[chosen])
        chosen = chosen[: int(np.searchsorted(ends, num_requests)) + 1]
        begins = np.append(0, ends)[: len(chosen)]
        rows = np.repeat(trace.begins[chosen] - begins, num_turns[chosen])[:num_requests] + np.arange(num_requests)
        columns = Columns(begins, trace.num_prompt_tokens[rows], trace.num_output_tokens[rows], trace.think_s[rows])
        return link_turns(columns, self._segments(chosen.tolist()))

    def _segments(self, chosen: list[int]) -> list[tuple[Segment, ...]]:
        if not self.trace.segments:
            return []
        uses = Counter(content for its in self.trace.segments for content in {segment.content for segment in its})
        redrawn = []
        for number, index in enumerate(chosen, _FIRST_PRIVATE_CONTENT):
            its = self.trace.segments[index]
            num_shared = next((place for place, each in enumerate(its) if uses[each.content] == 1), len(its))
            num_private = sum(segment.num_tokens for segment in its[num_shared:])
            private = (Segment(number, num_private),) if num_private else ()
            redrawn.append(its[:num_shared] + private)
        return redrawn
