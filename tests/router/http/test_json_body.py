"""Bodies are bounded in structure before anything is built."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.router.http import json_body, messages
from pdserve.router.http.errors import ApiError
from pdserve.router.http.json_body import Body, Structure, read_body
from pdserve.router.http.responses import ResponsesBody
from pdserve.router.http.schema import ChatBody, CompletionBody, TokenizeBody

MODELS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
}
BODY_BYTES = 8 * 2**20 - 2**10
CHAT, TEXT_COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALLED = '{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":['
ARGUMENTS_END = ']}"}}]}]}'
ASKED = '"messages":[{"role":"user","content":"hi"}]'


def large_bodies() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Path and body by kind; each body is made when it is called for: all of them take 180 MB."""

    def filled(begin: str, part: str, end: str) -> bytes:
        num_parts = (BODY_BYTES - len(begin) - len(end)) // (len(part.encode()) + 1)
        return (begin + ",".join([part] * num_parts) + end).encode()

    def members(begin: str, end: str) -> bytes:
        return (begin + ",".join(f'"k{index}":1' for index in range(BODY_BYTES // 13)) + end).encode()

    def text(end: str) -> bytes:
        return ('{"prompt":"' + "a" * (BODY_BYTES - 200) + end).encode()

    schema = f'{{{ASKED},"response_format":{{"type":"json_schema","json_schema":{{"schema":{{"enum":['
    return {
        "objects in an unknown field": (CHAT, lambda: filled(f'{{{ASKED},"x":[', '{"a":1}', "]}")),
        "unknown fields": (CHAT, lambda: members(f"{{{ASKED},", "}")),
        "unknown fields of a message": (CHAT, lambda: members('{"messages":[{"role":"user","content":"x",', "}]}")),
        "empty messages": (CHAT, lambda: filled('{"messages":[', "{}", "]}")),
        "short messages": (CHAT, lambda: filled('{"messages":[', '{"role":"user","content":"x"}', "]}")),
        "parts of a message": (
            CHAT,
            lambda: filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":"x"}', "]}]}"),
        ),
        "calls of a message": (
            CHAT,
            lambda: filled(
                '{"messages":[{"role":"assistant","tool_calls":[', '{"function":{"name":"f","arguments":"{}"}}', "]}]}"
            ),
        ),
        "tools": (CHAT, lambda: filled(f'{{{ASKED},"tools":[', '{"type":"function","function":{"name":"f"}}', "]}")),
        "variables of the template": (CHAT, lambda: members(f'{{{ASKED},"chat_template_kwargs":{{', "}}")),
        "an enum": (CHAT, lambda: filled(schema, '"ab"', "]}}}}")),
        "biases": (TEXT_COMPLETIONS, lambda: members('{"prompt":"x","logit_bias":{', "}}")),
        "stop strings": (TEXT_COMPLETIONS, lambda: filled('{"prompt":"x","stop":[', '"abc"', "]}")),
        "prompts": (TEXT_COMPLETIONS, lambda: filled('{"prompt":[', '"abc"', "]}")),
        "token ids": (TEXT_COMPLETIONS, lambda: filled('{"prompt":[', "7", "]}")),
        "a long text": (TEXT_COMPLETIONS, lambda: text('"}')),
        "an escaped text": (
            TEXT_COMPLETIONS,
            lambda: ('{"prompt":"' + "\\u00e9" * (BODY_BYTES // 6 - 10) + '"}').encode(),
        ),
        "deep lists": (TEXT_COMPLETIONS, lambda: b'{"prompt":' + b"[" * (BODY_BYTES - 20)),
        "no JSON at the end": (TEXT_COMPLETIONS, lambda: text('"')),
        "a text to tokenize": ("/tokenize", lambda: text('"}')),
        "values in the arguments of a call": (CHAT, lambda: filled(CALLED, "1", ARGUMENTS_END)),
        "values in the arguments of calls": (
            CHAT,
            lambda: filled('{"messages":[', CALLED.partition("[")[2] + "1," * 999 + "1" + ARGUMENTS_END[:-2], "]}"),
        ),
        "items of a response": ("/v1/responses", lambda: filled('{"input":[', '{"role":"user","content":"x"}', "]}")),
    }


KINDS = large_bodies()
TEXTS = {"a long text", "an escaped text", "a text to tokenize"}
DECODED = {"no JSON at the end", "values in the arguments of a call", "values in the arguments of calls"}
"""They are bounded once the body has been."""


def read(data: bytes, model: type[Body]) -> Body:
    count(data, 2**18)
    body = read_body(data, model)
    assert isinstance(body, Body)
    return body


def count(data: bytes, piece_bytes: int) -> None:
    structure = Structure(json_body.MAX_VALUES)
    for start in range(0, len(data), piece_bytes):
        structure.add(data[start : start + piece_bytes])


@pytest.mark.parametrize("kind", KINDS)
def test_large_bodies_of_many_parts_are_refused_unread(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = KINDS[kind]
    body = made()
    assert len(body) <= BODY_BYTES + 2**10
    if kind in TEXTS:
        assert read(body, MODELS[path])
        return
    if kind not in DECODED:
        monkeypatch.setattr(json_body, "_decode", None)
    with pytest.raises(ApiError) as raised:
        read(body, MODELS[path])
    assert raised.value.status_code == 400


@pytest.mark.parametrize("num_calls", [1, 64])
@pytest.mark.parametrize("first", ["", '["cut off'])
def test_arguments_of_too_many_values_are_refused_unread(
    num_calls: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "[" + "1," * (messages.MAX_CALL_VALUES // num_calls + 1) + "1]"
    calls = [{"function": {"name": "f", "arguments": each}} for each in (first, *[arguments] * num_calls)]
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]}
    monkeypatch.setattr(messages, "call_arguments", None)
    with pytest.raises(ApiError, match="Calls may have 65536 values at most") as raised:
        read(json.dumps(body).encode(), ChatBody)
    assert raised.value.param == "messages"


@pytest.mark.parametrize("calls_of_a_message", [1, 128])
def test_calls_are_counted_before_one_is_read(calls_of_a_message: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}] * calls_of_a_message
    message = {"role": "assistant", "tool_calls": calls}
    body = {"messages": [message] * (messages.MAX_CALLS // calls_of_a_message)}
    assert read_body(json.dumps(body).encode(), ChatBody)
    body["messages"].append({**message, "tool_calls": calls[:1]})
    monkeypatch.setattr(messages, "call_arguments", None)
    with pytest.raises(ApiError, match="There may be 4096 calls at most"):
        read_body(json.dumps(body).encode(), ChatBody)


def test_collections_of_garbage_do_not_go_through_texts_of_messages() -> None:
    body = read_body(
        json.dumps({"messages": [{"role": "user", "content": ["a", "b"], "name": "c"}] * 9}).encode(), ChatBody
    )
    assert body.messages == [{"role": "user", "content": "a\nb", "name": "c"}] * 9
    assert not any(map(gc.is_tracked, body.messages))


def counts(value: object) -> tuple[int, int, int]:
    """Strings, containers, and values inside containers."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = [*value.values()]
    elif isinstance(value, list):
        inner = value
    below = [counts(each) for each in inner]
    num_strings = isinstance(value, str) + (len(value) if isinstance(value, dict) else 0)
    return (
        num_strings + sum(each[0] for each in below),
        isinstance(value, dict | list) + sum(each[1] for each in below),
        max(len(inner) - 1, 0) + sum(each[2] for each in below),
    )


TEXT = st.text(st.sampled_from('ab"\\{}[],:\n\u00e9'), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


@given(JSON, st.booleans(), st.integers(1, 20))
def test_what_is_counted_is_what_would_be_built(value: object, ensure_ascii: bool, piece_bytes: int) -> None:
    data = json.dumps({"x": value}, ensure_ascii=ensure_ascii).encode()
    num_strings, num_containers, num_others = counts({"x": value})
    limits = {"MAX_STRINGS": num_strings, "MAX_CONTAINERS": num_containers, "MAX_VALUES": num_others + 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, number in limits.items():
            patch.setattr(json_body, name, number)
        count(data, piece_bytes)
        for name, number in limits.items():
            patch.setattr(json_body, name, number - 1)
            with pytest.raises(ApiError):
                count(data, piece_bytes)
            patch.setattr(json_body, name, number)


@given(JSON, st.booleans())
@example([{"a": [[{"b": [{"c": [{"d": [{}]}]}]}]]}, 1], False)
def test_what_is_decoded_in_parts_is_the_same(value: object, has_spaces: bool) -> None:
    data = json.dumps({"x": value}, indent=1 if has_spaces else None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "LARGE_BYTES", 0)
        assert json_body.decoded(data) == {"x": value}
        with pytest.raises(msgspec.DecodeError):
            json_body.decoded(data[:-1])


@pytest.mark.parametrize("kind", ["messages", "parts"])
def test_other_threads_run_between_the_parts_of_a_body(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message: dict[str, object] = {"role": "user", "content": "x" * 100}
    messages = [message] * 2**13
    if kind == "parts":
        messages = [{"role": "user", "content": messages}]
    spy = Mock(wraps=json_body._decode)
    monkeypatch.setattr(json_body, "_decode", spy)
    assert json_body.decoded(json.dumps({"messages": messages}).encode()) == {"messages": messages}
    assert max(len(call.args[0]) for call in spy.call_args_list) < 200


def test_a_body_is_not_searched_for_parts_at_every_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(wraps=json_body._members)
    monkeypatch.setattr(json_body, "_members", spy)
    json_body.decoded(b'{"x":' * 100 + b'"%b"' % (b"x" * json_body.LARGE_BYTES) + b"}" * 100)
    assert spy.call_count == json_body.PART_LEVELS


PARTS = st.sampled_from(["\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\\\", "ud83d", '\\"', "\\u00e9", "\\n", "é", "a"])


@given(st.lists(PARTS, max_size=8).map("".join))
@example("\\ud83d\\ud83d\\ude00")
def test_half_of_a_surrogate_pair_is_the_replacement_character(text: str) -> None:
    """Python's decoder keeps such halves."""
    data = f'["{text}", {{"{text}": "{text}"}}]'.encode()
    whole = "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in json.loads(f'"{text}"'))
    assert json_body.decoded(data) == [whole, {whole: whole}]


@pytest.mark.parametrize("text", [b"a" * 2**20, "\u8a9e".encode() * 2**19])
def test_a_body_that_is_cut_off_is_searched_in_short_pieces(text: bytes) -> None:
    body = b'{"prompt":"' + text
    assert max(len(match[0]) for match in json_body._HALVES.finditer(body)) <= 2**17
    with pytest.raises(msgspec.DecodeError, match="truncated"):
        json_body.decoded(body)


class _Part(dict[str, object]):
    """That cannot be held against all others, of which there may be thousands."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError


def test_thoughts_are_told_from_texts_part_by_part() -> None:
    parts = [_Part(type="thinking", thinking="Hm."), _Part(type="text", text="Yes.")]
    body = ChatBody.model_validate({"messages": [{"role": "assistant", "content": parts}]})
    assert (body.messages[0]["reasoning"], body.messages[0]["content"]) == ("Hm.", "Yes.")


def test_arguments_have_whole_characters() -> None:
    assert messages.call_arguments(r'{"\ud83d": ["\ud83d\ude00", "\ud83d"]}') == {"\ufffd": ["😀", "\ufffd"]}


def test_what_was_refused_is_freed_item_by_item(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"messages": [{"role": "nobody"}] * 3}
    monkeypatch.setattr(json_body, "decoded", lambda data: content)
    with pytest.raises(ApiError):
        read_body(b"{}", ChatBody)
    assert content == {"messages": []}
