"""Bodies as clients send them, one file each in ``bodies/``, through the HTTP edge.

A file has the ``body``, and may have: its ``route`` (chat completions); the ``template`` of the model in
``bodies/templates/`` (``tools``); what the model ``says``; the ``status`` that is right (200); the ``prompt`` that the
template wrote, or ``prompt_has``, parts of it in order; members of the ``answer``, which is the response in a stream's
last event, or its joined deltas; ``sampling``, parameters that the workers get; texts that the grammar ``takes`` and
``refuses``. ``why`` says who sends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import xgrammar

from pdserve.router.http.json_body import LARGE_BYTES
from tests.router.edge_server import EdgeServer, running_edge
from tests.vocabulary import compiled

FOLDER = Path(__file__).parent / "bodies"
CHAT = "/v1/chat/completions"
MEMBERS = {
    "answer", "body", "prompt", "prompt_has", "refuses", "route", "sampling", "says", "status", "takes", "template",
    "why",
}  # fmt: skip


@pytest.fixture(scope="module")
def edges() -> Iterator[Any]:
    """Returns the edge of a model with the template of a name."""
    with ExitStack() as stack:

        @lru_cache
        def edge(name: str) -> EdgeServer:
            source = (FOLDER / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
            server = stack.enter_context(running_edge(template=source))
            server.generator.max_model_len = 8192
            return server

        yield edge


def answer_of(response: httpx.Response) -> Any:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if "response" in events[-1]:
        return events[-1]["response"]
    if events[-1].get("type") == "message_stop":
        return _message_of(events)
    joined: dict[str, str] = {}
    for name, part in [item for event in events for item in event["choices"][0]["delta"].items()]:
        joined[name] = joined.get(name, "") + (part if isinstance(part, str) else json.dumps(part))
    return joined


def _message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {**events[0]["message"], **events[-2]["delta"]}
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            _, (name, text) = event["delta"].items()
            block = message["content"][event["index"]]
            block[name] = block.get(name, "") + text
    return message


def has(whole: Any, part: Any) -> bool:
    """Whether all of ``part`` is in ``whole``: members of objects, all items of a list."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and has(whole[name], part[name]) for name in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(has, whole, part))
    return bool(whole == part)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_a_body_gets_what_is_right(edges: Any, file: Path) -> None:
    case = json.loads(file.read_text(encoding="utf-8"))
    assert case.keys() <= MEMBERS
    server: EdgeServer = edges(case.get("template", "tools"))
    server.say(case.get("says", "Yes."))
    server.generator.generations.clear()
    response = httpx.post(server.url + case.get("route", CHAT), json=case["body"])
    assert response.status_code == case.get("status", 200), response.text
    assert has(answer_of(response), case.get("answer", {})), response.text
    if response.status_code == 200:
        check_request(case, server)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses", '{"input": "a", "metadata": %s}'),
        ("/v1/responses", '{"input": "a", "stream": true, "metadata": %s}'),
        ("/tokenize", '{"messages": [{"role": "user", "content": "a"}], "tools": [%s]}'),
        (
            CHAT,
            '{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required", "tools": '
            '[{"type": "function", "function": {"name": "f", "parameters": {"enum": [%s]}}}]}',
        ),
    ],
)
def test_no_depth_is_an_error_of_the_router(edges: Any, route: str, body: str) -> None:
    """What decodes a body reads deeper than some of what follows, most of all if it is large: in a thread."""
    body = f'{{"user": "{"a" * LARGE_BYTES}", {body[1:]}'
    server: EdgeServer = edges("tools")
    server.say("Yes.")
    with httpx.Client(base_url=server.url, headers={"content-type": "application/json"}) as client:
        for depth in [100, 300, 600, *range(900, 1000, 9)]:
            answer = client.post(route, content=body % ('{"a":' * depth + "1" + "}" * depth))
            assert answer.status_code in (200, 400), depth
            assert "internal error" not in answer.text


def check_request(case: dict[str, Any], server: EdgeServer) -> None:
    """Check what the cluster was asked."""
    [generation] = server.generator.generations
    prompt = server.tokenizer.decode(generation.prompt_tokens)
    assert prompt == case.get("prompt", prompt)
    rest = prompt
    for part in case.get("prompt_has", ()):
        _, found, rest = rest.partition(part)
        assert found, f"{part!r} is not where it should be in {prompt!r}"
    for name, value in case.get("sampling", {}).items():
        assert getattr(generation.sampling, name) == value
    grammar = generation.sampling.grammar
    for text in [*case.get("takes", ()), *case.get("refuses", ())]:
        assert grammar is not None
        matcher = xgrammar.GrammarMatcher(compiled(grammar), terminate_without_stop_token=True)
        assert (matcher.accept_string(text) and matcher.is_terminated()) == (text in case["takes"]), text
