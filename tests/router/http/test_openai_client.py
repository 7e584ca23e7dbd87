"""The official `openai` client, sync and async, against the HTTP edge."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from pdserve.contracts.request import FinishReason
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.requests.request import GenerationError
from tests.router.edge_server import MAX_MODEL_LEN, MODEL, EdgeServer, failing_after, running_edge
from tests.router.small_tokenizers import EOS_ID

TEXT = "Größe 🙂 the time"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "the time?"}]},
]


@pytest.fixture(scope="module")
def edge() -> Iterator[EdgeServer]:
    with running_edge() as edge:
        yield edge


@pytest.fixture
def client(edge: EdgeServer) -> Iterator[openai.OpenAI]:
    edge.generator.refusal = None
    with openai.OpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(edge: EdgeServer, client: openai.OpenAI) -> None:
    num_tokens = edge.say(TEXT)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(edge.generator.last.prompt_tokens)
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + num_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_streamed(edge: EdgeServer, client: openai.OpenAI) -> None:
    num_tokens = edge.say(TEXT)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1].choices[0].delta.content is None
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in [*chunks, last]}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == num_tokens


def test_completion_of_a_text_and_of_its_tokens(edge: EdgeServer, client: openai.OpenAI) -> None:
    edge.say(TEXT, FinishReason.LENGTH)
    of_text = client.completions.create(model=MODEL, prompt="What is")
    tokens = edge.generator.last.prompt_tokens
    for prompt in (tokens, [tokens], ["What is"]):
        of_tokens = client.completions.create(model=MODEL, prompt=prompt)
        assert edge.generator.last.prompt_tokens == tokens
        assert of_tokens.choices[0].text == of_text.choices[0].text == TEXT
    assert of_text.object == "text_completion"
    assert of_text.choices[0].finish_reason == "length"


def test_completion_streamed(edge: EdgeServer, client: openai.OpenAI) -> None:
    num_tokens = edge.say(TEXT, FinishReason.LENGTH)
    chunks = list(client.completions.create(model=MODEL, prompt="What is", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * num_tokens + ["length"]
    assert all(chunk.object == "text_completion" for chunk in chunks)


def test_stop_string_across_tokens(edge: EdgeServer, client: openai.OpenAI) -> None:
    edge.say("one two three four")
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=["o thr", "zzz"])
    assert answer.choices[0].message.content == "one tw"
    assert answer.choices[0].finish_reason == "stop"
    assert edge.generator.last.cancels[0] is True
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop="o thr", stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one tw"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_what_only_might_have_been_a_stop_string_is_given(edge: EdgeServer, client: openai.OpenAI) -> None:
    edge.say("one tw")
    answer = client.completions.create(model=MODEL, prompt="x", stop="two")
    assert answer.choices[0].text == "one tw"


def test_chat_logprobs(edge: EdgeServer, client: openai.OpenAI) -> None:
    num_tokens = edge.say(TEXT, FinishReason.STOP, TokenLogprobs(-0.5, ((EOS_ID, -0.25), (40, float("-inf")))))
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert edge.generator.last.sampling.num_logprobs == 2
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == num_tokens
    assert bytes(byte for entry in content[:-1] for byte in entry.bytes or ()).decode() == TEXT
    assert content[0].logprob == -0.5
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("<|eos|>", -0.25), ("G", -9999.0)]
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True)
    streamed = [chunk.choices[0].logprobs for chunk in stream]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs.content or ()] == content


def test_completion_logprobs(edge: EdgeServer, client: openai.OpenAI) -> None:
    num_tokens = edge.say("the time to first token", FinishReason.LENGTH, TokenLogprobs(-0.5, ((EOS_ID, -0.25),)))
    answer = client.completions.create(model=MODEL, prompt="x", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * num_tokens
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"<|eos|>": -0.25, logprobs.tokens[0]: -0.5}
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert answer.choices[0].text[offset:].startswith(token)
    offsets = []
    for chunk in client.completions.create(model=MODEL, prompt="x", logprobs=1, stream=True):
        offsets += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.text_offset) or []
    assert offsets == logprobs.text_offset


def test_models(client: openai.OpenAI) -> None:
    card = client.models.list().data[0]
    assert card.id == MODEL
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == MAX_MODEL_LEN
    assert client.models.retrieve(MODEL) == card
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_mistakes_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope") as not_found:
        client.completions.create(model="nope", prompt="x")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="less than or equal to 2") as bad_request:
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert bad_request.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=r"600.*512|512.*600") as too_long:
        client.completions.create(model=MODEL, prompt=[7] * 600)
    assert too_long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_typed(edge: EdgeServer, client: openai.OpenAI, stream: bool) -> None:
    """A refused request gets a status, not a stream, whether streamed or not."""
    for status, expected in [
        (400, openai.BadRequestError),
        (429, openai.RateLimitError),
        (503, openai.InternalServerError),
        (504, openai.InternalServerError),
        (500, openai.InternalServerError),
    ]:
        edge.generator.refusal = GenerationError(status, "because", retry_after_s=2.5)
        with pytest.raises(expected, match="because") as refused:
            client.completions.create(model=MODEL, prompt="x", stream=stream)
        assert refused.value.response.status_code == status
        assert refused.value.response.headers["retry-after"] == "3"


def test_a_failure_before_the_first_token_has_a_status(edge: EdgeServer, client: openai.OpenAI) -> None:
    edge.generator.script = failing_after([], GenerationError(503, "lost it"))
    with pytest.raises(openai.InternalServerError, match="lost it"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)


def test_a_failure_in_the_middle_of_a_stream_raises_there(edge: EdgeServer, client: openai.OpenAI) -> None:
    edge.generator.script = failing_after([50, 51], GenerationError(503, "lost it"))
    stream = iter(client.completions.create(model=MODEL, prompt="x", stream=True))
    assert next(stream).choices[0].text
    assert next(stream).choices[0].text
    with pytest.raises(openai.APIError, match="lost it"):
        next(stream)


def test_a_request_that_cannot_be_computed_is_not_sent_again(edge: EdgeServer, client: openai.OpenAI) -> None:
    edge.generator.script = failing_after([], GenerationError(500, "3 workers ended"))
    num_generations = len(edge.generator.generations)
    with pytest.raises(openai.InternalServerError, match="3 workers ended"):
        client.with_options(max_retries=2).completions.create(model=MODEL, prompt="x")
    assert len(edge.generator.generations) == num_generations + 1


def test_async_client_streams_many_at_once(edge: EdgeServer) -> None:
    edge.generator.refusal = None
    edge.say(TEXT)

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as client:

            async def one(index: int) -> str:
                stream = await client.completions.create(model=MODEL, prompt=f"Request {index}", stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(index) for index in range(32)))

    assert asyncio.run(run()) == [TEXT] * 32


def test_sampling_parameters_arrive(edge: EdgeServer, client: openai.OpenAI) -> None:
    edge.say("x")
    client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, top_p=0.5, seed=-2, max_completion_tokens=7, stop=["s"], n=1,
        presence_penalty=0, user="me", extra_body={"top_k": 5, "stop_token_ids": [9], "ignore_eos": True,
        "cache_salt": "mine"},
    )  # fmt: skip
    sampling = edge.generator.last.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 5)
    assert (sampling.seed, sampling.max_tokens) == (2**64 - 2, 7)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs) == ((9,), True, -1)
    assert len(edge.generator.last.cache_salt) == 32


def test_defaults_are_openais_and_seeds_are_minted(edge: EdgeServer, client: openai.OpenAI) -> None:
    edge.say("x")
    seeds = set()
    for _ in range(2):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
        sampling = edge.generator.last.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
        assert sampling.max_tokens == MAX_MODEL_LEN - len(edge.generator.last.prompt_tokens)
        seeds.add(sampling.seed)
    assert len(seeds) == 2
