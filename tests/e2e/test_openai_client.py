"""The official `openai` client against a live cluster, sync and async."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from pdserve.deploy.cluster.folder import admin_headers
from tests.e2e.cluster import Cluster, running_cluster
from tests.patience import HANG_S
from tests.vocabulary import DEMO_FOLDER

TOOLS_TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The demo model with a template that has tools, 1 P + 1 D."""
    folder = tmp_path_factory.mktemp("cluster")
    model = shutil.copytree(DEMO_FOLDER, folder / "model")
    template = model / "chat_template.jinja"
    template.write_text(TOOLS_TEMPLATE + template.read_text())
    with running_cluster(folder, {"model": {"path": str(model)}}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_banner_ends_with_a_curl_line_that_works(cluster: Cluster) -> None:
    line = cluster.banner.strip().splitlines()[-1]
    command = shlex.split(line[line.index("curl ") :])
    answer = subprocess.run([*command, "--silent", "--fail"], capture_output=True, check=True, timeout=HANG_S)
    assert b'"choices"' in answer.stdout


def test_chat_streamed_and_not_agree(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the time to first token?"}]
    whole = client.chat.completions.create(
        model=model_of(client), messages=messages, max_tokens=20, temperature=0
    )  # fmt: skip
    stream = client.chat.completions.create(
        model=model_of(client), messages=messages, max_tokens=20, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")


class Weather(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=8)
    celsius: int = pydantic.Field(ge=-40, le=50)
    sky: Literal["clear", "cloudy"]


def test_a_parsed_answer_is_of_its_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=model_of(client),
        messages=[{"role": "user", "content": "What is the weather?"}],
        response_format=Weather,
        temperature=1,
        seed=7,
        n=3,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Weather), choice.message


def test_forced_calls_are_of_their_parameters(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather?"}]
    tool = openai.pydantic_function_tool(Weather, name="tell_weather")
    with client.chat.completions.stream(
        model=model_of(client), messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False,
        temperature=1, seed=5, n=2,
    ) as stream:  # fmt: skip
        choices = stream.get_final_completion().choices
    for choice in choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.function.name == "tell_weather"
        assert isinstance(call.function.parsed_arguments, Weather)
    [call] = choices[0].message.tool_calls or []
    said: ChatCompletionMessageParam = {
        "role": "assistant",
        "tool_calls": [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": call.function.arguments}},
        ],
    }  # fmt: skip
    answer = client.chat.completions.create(
        model=model_of(client), messages=[*messages, said, {"role": "tool", "tool_call_id": call.id, "content": "ok"}],
        tools=[tool], max_tokens=8,
    )  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_a_grammar_that_cannot_be_compiled_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Lookahead is not supported"):
        client.completions.create(
            model=model_of(client), prompt="x", extra_body={"structured_outputs": {"regex": "a(?=b)"}}
        )


def test_a_seed_repeats_and_another_seed_differs(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=model_of(client), prompt="Prefill", max_tokens=24, temperature=1.0, seed=seed
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_logprobs_are_of_the_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=model_of(client), messages=[{"role": "user", "content": "hi"}], max_tokens=5, temperature=0,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert entry.logprob == pytest.approx(max(top.logprob for top in entry.top_logprobs))


def test_async_client_streams_many_at_once(cluster: Cluster) -> None:
    async def run() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id

            async def one(index: int) -> int:
                stream = await client.completions.create(
                    model=model, prompt=f"Request {index}", max_tokens=8, temperature=0, stream=True,
                    stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
                )  # fmt: skip
                usages = [chunk.usage async for chunk in stream if chunk.usage]
                return usages[-1].completion_tokens

            return await asyncio.gather(*(one(index) for index in range(16)))

    assert asyncio.run(run()) == [8] * 16


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model_of(client), prompt="x", temperature=9)
    with pytest.raises(openai.BadRequestError, match="100000"):
        client.completions.create(model=model_of(client), prompt=[7] * 100_000)


def test_metrics_have_counted(cluster: Cluster, client: openai.OpenAI) -> None:
    client.completions.create(model=model_of(client), prompt="x", max_tokens=4)
    text = httpx.get(f"{cluster.admin_url}/metrics", headers=admin_headers(cluster.admin_url), timeout=HANG_S).text
    assert 'pdserve_request_outcomes_total{outcome="finished"}' in text
    assert "pdserve_ttft_seconds_count" in text
