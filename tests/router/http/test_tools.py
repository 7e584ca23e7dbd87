"""Tools and reasoning, by the official client, of models whose templates have them."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
import xgrammar
from transformers.utils.chat_template_utils import render_jinja_template

from pdserve.contracts.request import FinishReason, Grammar, GrammarKind
from pdserve.model.config.tokenizer_config import TAGS
from pdserve.router.http.errors import ApiError
from pdserve.router.http.json_body import LARGE_BYTES
from pdserve.router.http.schema import ChatBody
from pdserve.router.http.tools import template_options, tools_of
from pdserve.router.text.chat_template import ChatTemplate
from pdserve.router.text.reasoning import CLOSING
from pdserve.router.text.tokenizer import ChatTokenizer
from pdserve.router.text.tool_calls import HERMES, LLAMA_3, QWEN_3_CODER, ToolCallParser, ToolFormat, tool_format
from pdserve.router.text.xml_calls import call_parser
from tests.router.edge_server import MODEL, EdgeServer, running_edge
from tests.vocabulary import LIMITS, compiled, demo_tokenizer

TEMPLATE = """{{ bos_token }}{% if tools %}[tools]
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}[{{ message.role }}] {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}[assistant] {% if enable_thinking is false %}<think></think>
{% endif %}{% endif %}"""
LLAMA_TEMPLATE = TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "").replace("arguments", "parameters")
XML_TEMPLATE = TEMPLATE.replace('{"name": ..., "arguments": ...}', "<function=NAME><parameter=KEY>...</function>")

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
ASKED: Any = [{"role": "user", "content": "Weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with running_edge(template=TEMPLATE) as edge:
        edge.generator.max_model_len = 4096
        yield edge


def prompt_of(server: EdgeServer) -> str:
    return server.tokenizer.decode(server.generator.last.prompt_tokens)


def rendered(template: str, messages: Any, tools: Any) -> str:
    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=True, bos_token="<|bos|>"
    )
    text: str = texts[0]
    return text


def test_a_call_and_its_result_go_round(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say(f"I look.\n{CALL}")
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER, TIME])
    assert prompt_of(server) == rendered(TEMPLATE, ASKED, [WEATHER, TIME])
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')

    server.say("Rain.")
    history = [*ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER, TIME])
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "Rain.")
    assert answer.choices[0].message.tool_calls is None
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    expected = [
        *ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "rain"},
    ]
    assert prompt_of(server) == rendered(TEMPLATE, expected, [WEATHER, TIME])


class City(pydantic.BaseModel):
    city: str


@pytest.mark.parametrize("says", [CALL, '{"city": "Oslo"}'])
@pytest.mark.parametrize("streams", [False, True])
def test_a_call_or_a_parsed_answer(server: EdgeServer, client: openai.OpenAI, says: str, streams: bool) -> None:
    server.say(says)
    asked: Any = {"messages": ASKED, "tools": [openai.pydantic_function_tool(City, name="get_weather")]}
    if streams:
        with client.chat.completions.stream(model=MODEL, response_format=City, **asked) as stream:
            answer = stream.until_done().get_final_completion()
    else:
        answer = client.chat.completions.parse(model=MODEL, response_format=City, **asked)
    message = answer.choices[0].message
    parsed = message.tool_calls[0].function.parsed_arguments if message.tool_calls else message.parsed
    assert (bool(message.tool_calls), parsed) == (says is CALL, City(city="Oslo"))
    grammar = server.generator.last.sampling.grammar
    assert grammar is not None
    assert accepts(grammar, says)
    assert not accepts(grammar, "Oslo")


def test_a_message_with_calls_alone_has_no_content(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say(CALL)
    message = client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER]).choices[0].message
    assert message.content is None
    server.say("Yes.")
    client.chat.completions.create(model=MODEL, messages=[*ASKED, message, *ASKED], tools=[WEATHER])  # type: ignore[list-item]
    assert "None" not in prompt_of(server)


def test_half_of_a_surrogate_pair_in_arguments_is_the_replacement_character(
    server: EdgeServer, client: openai.OpenAI
) -> None:
    server.say("Yes.")
    function = {"name": "get_weather", "arguments": '{"city": "Oslo \\ud83d\\ude00 \\ud83d"}'}
    call = {"id": "a", "type": "function", "function": function}
    history: Any = [*ASKED, {"role": "assistant", "tool_calls": [call]}, *ASKED]
    client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER])
    assert "Oslo \U0001f600 \ufffd" in prompt_of(server)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_streamed_call(server: EdgeServer, client: openai.OpenAI, finish: FinishReason) -> None:
    server.say(f"I look. {CALL}\n{CALL}", finish)
    stream = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[WEATHER], stream=True, logprobs=finish is FinishReason.STOP
    )
    chunks = [chunk.choices[0] for chunk in stream]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look."
    for index in (0, 1):
        first, *rest = [part for part in parts if part.index == index]
        assert first.function is not None
        assert (first.type, first.function.name) == ("function", "get_weather")
        assert first.id
        assert not any(part.id for part in rest)
        assert "".join(part.function.arguments or "" for part in (first, *rest) if part.function) == '{"city": "Oslo"}'
        assert len(rest) > 2, "arguments are streamed as they arrive"
    assert chunks[-1].finish_reason == ("tool_calls" if finish is FinishReason.STOP else "length")


def test_without_parallel_calls_the_first_ends_the_answer(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say(f"{CALL}\n{CALL} more")
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or []) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    stream = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[WEATHER], parallel_tool_calls=False, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert {part.index for chunk in chunks for part in chunk.delta.tool_calls or []} == {0}
    assert chunks[-1].finish_reason == "tool_calls"
    assert server.generator.last.finished == [0]


def test_tools_that_must_not_be_called_are_not_offered(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say(CALL)
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == CALL
    assert prompt_of(server) == rendered(TEMPLATE, ASKED, None)


def test_reasoning_is_apart_from_the_answer(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say(f"<think>\nOslo, {CALL}?\n</think>\n\nYes.\n{CALL}")
    message = client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER]).choices[0].message
    assert message.model_extra == dict.fromkeys(("reasoning_content", "reasoning"), f"Oslo, {CALL}?")
    assert (message.content, len(message.tool_calls or [])) == ("Yes.", 1)
    stream = client.chat.completions.create(model=MODEL, messages=ASKED, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.model_extra.get(name, "") for delta in deltas if delta.model_extra) == f"Oslo, {CALL}?"
    assert "".join(delta.content or "" for delta in deltas) == f"Yes.\n{CALL}"


@pytest.mark.parametrize("opens", ["", "<think>"])
def test_tags_may_be_special_tokens(opens: str) -> None:
    with running_edge(template=TEMPLATE.replace("[assistant] ", f"[assistant] {opens}"), special=[*TAGS]) as edge:
        edge.generator.max_model_len = 4096
        edge.say(f"{'' if opens else '<think>'}hm</think>I look.{CALL}")
        body = {"messages": ASKED, "tools": [WEATHER]}
        [choice] = httpx.post(f"{edge.url}/v1/chat/completions", json=body).json()["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "I look.")
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        assert choice["finish_reason"] == "tool_calls"
        answer = httpx.post(f"{edge.url}/v1/completions", json={"prompt": "a", "max_tokens": 400}).json()
        assert answer["choices"][0]["text"].startswith("hmI look."), "text without parts hides special tokens"


@pytest.mark.parametrize(("enable_thinking", "kind"), [(True, GrammarKind.STRUCTURAL_TAG), (False, GrammarKind.REGEX)])
def test_a_structure_leaves_room_for_reasoning_that_the_template_allows(
    server: EdgeServer, client: openai.OpenAI, enable_thinking: bool, kind: GrammarKind
) -> None:
    server.say("<think>hm</think>42" if enable_thinking else "42")
    extra = {"chat_template_kwargs": {"enable_thinking": enable_thinking}, "structured_outputs": {"regex": "[0-9]+"}}
    message = client.chat.completions.create(model=MODEL, messages=ASKED, extra_body=extra).choices[0].message
    assert message.content == "42"
    grammar = server.generator.last.sampling.grammar
    assert grammar is not None
    assert grammar.kind is kind


@pytest.mark.parametrize("is_long", [True, False])
def test_whether_a_long_prompt_begins_reasoning_is_decided_beside_the_event_loop(
    server: EdgeServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    readers = set[int]()

    class NotedSource(str):
        def __contains__(self, part: object) -> bool:
            if part == CLOSING:
                readers.add(threading.get_ident())
            return str(part) in str(self)

    assert server.tokenizer.template is not None
    monkeypatch.setattr(server.tokenizer.template, "source", NotedSource(TEMPLATE))
    server.say("Yes.")
    ignored = " " * LARGE_BYTES if is_long else ""
    client.chat.completions.create(model=MODEL, messages=ASKED, metadata={"ignored": ignored})
    assert len(readers) == 1
    assert (server.loop_thread not in readers) == is_long


def test_variables_of_the_template_can_be_set(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say("Yes.")
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(model=MODEL, messages=ASKED, extra_body=extra)
    assert prompt_of(server).endswith("[assistant] <think></think>\n")


def test_special_tokens_in_tools_are_text(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say("Yes.")
    tool = {"type": "function", "function": {"name": "f", "description": "<|eos|>"}}
    client.chat.completions.create(model=MODEL, messages=ASKED, tools=[tool])  # type: ignore[list-item]
    assert prompt_of(server) == rendered(TEMPLATE, ASKED, [tool])
    assert 1 not in server.generator.last.prompt_tokens


def test_the_tokenizer_routes_know_tools(server: EdgeServer) -> None:
    body = {"messages": ASKED, "tools": [WEATHER]}
    tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    assert server.tokenizer.decode(tokens) == rendered(TEMPLATE, ASKED, [WEATHER])


def forced(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0", "should be {"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools.0", "should be {"),
        ({"tools": [TIME, {"type": "function", "function": {"name": "a b"}}]}, "tools.1.function.name", "1 to 128"),
        ({"tools": [TIME, TIME]}, "tools.1.function.name", "'get_time' is there twice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools.0.function.parameters",
            "should be a JSON schema",
        ),
        ({"tools": [TIME] * 513}, "tools", "at most 512 items after validation, not 513"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": 3, "tools": [TIME]}, "tool_choice", "should be auto, none, required"),
        ({"tool_choice": "maybe", "tools": [TIME]}, "tool_choice", "should be auto, none, required"),
        ({"tool_choice": forced("f"), "tools": [TIME]}, "tool_choice", "names 'f', which is not among the tools"),
        ({"tools": [TIME], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "contradicts forced"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}],
            },
            "tools",
            "the parameters of the tool f cannot be enforced: # has not",
        ),
        ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs", "'colour', which the model's chat template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "does not read"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "does not read"),
    ],
)
def test_what_cannot_be_offered_is_refused(
    server: EdgeServer, fields: dict[str, object], param: str, message: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": ASKED, **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param


def test_calls_of_a_user_are_refused(server: EdgeServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "x", "tool_calls": [call]}]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.0.tool_calls"


def tokenizer_with(template: str, tools: ToolFormat | None = None) -> ChatTokenizer:
    return ChatTokenizer(demo_tokenizer(), ChatTemplate(template, {}), LIMITS.vocab_size, tools)


def test_a_template_without_tools_is_the_reason() -> None:
    body = ChatBody.model_validate({"messages": ASKED, "tools": [TIME]})
    for source in ("{{ messages }}", "{{ tools }}"):
        with pytest.raises(ApiError, match="tools have no known form in the model's chat template"):
            tools_of(body, tokenizer_with(source).tool_format)
    assert tools_of(ChatBody.model_validate({"messages": ASKED, "tools": []}), None) is None


def test_a_format_that_is_named_comes_before_what_the_template_teaches() -> None:
    assert tokenizer_with("{{ tools }}", LLAMA_3).tool_format == LLAMA_3
    assert tokenizer_with(TEMPLATE).tool_format == HERMES
    assert tokenizer_with(TEMPLATE, LLAMA_3).tool_format == LLAMA_3
    assert tokenizer_with("{{ messages }}", LLAMA_3).tool_format is None


def continued(server: EdgeServer, *messages: dict[str, str], **fields: object) -> dict[str, Any]:
    body = {"messages": [*ASKED, *messages], "continue_final_message": True, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def test_an_answer_continues_the_last_message(server: EdgeServer) -> None:
    server.say("cold.")
    assert continued(server, {"role": "assistant", "content": "Oslo is "})["content"] == "cold."
    assert prompt_of(server).endswith("[assistant] Oslo is ")
    server.say("hm</think>cold.")
    message = continued(server, {"role": "assistant", "content": "<think>Oslo, "})
    assert (message["reasoning_content"], message["content"]) == ("hm", "cold.")
    server.say("<think>cold.")
    assert continued(server, {"role": "assistant", "content": "Oslo is "})["content"] == "<think>cold."
    refused = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": ASKED, "continue_final_message": True, "add_generation_prompt": True},
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_generation_prompt")


def test_a_prompt_may_end_with_the_messages(server: EdgeServer) -> None:
    body = {"messages": ASKED, "add_generation_prompt": False}
    tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    assert server.tokenizer.decode(tokens) == rendered(TEMPLATE, ASKED, None).partition("[assistant]")[0]


@pytest.mark.parametrize(
    ("source", "effort", "options"),
    [
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("{{ reasoning_effort }}{{ enable_thinking }}", "none", {"reasoning_effort": "none"}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "low", {"enable_thinking": True}),
        ("{{ messages }}", "none", {}),
    ],
)
def test_reasoning_effort_is_what_the_template_knows(source: str, effort: str, options: dict[str, object]) -> None:
    body = ChatBody.model_validate({"messages": ASKED, "reasoning_effort": effort})
    assert template_options(body, ChatTemplate(source, {})) == options


# Grammars of calls


def grammar_of_tools(template: str, **fields: object) -> Grammar:
    body = ChatBody.model_validate({"messages": ASKED, "tools": [WEATHER, TIME], **fields})
    tools = tools_of(body, tool_format(template))
    assert tools is not None
    assert tools.grammar is not None
    assert tools.grammar.kind is GrammarKind.STRUCTURAL_TAG
    return tools.grammar


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled(grammar), terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_terminated())


OSLO = '{"city": "Oslo", "days": 2}'


@pytest.mark.parametrize(("template", "style"), [(TEMPLATE, HERMES), (LLAMA_TEMPLATE, LLAMA_3)])
def test_forced_calls_are_what_the_parser_reads(template: str, style: Any) -> None:
    space = style.separator if style.opening else ""
    closing = style.closing if style.opening else ""

    def call(name: str, arguments: str) -> str:
        body = f'{{"name": "{name}", "{style.arguments_key}": {arguments}}}'
        return f"{style.opening}{space}{body}{space}{closing}"

    weather, time = call("get_weather", OSLO), call("get_time", "{}")
    required = grammar_of_tools(template, tool_choice="required")
    both = f"{weather}{style.separator}{time}"
    assert accepts(required, weather)
    assert accepts(required, time)
    assert accepts(required, both)
    for wrong in (
        "",
        call("get_weather", '{"city": "Os\tlo"}'),
        f"I look. {weather}",
        call("get_weather", "{}"),
        call("get_weather", '{"city": "Oslo", "x": 1}'),
        call("f", "{}"),
    ):
        assert not accepts(required, wrong), wrong
    only = grammar_of_tools(template, tool_choice=forced("get_time"), parallel_tool_calls=False)
    assert accepts(only, time)
    assert not accepts(only, weather)
    assert not accepts(only, f"{time}{style.separator}{time}")

    ids = itertools.count()
    parser = ToolCallParser(style, lambda: f"id{next(ids)}")
    text, deltas = parser.push(both)
    assert (text, parser.num_calls) == ("", 2)
    assert json.loads("".join(delta.arguments for delta in deltas if delta.number == 0)) == json.loads(OSLO)


def test_strict_tools_are_exact_and_others_free() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    grammar = grammar_of_tools(TEMPLATE, tools=[strict, TIME])

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    for text in ("", "Hello.", f"I look. {call('get_weather', OSLO)} Done.", call("get_time", '{"zone": "UTC"}')):
        assert accepts(grammar, text) or text, text
        matcher = xgrammar.GrammarMatcher(compiled(grammar))
        assert matcher.accept_string(text), text
    for text in (call("get_weather", "{}"), "<tool_call>f()"):
        assert not xgrammar.GrammarMatcher(compiled(grammar)).accept_string(text), text


def test_forced_calls_of_tags_are_what_the_parser_reads() -> None:
    def call(name: str, *values: str) -> str:
        return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"

    city, days = "<parameter=city>\nOslo\n</parameter>\n", "<parameter=days>\n2\n</parameter>\n"
    required = grammar_of_tools(XML_TEMPLATE, tool_choice="required")
    both = f"{call('get_weather', city, days)}\n{call('get_time')}"
    for text in (call("get_weather", city, days), call("get_weather", city), both):
        assert accepts(required, text), text
    for text in ("", call("get_weather", days), call("get_weather", city, days.replace("2", "x")), call("f", city)):
        assert not accepts(required, text), text
    strict = grammar_of_tools(XML_TEMPLATE, tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": True}}])
    assert xgrammar.GrammarMatcher(compiled(strict)).accept_string(f"I look.\n{call('get_weather', city)} Done.")
    bare = call("get_weather", days).removeprefix("<tool_call>\n")
    for text in (call("get_weather", days), bare, f"{call('get_weather', city)}\n{bare}"):
        assert not xgrammar.GrammarMatcher(compiled(strict)).accept_string(text), text
    assert xgrammar.GrammarMatcher(compiled(strict)).accept_string("I look for <func or <function")

    parser = call_parser(QWEN_3_CODER, lambda: "id", [WEATHER, TIME])
    text, deltas = parser.push(both)
    assert (text, parser.num_calls) == ("", 2)
    assert json.loads("".join(delta.arguments for delta in deltas if delta.number == 0)) == json.loads(OSLO)
    assert json.loads("".join(delta.arguments for delta in deltas if delta.number == 1)) == {}


def test_calls_of_tags_arrive_as_json() -> None:
    with running_edge(template=XML_TEMPLATE) as edge:
        edge.say(
            "I look.\n<tool_call>\n<function=get_weather>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
        )
        body = {"messages": ASKED, "tools": [WEATHER], "max_tokens": 400}
        edge.generator.max_model_len = 4096
        [choice] = httpx.post(f"{edge.url}/v1/chat/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"days": 2}'}
