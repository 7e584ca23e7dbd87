"""The Messages API by the official `anthropic` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from pdserve.contracts.request import FinishReason
from pdserve.router.requests.request import GenerationError
from tests.router.edge_server import MODEL, EdgeServer, at_once, failing_after, running_edge, waiting_first
from tests.router.http.test_tools import TEMPLATE, rendered

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "Of a city.", "input_schema": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}}
ASKED: Any = [{"role": "user", "content": "Is Oslo cold?"}]
MAX_MODEL_LEN = 4096


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with running_edge(template=TEMPLATE, keep_alive_seconds=0.1) as edge:
        edge.generator.max_model_len = MAX_MODEL_LEN
        yield edge


@pytest.fixture
def client(server: EdgeServer) -> Iterator[anthropic.Anthropic]:
    server.generator.refusal = None
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def prompt_of(server: EdgeServer) -> str:
    return server.tokenizer.decode(server.generator.last.prompt_tokens)


def test_a_text(server: EdgeServer, client: anthropic.Anthropic) -> None:
    num_tokens = server.say("Oslo is cold.")
    message = client.messages.create(
        model=MODEL,
        max_tokens=50,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=ASKED,
        metadata={"user_id": "me"},
        extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.5, "seed": 3},
    )
    assert prompt_of(server) == rendered(TEMPLATE, [{"role": "system", "content": "Be brief."}, *ASKED], None)
    [block] = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.stop_sequence) == ("Oslo is cold.", "end_turn", None)
    assert (message.model, message.role, message.type) == (MODEL, "assistant", "message")
    assert message.id.startswith("msg_")
    usage, num_prompt_tokens = message.usage, len(server.generator.last.prompt_tokens)
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (num_prompt_tokens - 3, 3)
    assert usage.output_tokens == num_tokens
    sampling = server.generator.last.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (50, 0.5, 7, 0.5)
    assert sampling.seed == 3


def test_events_have_their_order(server: EdgeServer) -> None:
    server.say(f"<think>Hm.</think>I look. {CALL}")
    body = {"model": MODEL, "max_tokens": 500, "messages": ASKED, "tools": [TOOL], "stream": True}
    text = httpx.post(f"{server.url}/v1/messages?beta=true", json=body).text
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        kind, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    kinds = [event["type"] for event in events]
    without_repeats = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert without_repeats == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert [event["index"] for event in events if event["type"] in block[::2]] == [0, 0, 1, 1, 2, 2]
    starts = [event["content_block"]["type"] for event in events if event["type"] == block[0]]
    assert starts == ["thinking", "text", "tool_use"]
    before = events[0]["message"]
    assert (before["content"], before["stop_reason"], before["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("is_at_once", [False, True])
def test_a_stream_is_what_a_whole_answer_is(server: EdgeServer, client: anthropic.Anthropic, is_at_once: bool) -> None:
    says = f"<think>Hm.</think>I look. {CALL}\n{CALL}"
    server.say(says)
    asked: Any = {"model": MODEL, "max_tokens": 500, "messages": ASKED, "tools": [TOOL]}
    whole = client.messages.create(**asked)
    if is_at_once:
        server.generator.script = at_once(asyncio.run(server.tokenizer.encode(says))[1:])
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()

    def shown(message: anthropic.types.Message) -> list[dict[str, Any]]:
        names = ("type", "thinking", "signature", "text", "name", "input")
        return [{name: getattr(block, name) for name in names if hasattr(block, name)} for block in message.content]

    call = {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    assert shown(streamed) == shown(whole) == [thought, {"type": "text", "text": "I look."}, call, call]
    assert whole.stop_reason == "tool_use"
    assert is_at_once or streamed.stop_reason == "tool_use"


def test_a_turn_with_tools(server: EdgeServer, client: anthropic.Anthropic) -> None:
    server.say(f"<think>Hm.</think>{CALL}")
    first = client.messages.create(model=MODEL, max_tokens=500, messages=ASKED, tools=[TOOL])
    call = first.content[-1]
    assert call.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "-3 °C"}]}
    failed: Any = {"type": "tool_result", "tool_use_id": call.id, "is_error": True}
    turns: Any = [
        *ASKED,
        first.to_param(),
        {"role": "user", "content": [result, failed, {"type": "text", "text": "?"}]},
    ]
    server.say("Yes.")
    client.messages.create(model=MODEL, max_tokens=500, messages=turns, tools=[TOOL])
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "-3 °C"},
        {"role": "tool", "tool_call_id": call.id, "content": "error: "},
        {"role": "user", "content": "?"},
    ]
    assert prompt_of(server) == rendered(TEMPLATE, messages, [CHAT_TOOL])
    counted = client.messages.count_tokens(model=MODEL, messages=turns, tools=[TOOL])
    assert counted.input_tokens == len(server.generator.last.prompt_tokens)
    beta = client.beta.messages.count_tokens(model=MODEL, messages=turns, betas=["files-api-2025-04-14"])
    assert beta.input_tokens < counted.input_tokens


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False),
    ],
)
def test_tool_choices(server: EdgeServer, client: anthropic.Anthropic, choice: Any, is_forced: bool) -> None:
    server.say(f"{CALL}\n{CALL}")
    message = client.messages.create(model=MODEL, max_tokens=500, messages=ASKED, tools=[TOOL], tool_choice=choice)
    assert len(message.content) == 1 + ("disable_parallel_tool_use" not in choice)
    assert (server.generator.last.sampling.grammar is not None) == is_forced
    none = client.messages.create(
        model=MODEL, max_tokens=500, messages=ASKED, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert none.stop_reason == "end_turn"


def test_a_stop_sequence_is_named(server: EdgeServer, client: anthropic.Anthropic) -> None:
    server.say("one two three")
    asked: Any = {"model": MODEL, "max_tokens": 50, "messages": ASKED, "stop_sequences": ["zzz", "o thr"]}
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**asked), streamed):
        [block] = message.content
        assert isinstance(block, anthropic.types.TextBlock)
        assert block.text == "one tw"
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "o thr")


def test_a_limit_is_told_from_the_end_of_the_context(server: EdgeServer, client: anthropic.Anthropic) -> None:
    server.say("one two three", FinishReason.LENGTH)
    assert client.messages.create(model=MODEL, max_tokens=5, messages=ASKED).stop_reason == "max_tokens"
    asked: Any = {"model": MODEL, "max_tokens": 10 * MAX_MODEL_LEN, "messages": ASKED}
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().stop_reason == "model_context_window_exceeded"
    last = server.generator.last
    assert len(last.prompt_tokens) + last.sampling.max_tokens == MAX_MODEL_LEN


def test_the_start_of_an_answer_is_continued(server: EdgeServer, client: anthropic.Anthropic) -> None:
    server.say("cold.")
    turns: Any = [*ASKED, {"role": "assistant", "content": "Oslo is"}]
    client.messages.create(model=MODEL, max_tokens=5, messages=turns)
    assert prompt_of(server).endswith("Oslo is")


def test_an_output_format_is_enforced(server: EdgeServer, client: anthropic.Anthropic) -> None:
    server.say('{"city": "Oslo"}')
    output: Any = {"format": {"type": "json_schema", "schema": PARAMETERS}, "effort": "high"}
    client.messages.create(model=MODEL, max_tokens=50, messages=ASKED, output_config=output)
    grammar = server.generator.last.sampling.grammar
    assert grammar is not None
    assert '"city"' in grammar.text


def test_mistakes_are_typed(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 5, "messages": ASKED}
    with pytest.raises(anthropic.NotFoundError, match="this server has `small`") as unknown:
        client.messages.create(**{**asked, "model": "claude-opus-5-5"})
    assert isinstance(unknown.value.body, dict)
    assert unknown.value.body["type"] == "error"
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="claude-opus-5-5", messages=ASKED)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for content in ([image], [{"type": "tool_result", "tool_use_id": "1", "content": [image]}]):
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content.*type image.*reads text alone"):
            client.messages.create(**{**asked, "messages": [{"role": "user", "content": content}]})
    for field, value, told in [
        ("stop_sequences", [""] * 17, "stop_sequences: There may be 16"),
        ("tools", [{**TOOL, "input_schema": 1}], "tools.0.input_schema should be a JSON schema"),
        ("tools", [{"type": "web_search_20250305", "name": "s"}, {"name": "a b"}], "tools.1.name should have"),
        ("tool_choice", {"type": "sometimes"}, "tool_choice should be"),
        ("output_config", {"effort": "some"}, "output_config.effort: "),
        ("output_config", {"format": {"type": "xml"}}, "output_config.format has the type"),
        ("system", 1, "system"),
        ("messages", [{"role": "user", "content": "hi"}, {"role": "wizard", "content": "x"}], "messages.1.role: "),
        ("messages", [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}], "messages: "),
        ("mcp_servers", [{}], "mcp_servers is not supported; set it to []"),
    ]:
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**asked, extra_body={field: value})
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["error"]["message"].startswith(told)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**asked, "messages": [{"role": "user", "content": "x " * MAX_MODEL_LEN}]})


@pytest.mark.parametrize(
    ("status", "expected", "kind"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (503, anthropic.InternalServerError, "overloaded_error"),
    ],
)
def test_refusals_are_typed(
    server: EdgeServer, client: anthropic.Anthropic, status: int, expected: type[anthropic.APIStatusError], kind: str
) -> None:
    server.generator.refusal = GenerationError(status, "because")
    with pytest.raises(anthropic.APIStatusError, match="because") as refused:
        client.messages.create(model=MODEL, max_tokens=5, messages=ASKED)
    assert refused.value.status_code == status
    assert isinstance(refused.value, expected) or status == 503
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == kind


def test_a_failure_in_the_middle_of_a_stream_raises_there(server: EdgeServer, client: anthropic.Anthropic) -> None:
    server.generator.script = failing_after([50, 51], GenerationError(503, "lost it"))
    texts: list[str] = []
    with (
        pytest.raises(anthropic.APIStatusError, match="lost it"),
        client.messages.stream(model=MODEL, max_tokens=50, messages=ASKED) as stream,
    ):
        texts.extend(stream.text_stream)
    assert len(texts) == 2


def test_a_stream_that_waits_says_so(server: EdgeServer, client: anthropic.Anthropic) -> None:
    server.say("Yes.")
    server.generator.script = waiting_first(server.generator.script)
    with client.messages.stream(model=MODEL, max_tokens=50, messages=ASKED) as stream:
        assert stream.get_final_text() == "Yes."
