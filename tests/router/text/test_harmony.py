"""Answers in the harmony format, whatever tokens they are cut into and wherever they end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.events import RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason
from pdserve.router.text.answer import Choice, TextDelta
from pdserve.router.text.answer_text import StopStrings
from pdserve.router.text.harmony import HarmonyParts, tools_for_template, turns_for_template
from pdserve.router.text.tokenizer import ChatTokenizer
from pdserve.router.text.tool_calls import HARMONY
from tests.router.small_tokenizers import EOS_ID, HARMONY_TOKENS, write_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g.h"}}]
THOUGHT = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, "<|start|>{{ tools }}<|channel|><|message|>")
    return ChatTokenizer.from_folder(folder)


class Parsed(NamedTuple):
    reasoning: str
    text: str
    calls: list[tuple[str, str]]
    end: str | None


CALLED = Parsed("", "", [("f", "{}")], "tool_calls")


def tokens_of(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return asyncio.run(tokenizer.encode(text, add_special_tokens=False))


def choice_of(
    tokenizer: ChatTokenizer,
    begun: str = "",
    *,
    offered: Any = TOOLS,
    may_call_several: bool = True,
    stop: Sequence[str] = (),
    skips_special_tokens: bool = True,
) -> Choice:
    ids = itertools.count()
    parts = HarmonyParts(begun, lambda: f"id{next(ids)}", offered, may_call_several=may_call_several)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skips_special_tokens, is_marked=True)
    return Choice(0, detokenizer, StopStrings(stop), parts=parts)


def deltas_of(choice: Choice, tokens: Sequence[int], finish: FinishReason = FinishReason.STOP) -> list[TextDelta]:
    deltas = []
    for index, token in enumerate(tokens):
        end = finish if index == len(tokens) - 1 else FinishReason.NONE
        delta = choice.push(TokenEvent(RequestKey(0, 1, 0), 0, index, token, None, end))
        assert delta is not None
        deltas.append(delta)
        if choice.is_over:
            break
    return deltas


def joined(deltas: Sequence[TextDelta]) -> Parsed:
    calls: list[tuple[str, str]] = []
    for call in itertools.chain.from_iterable(delta.calls for delta in deltas):
        if call.id:
            assert (call.number, call.id) == (len(calls), f"id{len(calls)}")
            calls.append((call.name, call.arguments))
        else:
            assert (call.number, call.name) == (len(calls) - 1, "")
            name, arguments = calls[-1]
            calls[-1] = name, arguments + call.arguments
    reasoning, text = ("".join(getattr(delta, name) for delta in deltas) for name in ("reasoning", "text"))
    return Parsed(reasoning, text, calls, deltas[-1].end)


def parsed(tokenizer: ChatTokenizer, text: str, finish: FinishReason = FinishReason.STOP, **options: Any) -> Parsed:
    """Parts of an answer; STOP is the token EOS after it."""
    tokens = tokens_of(tokenizer, text) + ([EOS_ID] if finish is FinishReason.STOP else [])
    return joined(deltas_of(choice_of(tokenizer, **options), tokens, finish))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}hm{NEXT}{FINAL}Yes.", Parsed("hm", "Yes.", [], "stop")),
        (f"{FINAL}Yes.<|return|>", Parsed("", "Yes.", [], "stop")),
        (f"{THOUGHT}hm{NEXT}{THOUGHT}ho{NEXT}{FINAL}Yes.", Parsed("hm\nho", "Yes.", [], "stop")),
        (f"{THOUGHT}hm{NEXT}{CALL}{{}}<|call|>", Parsed("hm", "", [("f", "{}")], "tool_calls")),
        # Headers as gpt-oss writes them
        (" to=functions.f<|channel|>commentary json<|message|>{}", CALLED),
        ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}", CALLED),
        ("<|channel|>commentary to=functions.f json<|message|>{}", CALLED),
        ("<|channel|>commentary to=f code<|message|>{}", CALLED),
        ("<|channel|>analysis to=functions.g.h <|message|>{}", Parsed("", "", [("g.h", "{}")], "tool_calls")),
        ("<|channel|>commentary to=functions.other<|message|>{}", Parsed("", "", [("other", "{}")], "tool_calls")),
        # Several
        (f"{CALL}1<|call|><|start|>assistant{CALL}2<|end|>", Parsed("", "", [("f", "1"), ("f", "2")], "tool_calls")),
        (f"{CALL}<|call|>", CALLED),
        (f"{CALL}1{THOUGHT}hm{FINAL}Yes.", Parsed("hm", "Yes.", [("f", "1")], "tool_calls")),
        # Before calls
        (f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}1", Parsed("", "I look.", [("f", "1")], "tool_calls")),
        (f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}Yes.", Parsed("", "I look.\nYes.", [], "stop")),
        # Tools that nobody offered
        ("<|channel|>commentary to=python<|message|>1", Parsed("", "1", [], "stop")),
        ("<|channel|>analysis to=browser.search code<|message|>1", Parsed("1", "", [], "stop")),
        # What is no message
        ("Yes.", Parsed("", "Yes.", [], "stop")),
        (" tomorrow", Parsed("", " tomorrow", [], "stop")),
        ("to", Parsed("", "to", [], "stop")),
        ("assistant", Parsed("", "assistant", [], "stop")),
        (f"{FINAL}Yes.<|end|>And no", Parsed("", "Yes.\nAnd no", [], "stop")),
        ("<|message|>Yes.", Parsed("", "Yes.", [], "stop")),
        (f"{FINAL}a<|message|>b<|constrain|>c", Parsed("", "abc", [], "stop")),
        ("<|start|>assistant<|message|>Yes.", Parsed("", "Yes.", [], "stop")),
        ("<|channel|>" + "final " * 100, Parsed("", "final " * 100, [], "stop")),
        ("to=f " * 200, Parsed("", "to=f " * 200, [], "stop")),
        ("\n" * 600, Parsed("", "\n" * 600, [], "stop")),
        ("", Parsed("", "", [], "stop")),
    ],
)  # fmt: skip
def test_messages_become_parts(tokenizer: ChatTokenizer, text: str, expected: Parsed) -> None:
    assert parsed(tokenizer, text) == expected
    assert parsed(tokenizer, text, skips_special_tokens=False).calls == expected.calls


@pytest.mark.parametrize("text", ["<|channel|>fin", "<|channel|>", "<|start|>assist", " to=functions.f", CALL[:-11]])
def test_a_header_that_is_cut_off_is_no_text(tokenizer: ChatTokenizer, text: str) -> None:
    for before, said in (("", ""), (f"{FINAL}Yes.<|end|>", "Yes.")):
        assert parsed(tokenizer, before + text, FinishReason.LENGTH) == Parsed("", said, [], "length")


def test_a_call_that_is_cut_off_is_none_that_ends_the_answer(tokenizer: ChatTokenizer) -> None:
    assert parsed(tokenizer, f'{CALL}{{"a', FinishReason.LENGTH) == Parsed("", "", [("f", '{"a')], "length")
    assert parsed(tokenizer, CALL, FinishReason.LENGTH) == Parsed("", "", [("f", "")], "length")
    assert parsed(tokenizer, f'{CALL}{{"a": 1}}', stop=["a"]) == Parsed("", "", [("f", '{"')], "stop")


def test_without_tools_a_call_is_text(tokenizer: ChatTokenizer) -> None:
    assert parsed(tokenizer, f"{CALL}{{}}", offered=None) == Parsed("", "{}", [], "stop")


def test_one_call_may_be_all(tokenizer: ChatTokenizer) -> None:
    text = f"{THOUGHT}hm{NEXT}{CALL}1<|call|><|start|>assistant{CALL}2"
    assert parsed(tokenizer, text, may_call_several=False) == Parsed("hm", "", [("f", "1")], "tool_calls")


def test_stop_strings_are_searched_in_texts_alone(tokenizer: ChatTokenizer) -> None:
    text = f"{THOUGHT}hm{NEXT}{FINAL}The final word"
    assert parsed(tokenizer, text, stop=["final", "analysis"]) == Parsed("hm", "The ", [], "stop")
    assert parsed(tokenizer, text, stop=["mT", "m<"]) == Parsed("hm", "The final word", [], "stop")


def test_text_of_the_tokens_is_text(tokenizer: ChatTokenizer) -> None:
    quoted = asyncio.run(tokenizer.encode_chat(tokenizer._marked_text("<|end|> and <|call|>")))
    tokens = [*tokens_of(tokenizer, FINAL), *quoted, EOS_ID]
    assert joined(deltas_of(choice_of(tokenizer), tokens)).text == "<|end|> and <|call|>"


def test_a_character_ends_with_its_message(tokenizer: ChatTokenizer) -> None:
    half = [token for token in range(400) if tokenizer.token_bytes(token) == b"\xf0"]
    tokens = [*tokens_of(tokenizer, THOUGHT), *half, *tokens_of(tokenizer, f"{NEXT}{FINAL}Yes."), EOS_ID]
    assert joined(deltas_of(choice_of(tokenizer), tokens)) == Parsed("\ufffd", "Yes.", [], "stop")


# Any tokens

PIECES = [
    *HARMONY_TOKENS,
    "assistant",
    "analysis",
    "final",
    "commentary",
    " to=functions.f",
    " json",
    "to",
    "{}",
    "🙂",
    "é\n",
    " ",
]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=24),
    st.lists(st.integers(0, 255), max_size=6),
    st.sampled_from([[], ["ab"], ["final"], ["🙂"]]),
    st.booleans(),
)
def test_what_is_streamed_is_what_is_whole(
    tokenizer: ChatTokenizer, pieces: list[str], other: list[int], stop: list[str], is_cut: bool
) -> None:
    tokens = [*tokens_of(tokenizer, "".join(pieces)), *other, *([] if is_cut else [EOS_ID])] or [EOS_ID]
    finish = FinishReason.LENGTH if is_cut else FinishReason.STOP
    streamed = joined(deltas_of(choice_of(tokenizer, stop=stop), tokens, finish))
    for text in (streamed.reasoning, streamed.text, *itertools.chain.from_iterable(streamed.calls)):
        text.encode()  # no mark is left
    # The same text at once
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True, is_marked=True)
    parts = HarmonyParts("", iter(map("id{}".format, itertools.count())).__next__, TOOLS, may_call_several=True)
    whole = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
    reasoning, text, calls, end = parts.push(whole, "length" if is_cut else "stop")
    if not stop:
        assert streamed == joined([TextDelta(0, text, end, reasoning=reasoning, calls=calls)])


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_an_answer_cut_anywhere_loses_no_text(tokenizer: ChatTokenizer, data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text("ab🙂é <|", min_size=1), min_size=3, max_size=3))
    heads = [THOUGHT, CALL, FINAL]
    messages = [[*tokens_of(tokenizer, head), *asyncio.run(tokenizer.encode_chat(tokenizer._marked_text(text)))]
                for head, text in zip(heads, texts, strict=True)]  # fmt: skip
    link = tokens_of(tokenizer, NEXT)
    tokens = [*messages[0], *link, *messages[1], *link, *messages[2]]
    length = data.draw(st.integers(1, len(tokens)))
    deltas = deltas_of(choice_of(tokenizer), tokens[:length], FinishReason.LENGTH)
    got = joined(deltas)
    assert got.end == "length"
    lengths = [len(messages[0]) + len(link), len(messages[1]) + len(link), len(messages[2])]
    for index, said in enumerate((got.reasoning, "".join(arguments for _, arguments in got.calls), got.text)):
        num_tokens = length - sum(lengths[:index]) - len(tokens_of(tokenizer, heads[index]))
        body = messages[index][len(tokens_of(tokenizer, heads[index])) :]
        assert said == b"".join(map(tokenizer.token_bytes, body[: max(num_tokens, 0)])).decode(errors="replace")


# Prompts


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<|start|>user<|message|>a<|end|><|start|>assistant", f"{THOUGHT}hm", Parsed("hm", "", [], "stop")),
        (f"<|start|>assistant{FINAL}Ye", "s.", Parsed("", "s.", [], "stop")),
        (f"<|start|>assistant{THOUGHT}", f"hm{NEXT}{FINAL}Yes.", Parsed("hm", "Yes.", [], "stop")),
        (f"<|start|>assistant{FINAL}No.<|end|>", f"<|start|>assistant{FINAL}Yes.", Parsed("", "Yes.", [], "stop")),
        ("", f"{FINAL}Yes.", Parsed("", "Yes.", [], "stop")),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ends(
    tokenizer: ChatTokenizer, prompt: str, text: str, expected: Parsed
) -> None:
    assert tokenizer.harmony is not None
    begun = tokenizer.harmony.begun(tokens_of(tokenizer, prompt), tokenizer.token_text)
    assert bool(begun) == (not text.startswith("<|"))
    assert parsed(tokenizer, text, begun=begun) == expected


def test_every_call_is_a_message_before_its_results() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "ab"]
    turns = turns_for_template(
        [
            {"role": "system", "content": "One."},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning": "hm",
                "reasoning_content": "hm",
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": "b", "content": "of b"},
            {"role": "tool", "tool_call_id": "a", "content": "of a"},
            {"role": "tool", "content": "of none"},
            {"role": "developer", "content": "Two."},
            {"role": "assistant", "content": "Yes.", "reasoning": "ho"},
        ]
    )
    shown = [
        (
            each["role"],
            each["content"],
            each.get("thinking"),
            [call["id"] for call in each.get("tool_calls", [])],
        )
        for each in turns
    ]
    assert shown == [
        ("developer", "One.\n\nTwo.", None, []),
        ("user", "hi", None, []),
        ("assistant", "", "hm\nI look.", ["a"]),
        ("tool", "of a", None, []),
        ("assistant", "", None, ["b"]),
        ("tool", "of b", None, []),
        ("tool", "of none", None, []),
        ("assistant", "Yes.", "ho", []),
    ]
    assert all("tool_calls" not in each or each["tool_calls"] for each in turns)


def test_each_result_is_compared_with_one_call_at_most() -> None:
    num_compared = 0

    class Id(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    calls = [{"id": str(index), "function": {"name": "f"}} for index in range(100)]
    results = [{"role": "tool", "tool_call_id": Id(index % 200), "content": ""} for index in range(1000)]
    turns = turns_for_template([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert num_compared <= len(results)
    assert [each["tool_call_id"] for each in turns[1:6]] == ["0"] * 5
    assert turns[-500:] == [each for each in results if int(each["tool_call_id"]) >= 100]


def test_tools_without_a_description_have_an_empty_one() -> None:
    described = {"type": "function", "function": {"name": "g", "description": "G."}}
    null = {"type": "function", "function": {"name": "h", "description": None}}
    tools = tools_for_template([TOOLS[0], described, null])
    assert [each["function"]["description"] for each in tools] == ["", "G.", ""]


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"lacks: <\|call\|>, .*; take the tokenizer of the same checkpoint"):
        ChatTokenizer.from_folder(tmp_path, HARMONY)
