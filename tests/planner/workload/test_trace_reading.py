from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.planner.workload.trace_reading import TraceFormat, read_trace, recognise
from tests.planner.workload import test_trace_lines as lines
from tests.planner.workload.test_trace_sharegpt import TWO_TURNS, num_words

TEXTS = [
    (TraceFormat.MOONCAKE, lines.MOONCAKE),
    (TraceFormat.AZURE, lines.AZURE_2023),
    (TraceFormat.BURSTGPT, lines.BURSTGPT),
    (TraceFormat.BURSTGPT, lines.BURSTGPT_SESSIONS),
    (TraceFormat.PLAIN, lines.PLAIN_CSV),
    (TraceFormat.PLAIN, lines.PLAIN_JSON),
    (TraceFormat.SHAREGPT, json.dumps([TWO_TURNS])),
]


@pytest.mark.parametrize(("trace_format", "text"), TEXTS)
@pytest.mark.parametrize("before", ["", "\ufeff", "\n\n"])
def test_a_format_is_known_by_its_content(trace_format: TraceFormat, text: str, before: str, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(before + text)
    assert recognise(path) is trace_format


@pytest.mark.parametrize(("trace_format", "text"), TEXTS)
@pytest.mark.parametrize("before", ["", "\n\n"])
def test_any_trace_is_read(trace_format: TraceFormat, text: str, before: str, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(before + text)
    trace = read_trace(path, num_tokens=num_words, multi_turn=True)
    assert trace.name == "data"
    assert trace.num_requests == 2
    assert (trace.arrived_s is None) == (trace_format is TraceFormat.SHAREGPT)


def test_leniency_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(lines.PLAIN_CSV + "x,y,z\n")
    with pytest.raises(ValueError, match=r"data\.txt:4: "):
        read_trace(path)
    assert read_trace(path, lenient=True).num_malformed == 1


@pytest.mark.parametrize("text", ["", "\n", "a,b,c\n1,2,3\n", '{"prompt": 1}', "{oops", "hello"])
def test_what_is_not_known_is_refused_with_what_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="no known trace begins with") as caught:
        recognise(path)
    for trace_format in TraceFormat:
        assert trace_format.value in str(caught.value)
