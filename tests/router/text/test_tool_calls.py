"""Calls in an answer, whatever way it is cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.text.reasoning import ReasoningParser
from pdserve.router.text.tool_calls import HERMES, LLAMA_3, QWEN_3_CODER, ToolCallParser, ToolFormat, tool_format


class Call(NamedTuple):
    id: str
    name: str
    arguments: str


def parse(pieces: Sequence[str], style: ToolFormat) -> tuple[str, list[Call], int]:
    """Text, calls and the number of complete calls of an answer."""
    ids = itertools.count()
    parser = ToolCallParser(style, lambda: f"id{next(ids)}", [{"type": "function", "function": {"name": "f"}}])
    results = [*map(parser.push, pieces), parser.flush()]
    calls: list[Call] = []
    for delta in itertools.chain.from_iterable(deltas for _, deltas in results):
        if delta.id:
            assert delta.number == len(calls)
            calls.append(Call(delta.id, delta.name, delta.arguments))
        else:
            assert (delta.number, delta.name) == (len(calls) - 1, "")
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + delta.arguments)
    return "".join(text for text, _ in results), calls, parser.num_calls


def hermes(text: str) -> tuple[str, list[tuple[str, str]], int]:
    content, calls, num_calls = parse([text], HERMES)
    return content, [call[1:] for call in calls], num_calls


def llama(text: str) -> tuple[str, list[tuple[str, str]], int]:
    content, calls, num_calls = parse([text], LLAMA_3)
    return content, [call[1:] for call in calls], num_calls


CALL = '{"name": "f", "arguments": {"a": [1, "}\\"{"]}}'
ARGUMENTS = '{"a": [1, "}\\"{"]}'


@pytest.mark.parametrize(
    ("text", "content", "calls", "num_calls"),
    [
        ("no call", "no call", [], 0),
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)], 1),
        (f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [("f", ARGUMENTS)], 1),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [("f", ARGUMENTS)] * 2, 2),
        (f"One. <tool_call>{CALL}</tool_call>\n\nTwo.", "One.\nTwo.", [("f", ARGUMENTS)], 1),
        (f"One.\n<tool_call>{CALL}</tool_call><tool_call>f", "One.\n<tool_call>f", [("f", ARGUMENTS)], 1),
        (f"One.\n<tool_call>{CALL}</tool_call>\n", "One.", [("f", ARGUMENTS)], 1),
        (f"One.<tool_call>{CALL}</tool_call> <tool", "One.\n<tool", [("f", ARGUMENTS)], 1),
        (f"<tool_call>{CALL}</tool_call> done", "done", [("f", ARGUMENTS)], 1),
        ('<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}</tool_call>', "", [("f", '{"a": "\ufffd"}')], 1),
        (f"<tool_call>{CALL}", "", [("f", ARGUMENTS)], 1),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')], 0),
        # Without their last braces
        (f"<tool_call>{CALL[:-1]}\n</tool_call>\n<tool_call>{CALL}</tool_call> x", "x", [("f", ARGUMENTS)] * 2, 2),
        (f"<tool_call>{CALL[:-2]}</tool_call> x", "x", [("f", ARGUMENTS)], 1),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"</tool_call> x', "x", [("f", '{"a": 1}')], 1),
        (f"<tool_call>{CALL[:-1]}", "", [("f", ARGUMENTS)], 1),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', "", [("f", '{"a": "</tool_call>"}')], 1),
        ('<tool_call>{"name": "f", "arguments": {"a": 1 <', "", [("f", '{"a": 1 <')], 0),
        # Members in another order, or more of them
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')], 1),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "x": {"y": 2}}</tool_call>', "", [("f", '{"a": 1}')], 1),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")], 1),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")], 1),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')], 1),
        # No calls
        (f'<tool_call>{{"a": {"[" * 2000}{"]" * 2000}}}', f'<tool_call>{{"a": {"[" * 2000}{"]" * 2000}}}', [], 0),
        ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", [], 0),
        ('<tool_call>{"a": 1}</tool_call> x', '<tool_call>{"a": 1}</tool_call> x', [], 0),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', [], 0),
        ('<tool_call>{"name": "f", "arguments": 3}', '<tool_call>{"name": "f", "arguments": 3}', [], 0),
        (' <tool_call> {"name', ' <tool_call> {"name', [], 0),
        ("a <tool", "a <tool", [], 0),
        ("a <tool bar>\n ", "a <tool bar>\n ", [], 0),
        (f"<tool_call>{CALL}</tool_call>\n<tool", "<tool", [("f", ARGUMENTS)], 1),
    ],
)  # fmt: skip
def test_calls_of_hermes_and_qwen(text: str, content: str, calls: list[tuple[str, str]], num_calls: int) -> None:
    assert hermes(text) == (content, calls, num_calls)


@pytest.mark.parametrize(
    ("text", "content", "calls", "num_calls"),
    [
        ("no call", "no call", [], 0),
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')], 1),
        ('\n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")], 2),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')], 1),
        ('{"name": "f"}', "", [("f", "{}")], 1),
        ('{"name": "f", "parameters": null}', "", [("f", "{}")], 1),
        ('{"name": "Oslo", "parameters": null}', '{"name": "Oslo", "parameters": null}', [], 0),
        ('{"name": "Oslo"}', '{"name": "Oslo"}', [], 0),
        ('{"name": "Oslo", "people": 709037}', '{"name": "Oslo", "people": 709037}', [], 0),
        (' {"answer": 42} {"name": "f", "parameters": {}}', ' {"answer": 42} {"name": "f", "parameters": {}}', [], 0),
        ('see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', [], 0),
        ('{"name": "f", "parameters": {}} done', "done", [("f", "{}")], 1),
    ],
)
def test_calls_of_llama(text: str, content: str, calls: list[tuple[str, str]], num_calls: int) -> None:
    assert llama(text) == (content, calls, num_calls)


PARTS = [
    "<tool_call>", "</tool_call>", "\n", " ", CALL, '{"name": "g", "arguments": ', '{"b": "é\\u00e9"}', "}", "{", '"',
    "text <to", ";", '{"parameters": {}, "name": "h"}',
]  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), st.data(), st.sampled_from([HERMES, LLAMA_3]))
def test_pieces_make_no_difference(text: str, data: st.DataObject, style: ToolFormat) -> None:
    whole = parse([text], style)
    assert parse([*text], style) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)))
    assert parse([text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])], style) == whole


@settings(max_examples=50)
@given(st.text(st.sampled_from('<tol_ca>{}"\n x'), max_size=30))
def test_text_without_calls_is_unchanged(text: str) -> None:
    content, calls, _ = parse([*text], HERMES)
    assert not calls
    assert content == text


def test_a_long_answer_without_an_end_is_read_once() -> None:
    arguments = '{"a": "' + "x" * 200_000
    _, [call], _ = parse([f'<tool_call>{{"name": "f", "arguments": {arguments[:9]}', *arguments[9:]], HERMES)
    assert call.arguments == arguments


def test_formats_of_templates() -> None:
    assert tool_format("... <tool_call>\n{{ call | tojson }}\n</tool_call>") == HERMES
    assert tool_format(r"""{{- '<tool_call>\n{\"name\": <name>, \"arguments\": <json>}\n</tool_call>' }}""") == HERMES
    assert tool_format("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>") == QWEN_3_CODER
    glm = "<tool_call>{{ call.name }}{% for k, v in call.arguments.items() %}<arg_key>{{ k }}</arg_key>{% endfor %}"
    assert tool_format(glm) is None
    assert tool_format("""{{- '"parameters": ' }}""") == LLAMA_3
    assert tool_format("{{ messages }}") is None


def reasoning(pieces: Sequence[str], *, is_open: bool) -> tuple[str, str]:
    parser = ReasoningParser(is_open=is_open)
    results = [*map(parser.push, pieces), parser.flush()]
    return "".join(thought for thought, _ in results), "".join(text for _, text in results)


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "answer"),
    [
        ("<think>\nhm\n</think>\n\nYes. <think>", False, "hm", "Yes. <think>"),
        ("hm, a\n b </think> Yes.\n", True, "hm, a\n b", "Yes.\n"),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        ("No tags </think>", False, "", "No tags </think>"),
        (" No <think>", False, "", " No <think>"),
        ("<think>cut off </th", False, "cut off </th", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_apart(text: str, is_open: bool, thought: str, answer: str) -> None:
    assert reasoning([text], is_open=is_open) == reasoning([*text], is_open=is_open) == (thought, answer)
