from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pdserve.planner.workload.sessions import RedrawnSessions, in_sessions
from pdserve.planner.workload.trace import Trace
from pdserve.planner.workload.trace_reading import read_trace
from pdserve.planner.workload.traffic import named_traffic
from pdserve.planner.workload.workload import trace_workload


def write(folder: Path, *lines: tuple[int, int, int, list[int]]) -> Path:
    """Lines of times in ms, prompt tokens, answer tokens and ids of blocks of 512 tokens."""
    path = folder / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, line, strict=True))) for line in lines))
    return path


def rows(trace: Trace) -> list[list[int]]:
    """Prompt tokens of each session's turns."""
    return [part.tolist() for part in np.split(trace.num_prompt_tokens, trace.begins[1:])]


def test_requests_that_go_on_from_others_are_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        (0, 1100, 100, [0, 1, 2]),
        (1000, 1200, 100, [0, 3, 4]),
        (9000, 1300, 200, [0, 1, 5]),
        (30_000, 2100, 20, [0, 1, 6, 7, 8]),
        (40_000, 1600, 20, [0, 3, 9, 10]),
    )
    trace = read_trace(path, sessions=True)
    assert rows(trace) == [[1100, 1300, 2100], [1200, 1600]]
    assert trace.arrived_s is not None
    assert trace.arrived_s.tolist() == [0.0, 1.0]
    # From the request before, as no answer's end is recorded.
    assert trace.think_s[[1, 2, 4]].tolist() == [9.0, 21.0, 39.0]
    assert trace.notes[-1].startswith("3 requests go on from an earlier one")
    first, _ = trace_workload(trace).draw(5).at_rate(1.0)
    assert [turn.arrived_s for turn in first.turns()] == [0.0, 9.0, 21.0]
    assert [len(turn.segments) for turn in first.turns()] == [3, 0, 0]
    assert len(read_trace(path).begins) == 5


def test_strangers_are_not_joined(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        (0, 1024, 10, [0, 1]),  # a system prompt of two blocks, sent alone
        (1, 1024, 10, [0, 1]),  # again: no longer than the one before
        (2, 1500, 10, [0, 1, 2]),  # goes on from the first
        (3, 1500, 10, [0, 1, 3]),  # branches off: the first has a next turn, and nothing was new in the second
        (4, 1505, 10, [0, 1, 2]),  # shorter than the third with its answer
        (5, 400, 10, [4]),
        (6, 900, 10, [4, 5]),  # a partly filled block is not the same full one
    )
    assert rows(read_trace(path, sessions=True)) == [[1024, 1500], [1024], [1500], [1505], [400], [900]]


def test_a_trace_that_says_nothing_of_sessions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    path.write_text("arrived_s,prompt_tokens,output_tokens\n0,10,10\n1,30,10\n")
    with pytest.raises(ValueError, match=r"calls has no blocks .* leave out --sessions"):
        read_trace(path, sessions=True)


def test_named_sessions_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "named.jsonl"
    lines = [
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [1, 2]},
        {"session_id": "a", "delay": 500, "input_length": 1200, "output_length": 10, "hash_ids": [1, 2, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(path)
    assert rows(trace) == [[600, 1200]]
    assert in_sessions(trace) is trace


def test_redrawn_sessions_are_whole_and_share_what_they_shared(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        (0, 1100, 100, [0, 1, 2]),
        (1000, 800, 50, [0, 3]),
        (9000, 1300, 200, [0, 1, 5]),
    )
    traffic = named_traffic(str(path), max_model_len=4096, sessions=True).with_at_least(100)
    assert isinstance(traffic.workload.contents, RedrawnSessions)
    drawn = traffic.draw(500, seed=3).conversations
    assert sum(1 for each in drawn for _ in each.turns()) == 500
    turns = {tuple(turn.num_prompt_tokens for turn in each.turns()) for each in drawn[:-1]}
    assert turns == {(1100, 1300), (800,)}
    assert {each.segments[0] for each in drawn} == {drawn[0].segments[0]}
    assert len({each.segments[1].content for each in drawn}) == len(drawn)
    assert all(sum(part.num_tokens for part in each.segments) == each.num_prompt_tokens for each in drawn)
    assert drawn == traffic.draw(500, seed=3).conversations != traffic.draw(500, seed=4).conversations


def test_bailian_s_blocks_tell_its_sessions(tmp_path: Path) -> None:
    path = tmp_path / "bailian.jsonl"
    names = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")
    lines = [dict(zip(names, each, strict=True)) for each in ((7, -1, 61, 20, 4, [1, 2]), (9, 7, 64, 40, 4, [1, 3, 4]))]
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(path, sessions=True)
    assert rows(trace) == [[20, 40]]
    assert trace.think_s[1] == pytest.approx(3.0)
