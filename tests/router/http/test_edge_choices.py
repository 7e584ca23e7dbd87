"""Several choices and prompts, echo, and prompt log probabilities, whole and streamed, through the official client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionMessageParam

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.requests.request import GenerationError
from tests.router.edge_server import MODEL, EdgeServer, ScriptedGeneration, running_edge, token_event
from tests.router.small_tokenizers import BOS_ID

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
PROMPT = "the time, Größe"


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeServer]:
    with running_edge() as edge:
        yield edge


@pytest.fixture
def client(edge: EdgeServer) -> Iterator[openai.OpenAI]:
    edge.generator.refusal = None
    edge.generator.generations.clear()
    with openai.OpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def tokens_of(edge: EdgeServer, text: str) -> list[int]:
    return asyncio.run(edge.tokenizer.encode(text))[1:]


def say_each(edge: EdgeServer, *texts: str) -> int:
    """Script a different text for each choice; return the total number of tokens."""
    said = [tokens_of(edge, text) for text in texts]

    async def script(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        generation.request.num_cached_tokens = 1
        for index in range(max(map(len, said))):
            for choice in range(generation.num_choices):
                if index < len(said[choice]):
                    end = FinishReason.LENGTH if index == len(said[choice]) - 1 else FinishReason.NONE
                    logprobs = TokenLogprobs(-0.5, ()) if generation.sampling.num_logprobs >= 0 else None
                    yield token_event(choice, index, said[choice][index], logprobs, end)

    edge.generator.script = script
    return sum(map(len, said))


def joined(stream: openai.Stream[Completion], num_choices: int) -> list[str]:
    """Text of each choice of a stream; each must end once, with nothing after it."""
    texts = [""] * num_choices
    running = set(range(num_choices))
    for chunk in stream:
        for choice in chunk.choices:
            assert choice.index in running
            texts[choice.index] += choice.text
            if choice.finish_reason:
                running.remove(choice.index)
    assert not running
    return texts


def test_choices_of_a_chat(edge: EdgeServer, client: openai.OpenAI) -> None:
    num_tokens = say_each(edge, "one", "naïve café", "a 🙂")
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["one", "naïve café", "a 🙂"]
    for choice in answer.choices:
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert bytes(byte for entry in entries for byte in entry.bytes or ()).decode() == choice.message.content
    assert answer.usage is not None
    prompt_tokens = len(edge.generator.last.prompt_tokens)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, num_tokens)
    assert answer.usage.total_tokens == prompt_tokens + num_tokens


def test_choices_of_a_streamed_chat(edge: EdgeServer, client: openai.OpenAI) -> None:
    num_tokens = say_each(edge, "one", "naïve café", "a 🙂")
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, stop="é", stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    texts = [""] * 3
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == ["one", "naïve caf", "a 🙂"]
    for index in range(3):
        of_choice = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in of_choice] == ["assistant"] + [None] * (len(of_choice) - 1)
        assert [choice.finish_reason for choice in of_choice[:-1]] == [None] * (len(of_choice) - 1)
        assert of_choice[-1].finish_reason == ("stop" if index == 1 else "length")
    assert edge.generator.last.finished == []  # the stop string was the last token
    assert last.usage is not None
    assert last.usage.completion_tokens == num_tokens


@pytest.mark.parametrize("prompts", [["x", "the time"], [[7, 8], [9]]])
def test_several_prompts_are_numbered_prompt_by_prompt(edge: EdgeServer, client: openai.OpenAI, prompts: Any) -> None:
    num_tokens = say_each(edge, "one", "two")
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "one"),
        (1, "two"),
        (2, "one"),
        (3, "two"),
    ]
    assert len(edge.generator.generations) == 2
    assert answer.usage is not None
    num_prompt_tokens = sum(len(generation.prompt_tokens) for generation in edge.generator.generations)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt_tokens, 2 * num_tokens)
    stream = client.completions.create(model=MODEL, prompt=prompts, n=2, stream=True)
    assert joined(stream, 4) == ["one", "two", "one", "two"]


def test_one_prompt_that_fails_ends_the_others(edge: EdgeServer, client: openai.OpenAI) -> None:
    async def script(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        yield token_event(0, 0, 50, None, FinishReason.NONE)
        if generation.prompt_tokens == [9]:
            raise GenerationError(503, "lost it")
        await asyncio.Event().wait()

    edge.generator.script = script
    with pytest.raises(openai.InternalServerError, match="lost it"):
        client.completions.create(model=MODEL, prompt=[[7, 8], [9], [10]])
    assert [generation.cancels for generation in edge.generator.generations] == [[False], [], [False]]


def test_echo(edge: EdgeServer, client: openai.OpenAI) -> None:
    say_each(edge, " is it", " was it")
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, n=2)
    assert [choice.text for choice in answer.choices] == [f"{PROMPT} is it", f"{PROMPT} was it"]
    assert joined(client.completions.create(model=MODEL, prompt=PROMPT, echo=True, n=2, stream=True), 2) == [
        choice.text for choice in answer.choices
    ]
    tokens = edge.generator.last.prompt_tokens
    of_tokens = client.completions.create(model=MODEL, prompt=tokens, echo=True, n=2)
    assert [choice.text for choice in of_tokens.choices] == [choice.text for choice in answer.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities(edge: EdgeServer, client: openai.OpenAI, stream: bool) -> None:
    say_each(edge, " is it")
    if stream:
        chunks = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1, stream=True)
        choices = [chunk.choices[0] for chunk in chunks]
    else:
        choices = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=1).choices
    text = "".join(choice.text for choice in choices)
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        if choice.logprobs is not None:
            for name, column in columns.items():
                column += getattr(choice.logprobs, name)
    prompt_tokens, num_answer_tokens = edge.generator.last.prompt_tokens, len(tokens_of(edge, " is it"))
    assert prompt_tokens[0] == BOS_ID
    assert "".join(columns["tokens"][1:]).startswith(PROMPT[:10])  # ö takes two tokens
    expected = [None, *(-float(token) for token in prompt_tokens[1:]), *[-0.5] * num_answer_tokens]
    assert columns["token_logprobs"] == expected
    assert columns["top_logprobs"][0] is None
    own = edge.tokenizer.token_text(prompt_tokens[1])
    assert columns["top_logprobs"][1] == {own: -float(prompt_tokens[1]), edge.tokenizer.token_text(50): -0.25}
    for token, offset in zip(columns["tokens"][1:], columns["text_offset"][1:], strict=True):
        assert "\ufffd" in token or text[offset:].startswith(token)
    assert columns["text_offset"][:2] == [0, 0]  # BOS has no text


@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_long_to_write_is_written_beside_the_event_loop(
    edge: EdgeServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    writers: set[int] = set()
    token_text = edge.tokenizer.token_text

    def noted_text(token: int) -> str:
        writers.add(threading.get_ident())
        return token_text(token)

    monkeypatch.setattr(edge.tokenizer, "token_text", noted_text)
    say_each(edge, "x")
    for length, is_long in ((300, True), (10, False)):
        writers.clear()
        answer: Any = client.completions.create(
            model=MODEL, prompt=[7] * length, echo=True, logprobs=0, max_tokens=0, stream=stream
        )
        choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
        assert len(choices[0].logprobs.tokens) == length
        assert (edge.loop_thread not in writers) == is_long
        assert len(writers) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_scored_alone(edge: EdgeServer, client: openai.OpenAI, stream: bool) -> None:
    say_each(edge, "ab")
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer: Any = client.completions.create(
        model=MODEL, prompt=[7, 8, 9], echo=True, max_tokens=0, logprobs=0, **options
    )
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[-1].finish_reason == "length"
    assert choices[0].logprobs.token_logprobs == [None, -8.0, -9.0]
    assert len("".join(choice.text for choice in choices)) == 3
    assert chunks[-1].usage.completion_tokens == 0
    assert edge.generator.last.sampling.max_tokens == 1


def test_prompt_logprobs(edge: EdgeServer, client: openai.OpenAI) -> None:
    say_each(edge, "ab")
    body = {"prompt_logprobs": 2}
    expected = [
        None,
        {
            "8": {"logprob": -8.0, "rank": None, "decoded_token": edge.tokenizer.token_text(8)},
            "50": {"logprob": -0.25, "rank": 1, "decoded_token": edge.tokenizer.token_text(50)},
            "51": {"logprob": -0.5, "rank": 2, "decoded_token": edge.tokenizer.token_text(51)},
        },
        {
            "50": {"logprob": -0.25, "rank": 1, "decoded_token": edge.tokenizer.token_text(50)},
            "51": {"logprob": -0.5, "rank": 2, "decoded_token": edge.tokenizer.token_text(51)},
        },
    ]
    completion = client.completions.create(model=MODEL, prompt=[7, 8, 50], extra_body=body)
    assert completion.choices[0].model_extra is not None
    assert completion.choices[0].model_extra["prompt_logprobs"] == expected
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=1, extra_body=body)
    assert chat.model_extra is not None
    assert len(chat.model_extra["prompt_logprobs"]) == len(edge.generator.last.prompt_tokens)


def test_token_ids_of_prompt_and_answer(edge: EdgeServer, client: openai.OpenAI) -> None:
    say_each(edge, "ab")
    body = {"return_token_ids": True}
    completion = client.completions.create(model=MODEL, prompt=[7, 8], echo=True, extra_body=body)
    assert completion.choices[0].model_extra == {"token_ids": tokens_of(edge, "ab"), "prompt_token_ids": [7, 8]}
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=body)
    assert chat.choices[0].model_extra is not None
    assert chat.model_extra is not None
    assert chat.choices[0].model_extra["token_ids"] == tokens_of(edge, "ab")
    assert chat.model_extra["prompt_token_ids"] == edge.generator.last.prompt_tokens


def test_token_ids_of_an_echo_and_of_several_prompts(edge: EdgeServer, client: openai.OpenAI) -> None:
    edge.say("ab", FinishReason.LENGTH)
    body = {"return_token_ids": True}
    whole = client.completions.create(model=MODEL, prompt=[[7, 8], [9]], n=2, echo=True, extra_body=body)
    assert [choice.model_extra for choice in whole.choices] == [
        {"token_ids": tokens_of(edge, "ab"), "prompt_token_ids": prompt} for prompt in ([7, 8], [7, 8], [9], [9])
    ]
    stream = client.completions.create(model=MODEL, prompt=[7, 8], echo=True, stream=True, extra_body=body)
    extras = [chunk.choices[0].model_extra or {} for chunk in stream]
    assert [token for extra in extras for token in extra.get("token_ids", [])] == tokens_of(edge, "ab")


@pytest.mark.parametrize("stream", [False, True])
def test_times_are_of_the_slowest_choice(edge: EdgeServer, client: openai.OpenAI, stream: bool) -> None:
    num_tokens = say_each(edge, "a", "the time to first token")
    edge.metrics.__init__()  # type: ignore[misc]
    answer = client.completions.create(model=MODEL, prompt="x", n=2, stream=stream)
    if isinstance(answer, openai.Stream):
        list(answer)
    metrics = edge.metrics
    assert (len(metrics.first_tokens_s), len(metrics.gaps_s)) == (2, num_tokens - 2)
    (timing,) = metrics.answers
    assert timing.num_tokens == num_tokens
    assert timing.ttft_s == max(metrics.first_tokens_s)
    assert timing.tpot_s == pytest.approx(sum(metrics.gaps_s) / len(metrics.gaps_s))
