"""The responses API by the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from pdserve.contracts.request import FinishReason
from pdserve.router.requests.request import GenerationError
from tests.router.edge_server import MODEL, EdgeServer, at_once, failing_after, running_edge, waiting_first
from tests.router.http.test_tools import TEMPLATE, WEATHER, rendered

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOL: Any = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with running_edge(template=TEMPLATE) as edge:
        edge.generator.max_model_len = 4096
        yield edge


def prompt_of(server: EdgeServer) -> str:
    return server.tokenizer.decode(server.generator.last.prompt_tokens)


def test_a_text(server: EdgeServer, client: openai.OpenAI) -> None:
    num_tokens = server.say("Oslo is cold.")
    response = client.responses.create(
        model=MODEL, instructions="Be brief.", input="Is Oslo cold?", max_output_tokens=50, metadata={"a": "b"}
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is Oslo cold?"}]
    assert prompt_of(server) == rendered(TEMPLATE, messages, None)
    assert (response.status, response.output_text, response.model) == ("completed", "Oslo is cold.", MODEL)
    assert response.id.startswith("resp_")
    assert response.metadata == {"a": "b"}
    assert server.generator.last.sampling.max_tokens == 50
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(server.generator.last.prompt_tokens), num_tokens)
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_an_answer_that_is_cut_is_incomplete(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say("Oslo is cold.", FinishReason.LENGTH)
    response = client.responses.create(model=MODEL, input="x")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_an_integral_limit_comes_back_as_an_integer(server: EdgeServer) -> None:
    """Typed clients read no 16.0."""
    server.say("an answer")
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", "max_output_tokens": 16.0})
    assert '"max_output_tokens":16,' in answer.text


def test_a_call_and_its_output_go_round(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say(f"<think>hm</think>I look. {CALL}{CALL}")
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Weather in Oslo?"}]}]
    response = client.responses.create(model=MODEL, input=asked, tools=[TOOL])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == "I look."
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", '{"city": "Oslo"}')] * 2
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens

    server.say("Rain.")
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    history = [*asked, *(item.model_dump(exclude_none=True) for item in response.output), *outputs]
    answer = client.responses.create(model=MODEL, input=history, tools=[TOOL])
    assert answer.output_text == "Rain."
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    expected = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function", "function": function}] * 2},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "rain"},
    ]
    assert prompt_of(server) == rendered(TEMPLATE, expected, [WEATHER])


def test_a_failure_on_the_way_is_the_last_event(server: EdgeServer, client: openai.OpenAI) -> None:
    server.generator.script = failing_after([50], GenerationError(504, "too late"))
    with client.responses.create(model=MODEL, input="x", stream=True) as stream:
        events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-2].type == "response.output_text.delta"
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == ("server_error", "too late")


def test_a_failure_before_token_0_follows_the_creation(client: openai.OpenAI) -> None:
    with running_edge(keep_alive_seconds=0.1) as edge:
        edge.generator.script = waiting_first(failing_after([], GenerationError(503, "lost")))
        with client.with_options(base_url=f"{edge.url}/v1").responses.stream(model=MODEL, input="x") as stream:
            events: list[Any] = list(stream)
    assert [(event.type, event.sequence_number) for event in events] == [
        ("response.created", 0),
        ("response.in_progress", 1),
        ("response.failed", 2),
    ]
    assert events[0].response.status == "in_progress"


def test_a_stream_builds_what_the_whole_answer_is(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say(f"<think>hm hm</think>I look. {CALL}")
    whole = client.responses.create(model=MODEL, input="x", tools=[TOOL])
    with client.responses.stream(model=MODEL, input="x", tools=[TOOL]) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]

    def joined(kind: str) -> str:
        return "".join(event.delta for event in events if event.type == kind)

    assert joined("response.reasoning_text.delta") == "hm hm"
    assert joined("response.output_text.delta") == "I look."
    assert joined("response.function_call_arguments.delta") == '{"city": "Oslo"}'
    for kind in ("output_item.added", "output_item.done"):
        assert [event.output_index for event in events if event.type == f"response.{kind}"] == [0, 1, 2]
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.usage == whole.usage


PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Applies a patch."}


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_with_free_text(server: EdgeServer, client: openai.OpenAI, streams: bool) -> None:
    server.say('<tool_call>{"name": "apply_patch", "arguments": {"input": "+a\\n"}}</tool_call>')
    choice: Any = {"type": "custom", "name": "apply_patch"}
    if streams:
        with client.responses.stream(model=MODEL, input="x", tools=[PATCH], tool_choice=choice) as stream:
            events: list[Any] = list(stream)
            response: Any = stream.get_final_response()
        [delta] = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        [done] = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
        assert delta == done == "+a\n"
    else:
        response = client.responses.create(model=MODEL, input="x", tools=[PATCH], tool_choice=choice)
    [call] = response.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", "+a\n")
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    history = [{"role": "user", "content": "x"}, call.model_dump(exclude_none=True), output]
    client.responses.create(model=MODEL, input=history, tools=[PATCH])
    assert '<tool_call>{"name": "apply_patch", "arguments": {"input": "+a\\n"}}</tool_call>' in prompt_of(server)


def test_half_a_surrogate_pair_in_free_text_is_mended(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say('<tool_call>{"name": "apply_patch", "arguments": {"input": "a\\ud83d"}}</tool_call>')
    call: Any = client.responses.create(model=MODEL, input="x", tools=[PATCH]).output[0]
    assert call.input == "a\ufffd"


def test_a_response_that_arrives_at_once_begins_empty(server: EdgeServer, client: openai.OpenAI) -> None:
    tokens = asyncio.run(server.tokenizer.encode("Oslo"))[1:]
    server.generator.script = at_once(tokens)
    with client.responses.stream(model=MODEL, input="x") as stream:
        first, *_, last = stream
    assert first.type == "response.created"
    assert first.response.output == []
    assert last.type == "response.incomplete"
    assert last.response.output_text == "Oslo"


def test_an_effort_reaches_the_template(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say("Yes.")
    client.responses.create(model=MODEL, input="x", reasoning={"effort": "none", "summary": "auto"})
    assert prompt_of(server).endswith("[assistant] <think></think>\n")
    client.responses.create(model=MODEL, input="x", reasoning={"summary": "detailed"})


class City(pydantic.BaseModel):
    name: str


def test_a_structure(server: EdgeServer, client: openai.OpenAI) -> None:
    server.say('{"name": "Oslo"}')
    response = client.responses.parse(model=MODEL, input="x", text_format=City)
    assert response.output_parsed == City(name="Oslo")
    grammar = server.generator.last.sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text)["format"]["elements"][1]["json_schema"]["required"] == ["name"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "at least 1 item"),
        ({"input": ["x"]}, "input.0", "Input should be an object"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "send the item itself, with store: false"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "'computer_call', which is not supported"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "Input should be"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "leave it out"),
        ({"background": True}, "background", "set it to false"),
        ({"tools": [{"type": 3}]}, "tools.0", "should be"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens should be 1 at least"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "text.format has the type 'grammar'; supported are"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_what_is_not_supported_is_refused(
    server: EdgeServer, fields: dict[str, object], param: str, message: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "x", **fields})
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param
