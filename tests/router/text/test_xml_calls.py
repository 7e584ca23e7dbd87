"""Calls written as tags, whatever way they are cut into pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.text.tool_calls import QWEN_3_CODER
from pdserve.router.text.xml_calls import call_parser

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "object": {"type": "object"},
    "choice": {"enum": ["1", "2"]},
    "level": {"enum": [1, 2]},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "broken": {"anyOf": [{"type": [{}, 3]}, 4], "oneOf": 5},
    "other": {"$ref": "#/$defs/Other"},
    "name": {"type": "string", "enum": ["x", "y"]},
    "code": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}]


def parse(pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]], int]:
    """Text, calls and the number of complete calls of an answer."""
    parser = call_parser(QWEN_3_CODER, lambda: "id", TOOLS)
    results = [*map(parser.push, pieces), parser.flush()]
    calls: list[tuple[str, str]] = []
    for delta in itertools.chain.from_iterable(deltas for _, deltas in results):
        if delta.id:
            calls.append((delta.name, delta.arguments))
        else:
            assert (delta.number, delta.name) == (len(calls) - 1, "")
            calls[-1] = calls[-1][0], calls[-1][1] + delta.arguments
    return "".join(text for text, _ in results), calls, parser.num_calls


def call(**values: str) -> str:
    """A call as the template of Qwen3-Coder writes it."""
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "Oslo", "Oslo"),
        ("text", "5", "5"),
        ("text", " x\r", " x\r"),
        ("name", " x\r", "x"),
        ("code", "\t5", "5"),
        ("code", " null", None),
        ("text", "", ""),
        ("text", 'a "b"\n\n  <c> é </d>\n', 'a "b"\n\n  <c> é </d>\n'),
        ("text", "</function> is no end", "</function> is no end"),
        ("number", "5", 5),
        ("number", "2.50", 2.5),
        ("number", "about 5", "about 5"),
        ("number", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("list", '["</a>", 2]', ["</a>", 2]),
        ("object", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("choice", "1", "1"),
        ("level", "1", 1),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "True", "True"),
        ("either", " 5a ", " 5a "),
        ("broken", "5", "5"),
        ("other", '{"a": 1}', {"a": 1}),
        ("other", "word", "word"),
        ("unknown", "5", "5"),
    ],
)
def test_values_have_the_types_of_the_schema(name: str, written: str, value: object) -> None:
    text, [(function, arguments)], num_calls = parse([call(**{name: written})])
    assert (text, function, num_calls) == ("", "f", 1)
    assert json.loads(arguments) == {name: value}
    assert isinstance(json.loads(arguments)[name], type(value))


PAIR = call(text="x", number="1")
BARE = PAIR.removeprefix("<tool_call>\n")
QUOTING = [
    "Use `<function=f>` like this: `<function=f><parameter=text>x</parameter></function>`.",
    "```\n<function=f>\n```\nThat was all.",
    "<function=f> is a tag.",
    "\n<function=f>\n",
    "<function=f>\n</func",
    "x <function=f></function>",
]
PAIR_ARGUMENTS = '{"text": "x", "number": 1}'


@pytest.mark.parametrize(
    ("answer", "content", "calls", "num_calls"),
    [
        ("no call", "no call", [], 0),
        (f"I look.\n\n{PAIR}\n{PAIR}", "I look.", [("f", PAIR_ARGUMENTS)] * 2, 2),
        (PAIR.replace("\n", ""), "", [("f", PAIR_ARGUMENTS)], 1),
        (call(), "", [("f", "{}")], 1),
        (PAIR.replace("</function>\n", "") + PAIR, "", [("f", PAIR_ARGUMENTS)] * 2, 2),
        (PAIR.replace("1\n</parameter>", "1") + PAIR, "", [("f", PAIR_ARGUMENTS)] * 2, 2),
        (PAIR.replace("1\n</parameter>\n</function>", "1") + PAIR, "", [("f", PAIR_ARGUMENTS)] * 2, 2),
        (PAIR.replace("</parameter>", "</parameter> well <b>"), "", [("f", PAIR_ARGUMENTS)], 1),
        (PAIR.removesuffix("</tool_call>"), "", [("f", PAIR_ARGUMENTS)], 1),
        (f"I look.\n{BARE}", "I look.", [("f", PAIR_ARGUMENTS)], 1),
        (f"I look:\n\n \t{BARE}", "I look:", [("f", PAIR_ARGUMENTS)], 1),
        (f"{QUOTING[1]}\n<function=f> \n</function>", QUOTING[1], [("f", "{}")], 1),
        (f"{BARE}\n{PAIR}\n{BARE}".replace("\n</tool_call>", ""), "", [("f", PAIR_ARGUMENTS)] * 3, 3),
        # Parameters without a name
        (PAIR.replace("=text", "=te<xt") + " x", "x", [("f", '{"number": 1}')], 1),
        (PAIR.replace("=number", f"={'n' * 257}") + PAIR, "", [("f", '{"text": "x"}'), ("f", PAIR_ARGUMENTS)], 2),
        (call().replace("</func", "<parameter=text</func") + " x", "x", [("f", "{}")], 1),
        # Cut off: nobody may take the arguments for whole
        ("<tool_call>\n<function=f>\n", "", [("f", "")], 0),
        (PAIR.partition("n>\n</tool_call>")[0], "", [("f", PAIR_ARGUMENTS.removesuffix("}"))], 0),
        (PAIR.partition("number>")[0], "", [("f", '{"text": "x"')], 0),
        ("<tool_call>\n<function=f>\n<parameter=text>\nabc", "", [("f", '{"text": "abc')], 0),
        # No calls
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', [], 0),
        ("<tool_call>\n<function=f g>", "<tool_call>\n<function=f g>", [], 0),
        ("I look.\n<function=g>\n</function>", "I look.\n<function=g>\n</function>", [], 0),
        ("<function=g <function=f g>", "<function=g <function=f g>", [], 0),
        ("<tool_call>\n<func", "<tool_call>\n<func", [], 0),
        *((text, text, [], 0) for text in QUOTING),
    ],
)
def test_calls_of_qwen3_coder(answer: str, content: str, calls: list[tuple[str, str]], num_calls: int) -> None:
    assert parse([answer]) == (content, calls, num_calls)


def test_a_long_text_is_passed_on_while_it_is_written() -> None:
    parser = call_parser(QWEN_3_CODER, lambda: "id", TOOLS)
    parser.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    for piece in ("one\n", "two <b", ">"):
        _, deltas = parser.push(piece)
        assert deltas, piece


@pytest.mark.parametrize("parameters", [None, {}, {"properties": []}, {"properties": {"text": None}}])
def test_a_schema_of_any_form_will_do(parameters: object) -> None:
    parser = call_parser(QWEN_3_CODER, lambda: "id", [{"function": {"name": "f", "parameters": parameters}}])
    _, deltas = parser.push(call(text="5"))
    assert "".join(delta.arguments for delta in deltas) == '{"text": "5"}'


def test_a_long_value_is_read_once() -> None:
    numbers = ", ".join(["1"] * 50_000)
    _, [(_, arguments)], _ = parse([call(list=f"[{numbers}]")[:60], *call(list=f"[{numbers}]")[60:]])
    assert arguments == f'{{"list": [{numbers}]}}'


PARTS = [
    "<tool_call>", "\n<function=f>\n", "<function=g>", "<parameter=text>", "<parameter=number>", "<parameter=a",
    "\n", " ", "1", "x<", "</parameter>", "</function>", "</tool_call>", "</", PAIR, BARE,
]  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS), max_size=10).map("".join), st.data())
def test_pieces_make_no_difference(text: str, data: st.DataObject) -> None:
    whole = parse([text])
    assert parse([*text]) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)))
    assert parse([text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]) == whole
