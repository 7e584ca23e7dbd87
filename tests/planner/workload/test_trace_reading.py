from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.planner.workload.trace_reading import read_trace, recognise
from tests.planner.workload import test_trace_lines as lines
from tests.planner.workload.test_trace_sharegpt import TWO_TURNS

TEXTS = [
    ("mooncake", lines.MOONCAKE),
    ("azure", lines.AZURE_2023),
    ("burstgpt", lines.BURSTGPT),
    ("burstgpt", lines.BURSTGPT_SESSIONS),
    ("plain", lines.PLAIN_CSV),
    ("plain", lines.PLAIN_JSON),
    ("sharegpt", json.dumps([TWO_TURNS])),
]


@pytest.mark.parametrize(("trace_format", "text"), TEXTS)
@pytest.mark.parametrize("before", ["", "\ufeff", "\n\n"])
def test_a_format_is_known_by_its_content(trace_format: str, text: str, before: str, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(before + text)
    assert recognise(path) == trace_format


@pytest.mark.parametrize(("trace_format", "text"), TEXTS)
@pytest.mark.parametrize("before", ["", "\n\n"])
def test_any_trace_is_read(trace_format: str, text: str, before: str, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(before + text)
    trace = read_trace(path)
    assert trace.name == "data"
    assert trace.num_requests == (1 if trace_format == "sharegpt" else 2)
    assert (trace.arrived_s is None) == (trace_format == "sharegpt")


def test_leniency_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(lines.PLAIN_CSV + "x,y,z\n")
    with pytest.raises(ValueError, match=r"data\.txt:4: "):
        read_trace(path)
    assert read_trace(path, lenient=True).notes[0].startswith("1 malformed skipped")


@pytest.mark.parametrize("text", ["", "\n", "a,b,c\n1,2,3\n", '{"prompt": 1}', "{oops", "hello"])
def test_what_is_not_known_is_refused_with_what_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="no known trace begins with" if text.strip() else "is empty") as caught:
        recognise(path)
    for trace_format, _ in TEXTS:
        assert trace_format in str(caught.value)
