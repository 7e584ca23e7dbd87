"""gpt-oss's channels, calls and grammars at the edge, by the official clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import xgrammar

from pdserve.contracts.request import FinishReason, Grammar
from pdserve.contracts.step import TokenLogprobs
from pdserve.engine.worker.grammar_compiler import CompilerConfig, compile_grammar, read_vocabulary
from tests.router.edge_server import MODEL, EdgeServer, running_edge, saying
from tests.router.small_tokenizers import write_tokenizer

TEMPLATE = (Path(__file__).parents[2] / "first_contact/bodies/templates/harmony.jinja").read_text()
ASKED: Any = [{"role": "user", "content": "Weather in Oslo?"}]
CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "time"}}
OSLO = '{"city": "Oslo"}'
THOUGHT = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
CALL_AS_IN_TEMPLATE = " to=functions.weather<|channel|>commentary json<|message|>"
TIME_CALL = CALL.replace("weather", "time")
PREAMBLE = "<|channel|>commentary<|message|>"


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with running_edge(template=TEMPLATE) as edge:
        edge.generator.max_model_len = 4096
        yield edge


@pytest.fixture(scope="module")
def vocabulary(server: EdgeServer, tmp_path_factory: pytest.TempPathFactory) -> xgrammar.TokenizerInfo:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, TEMPLATE)
    ends = tuple(token_of(server, text) for text in ("<|return|>", "<|call|>"))
    return read_vocabulary(CompilerConfig(str(folder), server.tokenizer.vocab_size, ends, 0))


def token_of(server: EdgeServer, text: str) -> int:
    [token] = asyncio.run(server.tokenizer.encode(text, add_special_tokens=False))
    return token


def say(server: EdgeServer, text: str, end: str) -> None:
    """Answer every later request with ``text`` and the token of ``end``."""
    tokens = asyncio.run(server.tokenizer.encode(text, add_special_tokens=False))
    server.generator.script = saying([*tokens, token_of(server, end)], FinishReason.STOP)


class Follows:
    """Whether a grammar lets a model write a text, token by token, and end there."""

    def __init__(self, server: EdgeServer, vocabulary: xgrammar.TokenizerInfo) -> None:
        self._tokenizer = server.tokenizer
        self._vocabulary = vocabulary
        self._compiled = compile_grammar(vocabulary, grammar_of(server))

    def __call__(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        mask = np.zeros((1, -(-self._vocabulary.vocab_size // 32)), np.int32)
        tokens = asyncio.run(self._tokenizer.encode_chat(text))
        for token in [*tokens, self._vocabulary.stop_token_ids[0]]:
            matcher.fill_next_token_bitmask(mask)
            if not np.unpackbits(mask.view(np.uint8), bitorder="little")[token]:
                return False
            assert matcher.accept_token(token)
        return True


def grammar_of(server: EdgeServer) -> Grammar:
    grammar = server.generator.last.sampling.grammar
    assert grammar is not None
    return grammar


# Clients


def test_a_chat_and_its_call_are_streamed(server: EdgeServer, client: openai.OpenAI) -> None:
    say(server, f"{THOUGHT}hm{NEXT}{PREAMBLE}I look.{NEXT}{CALL}{OSLO}", "<|call|>")
    with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=[WEATHER]) as stream:
        num_parts = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
        choice = stream.get_final_completion().choices[0]
    assert num_parts > 2, "arguments are streamed as they arrive"
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    [call] = choice.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", OSLO)

    say(server, f"{THOUGHT}ho{NEXT}{FINAL}Rain.", "<|return|>")
    history: Any = [*ASKED, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], n=2)
    for each in answer.choices:
        assert (each.message.content, each.finish_reason) == ("Rain.", "stop")
        assert each.message.model_extra == dict.fromkeys(("reasoning_content", "reasoning"), "ho")


@pytest.mark.parametrize("streams", [False, True])
def test_a_response(server: EdgeServer, client: openai.OpenAI, streams: bool) -> None:
    say(server, f"{THOUGHT}hm{NEXT}{CALL}{OSLO}", "<|call|>")
    asked: Any = {"model": MODEL, "input": "Weather in Oslo?", "tools": [{"type": "function", **WEATHER["function"]}]}
    if streams:
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            response = stream.get_final_response()
        assert "response.reasoning_text.delta" in kinds
        assert "response.function_call_arguments.delta" in kinds
    else:
        response = client.responses.create(**asked)
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    [_, call] = response.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", OSLO)
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_a_message(server: EdgeServer) -> None:
    say(server, f"{THOUGHT}hm{NEXT}{CALL}{OSLO}", "<|call|>")
    tool: Any = {"name": "weather", "input_schema": CITY}
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=256, messages=ASKED, tools=[tool]) as stream,
    ):
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    [thinking, use] = message.content
    assert thinking.type == "thinking"
    assert use.type == "tool_use"
    assert (thinking.thinking, use.name, use.input) == ("hm", "weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"


def test_log_probabilities_list_every_token(server: EdgeServer, client: openai.OpenAI) -> None:
    num_tokens = server.say(f"<|bos|>{FINAL}Yes.", logprobs=TokenLogprobs(-0.5, ()))
    choice = client.chat.completions.create(model=MODEL, messages=ASKED, logprobs=True).choices[0]
    assert choice.message.content == "Yes."
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or []) == num_tokens


def test_a_text_completion_is_as_the_model_wrote_it(server: EdgeServer, client: openai.OpenAI) -> None:
    say(server, f"{FINAL}Yes.", "<|return|>")
    for skips, expected in ((True, "finalYes."), (False, f"{FINAL}Yes.")):
        extra = {"skip_special_tokens": skips}
        answer = client.completions.create(model=MODEL, prompt="a", extra_body=extra)
        assert answer.choices[0].text == expected


# Grammars


@pytest.mark.parametrize(
    ("wanted", "follows", "breaks"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "out", "schema": CITY}}},
            [f"{FINAL}{OSLO}", f"{THOUGHT}hm {{<b>{NEXT}{THOUGHT}{NEXT}{FINAL}{OSLO}"],
            [OSLO, f"{FINAL}hm", f"{THOUGHT}{OSLO}", f"{PREAMBLE}hm{NEXT}{FINAL}{OSLO}", f"{FINAL}{OSLO}{NEXT}",
             f"{THOUGHT}<|channel|>{NEXT}{FINAL}{OSLO}", f'{FINAL}{{"city": "<|end|>"}}'],
        ),
        (
            {"tools": [WEATHER, TIME], "tool_choice": "required"},
            [f"{CALL}{OSLO}", f"{CALL_AS_IN_TEMPLATE}{OSLO}", f"{TIME_CALL}{{}}",
             f"{PREAMBLE}a{NEXT}{THOUGHT}b{NEXT}{CALL}{OSLO}"],
            [f"{FINAL}Yes.", f"{CALL}{{}}", f"{CALL}{OSLO}{NEXT}{CALL}{OSLO}", f"{CALL.replace('ea', 'hea')}{OSLO}"],
        ),
        (
            {"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            [f"{THOUGHT}hm{NEXT}{CALL}{OSLO}"],
            [f"{TIME_CALL}{{}}"],
        ),
        (
            {"tools": [{"type": "function", "function": {**WEATHER["function"], "strict": True}}, TIME]},
            [f"{CALL}{OSLO}", f"{THOUGHT}hm{NEXT}{FINAL}Any text.", f'{TIME_CALL}{{"a": [1]}}'],
            [f"{CALL}{{}}", "Any text.", f"{FINAL}Any text.{NEXT}{CALL}{OSLO}"],
        ),
        (
            {"tools": [WEATHER], "structured_outputs": {"regex": "yes|no"}},
            [f"{THOUGHT}hm{NEXT}{FINAL}yes", f"{CALL}{{}}"],
            [f"{FINAL}maybe", f"{PREAMBLE}hm{NEXT}{FINAL}yes"],
        ),
    ],
)  # fmt: skip
def test_a_grammar_binds_the_last_message(
    server: EdgeServer,
    client: openai.OpenAI,
    vocabulary: xgrammar.TokenizerInfo,
    wanted: dict[str, Any],
    follows: list[str],
    breaks: list[str],
) -> None:
    say(server, f"{FINAL}Yes.", "<|return|>")
    client.chat.completions.create(model=MODEL, messages=ASKED, extra_body=wanted)
    is_followed = Follows(server, vocabulary)
    for text in follows:
        assert is_followed(text), text
    for text in breaks:
        assert not is_followed(text), text


def test_text_of_a_token_is_none_of_a_grammar(
    server: EdgeServer, client: openai.OpenAI, vocabulary: xgrammar.TokenizerInfo
) -> None:
    say(server, f"{FINAL}Yes.", "<|return|>")
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "out", "schema": {"type": "string"}}}
    client.chat.completions.create(model=MODEL, messages=ASKED, response_format=wanted)
    is_followed = Follows(server, vocabulary)
    quoted = server.tokenizer._marked_text("<|end|>")
    assert is_followed(f'{FINAL}"{quoted}"')
    assert is_followed(f'{THOUGHT}{quoted}{NEXT}{FINAL}"a"')
    assert not is_followed(f'{THOUGHT}{quoted}<|start|>assistant{FINAL}"a"')


def test_a_continued_answer_is_bound_from_where_it_goes_on(
    server: EdgeServer, client: openai.OpenAI, vocabulary: xgrammar.TokenizerInfo
) -> None:
    say(server, "s", "<|return|>")
    messages = [*ASKED, {"role": "assistant", "content": "ye"}]
    extra = {"continue_final_message": True, "structured_outputs": {"regex": "s"}}
    answer = client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra)
    assert answer.choices[0].message.content == "s"
    is_followed = Follows(server, vocabulary)
    assert is_followed("s")
    assert not is_followed(f"{FINAL}s")
