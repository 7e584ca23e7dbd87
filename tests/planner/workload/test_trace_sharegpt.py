from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.planner.workload.trace import Trace
from pdserve.planner.workload.trace_sharegpt import read_sharegpt


def conversation(*said: str) -> dict[str, Any]:
    """Messages such as ``human: text``."""
    messages = [text.split(": ", 1) for text in said]
    return {"id": "x", "conversations": [{"from": name, "value": text} for name, text in messages]}


TWO_TURNS = conversation("human: one two three", "gpt: four", "human: five six", "gpt: seven eight")
ONE_TURN = conversation("human: a b", "gpt: c d e")


def read(folder: Path, data: object, **arguments: Any) -> Trace:
    path = folder / "sg.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data, indent=1))
    return read_sharegpt(path, **arguments)


def lengths(trace: Trace) -> list[tuple[int, int]]:
    return [*zip(trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist(), strict=True)]


def test_the_first_answers_are_requests_of_estimated_lengths(tmp_path: Path) -> None:
    trace = read(tmp_path, [TWO_TURNS, ONE_TURN])
    assert lengths(trace) == [(4, 1), (1, 2)]
    assert trace.arrived_s is None
    assert trace.notes == ("lengths are characters / 4",)


def test_odd_conversations_make_sense(tmp_path: Path) -> None:
    data = [
        conversation("system: be nice", "human: hello you", "human: there", "chatgpt: yes", "gpt: indeed", "user: bye"),
        conversation("gpt: left over", "human: hello", "gpt: hi"),
        conversation("human: no answer"),
        conversation("human: empty", "gpt: "),
        conversation(),
    ]
    trace = read(tmp_path, data)
    assert lengths(trace) == [(6, 3), (2, 1)]
    assert trace.notes[0] == "3 without a prompt or an answer left out"


def test_texts_may_be_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1234"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "5678"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}]
    assert lengths(read(tmp_path, [{"messages": messages}])) == [(2, 1)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"items": []}, 'a conversation has no list "conversations"'),
        ([1], 'a conversation has no list "conversations"'),
        ({"conversations": ["hello"]}, 'a message has no text "value" or "content"'),
        ({"conversations": [{"from": "gpt", "value": 3}]}, 'a message has no text "value" or "content"'),
        (conversation("ghost: boo"), "a message is from 'ghost'"),
    ],
)
def test_a_malformed_conversation_is_named_or_leniently_skipped(bad: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sg\.json:conversation 2: ") as caught:
        read(tmp_path, [ONE_TURN, bad, ONE_TURN])
    assert message in str(caught.value)
    trace = read(tmp_path, [ONE_TURN, bad, ONE_TURN], lenient=True)
    assert trace.num_requests == 2
    assert message in trace.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "sg.json is not JSON, or truncated: Expecting value: line 1"),
        (f"[\n{json.dumps(ONE_TURN)}", "truncated: Expecting ',' delimiter: line 2"),
        ("[" * 100_000, "is not JSON, or truncated"),
        ("3", "is not a JSON array"),
        ("[]", " has no request that can be used"),
    ],
)
def test_what_is_no_array_is_always_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sg\.json") as caught:
        read(tmp_path, text, lenient=True)
    assert message in str(caught.value)
