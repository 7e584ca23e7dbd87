"""Routes over real HTTP: bytes of a stream, error objects, headers, limits, and metrics."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.metrics import NO_TENANT
from pdserve.contracts.request import FinishReason
from pdserve.router.http import asgi, unsupported_fields
from pdserve.router.http.json_body import MAX_BODY_BYTES, MAX_CONTAINERS, MAX_MEMBERS, MAX_VALUES
from pdserve.router.http.schema import ChatBody, CompletionBody
from pdserve.router.requests.request import GenerationError
from pdserve.router.text.tokenizer import ChatTokenizer
from tests.patience import HANG_S
from tests.router.edge_server import (
    MODEL,
    EdgeServer,
    ScriptedGeneration,
    at_once,
    failing_after,
    running_edge,
    saying,
    stuck_after,
    token_event,
    waiting_first,
)
from tests.router.rig import sample
from tests.router.sse import data_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[EdgeServer]:
    with running_edge() as edge:
        yield edge


@pytest.fixture
def edge(server: EdgeServer) -> EdgeServer:
    """Edge in its normal state."""
    server.generator.refusal = None
    server.generator.is_ready = True
    server.generator.max_model_len = 512
    server.metrics.__init__()  # type: ignore[misc]
    server.say("ab", FinishReason.LENGTH)
    return server


@pytest.fixture(scope="module")
def http(server: EdgeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as http:
        yield http


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Error object of an answer that holds nothing else."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def events(answer: httpx.Response) -> list[str]:
    return data_of(answer.content)


def test_bytes_of_a_chat_stream(edge: EdgeServer, http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": MESSAGES, "stream": True}, headers={"X-Request-Id": "mine"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "mine"
    assert "content-length" not in answer.headers
    *chunks, done = events(answer)
    assert done == "[DONE]"
    first = json.loads(chunks[0])
    assert first == {
        "id": "chatcmpl-mine",
        "object": "chat.completion.chunk",
        "created": first["created"],
        "model": MODEL,
        "system_fingerprint": "pdserve-0.1.0",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }
    shared = {name: value for name, value in first.items() if name != "choices"}
    choices = [
        {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"},
    ]
    assert [json.loads(chunk) for chunk in chunks[1:]] == [{**shared, "choices": [choice]} for choice in choices]


def test_a_stream_that_waits_says_so_and_an_error_after_that_is_an_event() -> None:
    body = {"messages": MESSAGES, "stream": True}
    with running_edge(keep_alive_seconds=0.1) as edge, httpx.Client(base_url=edge.url) as http:
        edge.say("ab", FinishReason.LENGTH)
        at_once_text = http.post(CHAT, json=body, headers={"X-Request-Id": "mine"}).text
        edge.generator.script = waiting_first(edge.generator.script)
        said = http.post(CHAT, json=body, headers={"X-Request-Id": "mine"}).text
        comments, _, rest = said.rpartition(": waiting\n\n")
        assert comments.replace(": waiting\n\n", "") == ""
        created = re.compile(r'"created":\d+')
        assert created.sub("", rest) == created.sub("", at_once_text)
        edge.generator.script = waiting_first(failing_after([], GenerationError(503, "lost")))
        answer = http.post(CHAT, json=body)
        assert answer.status_code == 200
        assert json.loads(events(answer)[-1])["error"]["message"] == "lost"


def test_a_stream_waits_in_silence_by_choice() -> None:
    with running_edge(keep_alive_seconds=0) as edge:
        edge.say("ab")
        edge.generator.script = waiting_first(edge.generator.script)
        answer = httpx.post(f"{edge.url}{CHAT}", json={"messages": MESSAGES, "stream": True})
        lines = [line for line in answer.text.splitlines() if line]
        assert lines.pop() == "data: [DONE]"
        assert all(json.loads(line.removeprefix("data: ")) for line in lines)
        edge.generator.script = failing_after([], GenerationError(503, "lost"))
        assert httpx.post(f"{edge.url}{CHAT}", json={"messages": MESSAGES, "stream": True}).status_code == 503


@pytest.mark.parametrize(("route", "prompt"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})])
def test_token_ids_on_request(edge: EdgeServer, http: httpx.Client, route: str, prompt: dict[str, Any]) -> None:
    edge.generator.script = saying([70, 71, 2], FinishReason.STOP)  # the last one has no text
    body = {**prompt, "return_token_ids": True}
    assert http.post(route, json=body).json()["choices"][0]["token_ids"] == [70, 71, 2]
    *chunks, _ = events(http.post(route, json={**body, "stream": True}))
    ids = [json.loads(chunk)["choices"][0].get("token_ids", []) for chunk in chunks]
    assert [token for chunk in ids for token in chunk] == [70, 71, 2]
    assert "token_ids" not in http.post(route, json=prompt).json()["choices"][0]


def test_usage_in_a_stream_is_null_but_at_the_end(edge: EdgeServer, http: httpx.Client) -> None:
    body = {"prompt": [7], "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = [
        json.loads(data) if data != "[DONE]" else None for data in events(http.post(COMPLETIONS, json=body))
    ]
    assert all(chunk is not None and chunk["usage"] is None for chunk in chunks)
    assert last is not None
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip


def test_continuous_usage(edge: EdgeServer, http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = http.post(COMPLETIONS, json={"prompt": [7], "stream": True, "stream_options": options})
    counts = [json.loads(data)["usage"]["completion_tokens"] for data in events(answer)[:-1]]
    assert counts == [1, 2, 2, 2]


def test_each_token_is_one_event_with_or_without_text(edge: EdgeServer, http: httpx.Client) -> None:
    num_tokens = edge.say("🙂", FinishReason.LENGTH)
    assert num_tokens > 2
    *chunks, _, done = events(http.post(COMPLETIONS, json={"prompt": "x", "stream": True}))
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert texts == [""] * (num_tokens - 1) + ["🙂"]
    assert done == "[DONE]"


def test_tokens_that_come_together_are_events_of_their_own(edge: EdgeServer, http: httpx.Client) -> None:
    edge.generator.script = at_once([70, 71, 72])
    *chunks, _, done = events(http.post(COMPLETIONS, json={"prompt": "x", "stream": True}))
    assert [json.loads(chunk)["choices"][0]["text"] for chunk in chunks] == [
        edge.tokenizer.token_text(token) for token in (70, 71, 72)
    ]
    assert done == "[DONE]"
    assert (len(edge.metrics.first_tokens_s), len(edge.metrics.gaps_s)) == (1, 2)


def test_a_stream_that_fails_ends_with_an_error_and_without_done(edge: EdgeServer, http: httpx.Client) -> None:
    edge.generator.script = failing_after([50], GenerationError(504, "too late"))
    chunk, last = events(http.post(COMPLETIONS, json={"prompt": "x", "stream": True}))
    assert json.loads(chunk)["choices"][0]["text"]
    assert json.loads(last) == {"error": {"message": "too late", "type": "timeout_error", "param": None, "code": None}}
    assert edge.metrics.answers == []


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_is_told_without_its_cause(
    edge: EdgeServer, http: httpx.Client, num_tokens: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    edge.generator.script = failing_after([50] * num_tokens, KeyError("secret"))
    answer = http.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    assert "secret" not in answer.text
    error = json.loads(events(answer)[-1])["error"] if stream and num_tokens else error_of(answer)
    assert error["type"] == "server_error"
    assert answer.status_code == (200 if stream and num_tokens else 500)
    assert "secret" in caplog.text


def test_a_generation_without_a_last_token_is_a_fault(edge: EdgeServer, http: httpx.Client) -> None:
    edge.generator.script = saying([50, 51], FinishReason.NONE)
    assert error_of(http.post(COMPLETIONS, json={"prompt": "x"}))["type"] == "server_error"


def test_an_overloaded_cluster_says_when_to_come_back(edge: EdgeServer, http: httpx.Client) -> None:
    edge.generator.refusal = GenerationError(429, "full", retry_after_s=0.2)
    num_bad = sample(edge.metrics, "pdserve_tenant_requests_total", tenant=NO_TENANT, verdict="bad") or 0
    answer = http.post(CHAT, json={"messages": MESSAGES})
    assert answer.status_code == 429
    assert sample(edge.metrics, "pdserve_tenant_requests_total", tenant=NO_TENANT, verdict="bad") == num_bad + 1
    assert answer.headers["retry-after"] == "1"
    assert error_of(answer) == {
        "message": "full", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"
    }  # fmt: skip


def test_a_prompt_may_have_as_many_ids_as_the_model_takes(http: httpx.Client, edge: EdgeServer) -> None:
    body = {"prompt": [7] * (MAX_VALUES + 1), "max_tokens": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert f"more than {MAX_VALUES} values" in answer.text
    edge.generator.max_model_len = MAX_VALUES + 2
    edge.say("x")
    assert http.post("/v1/completions", json=body).status_code == 200


def test_without_a_worker_requests_are_503(edge: EdgeServer, http: httpx.Client) -> None:
    edge.generator.max_model_len = None
    answer = http.post(CHAT, json={"messages": MESSAGES})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "worker" in error_of(answer)["message"]
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] is None


def test_health_says_what_is_missing(edge: EdgeServer, http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    edge.generator.is_ready = False
    answer = http.get("/health")
    assert answer.status_code == 503
    assert "round trip" in answer.json()["missing"]
    edge.generator.max_model_len = None
    assert "worker" in http.get("/health").json()["missing"]
    assert http.get("/live").status_code == 200
    assert http.get("/version").json() == {"version": "0.1.0"}


@pytest.mark.parametrize(
    "route", ["/health", "/live", "/version", "/v1/models", f"/v1/models/{MODEL}", "/tokenizer_info"]
)
def test_monitors_may_ask_for_the_head_alone(edge: EdgeServer, http: httpx.Client, route: str) -> None:
    answer = http.head(route)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == http.get(route).headers["content-length"]


def test_tokens_of_texts_and_chats(edge: EdgeServer, http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "Größe", "return_token_strs": True}).json()
    assert http.post(COMPLETIONS, json={"prompt": "Größe"}).status_code == 200
    assert answer["tokens"] == edge.generator.last.prompt_tokens
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert len(answer["token_strs"]) == answer["count"]
    bare = http.post("/tokenize", json={"prompt": "Größe", "add_special_tokens": False}).json()["tokens"]
    assert bare == answer["tokens"][1:]
    assert http.post("/detokenize", json={"tokens": bare}).json() == {"prompt": "Größe"}
    assert http.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["tokens"] == []

    info = http.get("/tokenizer_info").json()
    assert edge.tokenizer.template is not None
    assert info == {"chat_template": edge.tokenizer.template.source, **edge.tokenizer.template.special_tokens}

    chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert http.post(CHAT, json={"messages": MESSAGES}).status_code == 200
    assert chat["tokens"] == edge.generator.last.prompt_tokens


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0.content"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_bodies_for_the_tokenizer_are_checked(
    edge: EdgeServer, http: httpx.Client, route: str, body: dict[str, Any], param: str
) -> None:
    assert error_of(http.post(route, json=body))["param"] == param


def test_requests_for_the_tokenizer_wait_for_one_another_and_delay_no_prompt(
    edge: EdgeServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, encode, num_begun = threading.Event(), edge.tokenizer.encode, 0

    async def slow_encode(text: str, **options: Any) -> list[int]:
        nonlocal num_begun
        num_begun += text == "slow"
        if text == "slow":
            await asyncio.to_thread(may_end.wait, 20)
        return await encode(text, **options)

    monkeypatch.setattr(edge.tokenizer, "encode", slow_encode)
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(httpx.post, f"{edge.url}/tokenize", json={"prompt": "slow"}, timeout=HANG_S)
        while not num_begun:
            time.sleep(0.01)
        monkeypatch.setattr("pdserve.router.http.edge.TOKENIZER_S", 0.2)
        refused = http.post("/tokenize", json={"prompt": "slow"})
        assert (refused.status_code, refused.headers["retry-after"], num_begun) == (503, "1", 1)
        assert http.post("/detokenize", json={"tokens": [50]}).status_code == 503
        assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
        monkeypatch.undo()
        may_end.set()
        assert first.result().status_code == 200
    assert http.post("/detokenize", json={"tokens": [50]}).status_code == 200


def test_unknown_routes_and_methods(edge: EdgeServer, http: httpx.Client) -> None:
    answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert "/v1/nothing" in error_of(answer)["message"]
    answer = http.delete(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "DELETE" in error_of(answer)["message"]


def test_bodies_over_the_limit_are_refused_with_and_without_a_length(edge: EdgeServer, http: httpx.Client) -> None:
    body = json.dumps({"prompt": "a" * MAX_BODY_BYTES}).encode()
    headers = {"Content-Type": "application/json"}
    for content in (body, iter([body[:1000], body[1000:]])):
        answer = http.post(COMPLETIONS, content=content, headers=headers)
        assert (answer.status_code, answer.headers["connection"]) == (413, "close")
        assert str(MAX_BODY_BYTES) in error_of(answer)["message"]
    assert edge.metrics.responses == [(COMPLETIONS, 413)] * 2


def test_bodies_of_too_many_parts_are_refused_while_they_arrive(edge: EdgeServer, http: httpx.Client) -> None:
    parts = b"[" + b"{}," * (2 * MAX_CONTAINERS)
    length = MAX_BODY_BYTES - 1
    with socket.create_connection(("127.0.0.1", int(edge.url.rpartition(":")[2])), 10) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        client.sendall(head.encode() + parts)
        answer = client.recv(4096).partition(b"\r\n\r\n")
        assert answer[0].startswith(b"HTTP/1.1 400 "), "the rest was awaited"
        # A client that sends all of it before it reads goes on with the same connection
        client.sendall(b" " * (length - len(parts)) + b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        data = answer[2]
        while b'"live"' not in data:
            more = client.recv(4096)
            assert more, data
            data += more
    assert b"objects and lists" in data


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "must be a JSON object"),
        (b"{", "not JSON"),
        (b'{"prompt": "x"', "not JSON"),
        (b'{"prompt": "x"}}', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16"), "UTF-16"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"colour": ' * 5000, "nested too deeply"),
        (b'{"prompt": %s}' % (b"9" * 5000), "not JSON: Integer value out of range"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "x", "temperature": NaN}', "not JSON"),
        (b'{"prompt": "x", "colour": -Infinity}', "not JSON"),
        (b'{"prompt": "x", "temperature": 1e400}', "not JSON: Number out of range"),
        (b'{"prompt": "\\ud8', "not JSON"),
        (json.dumps({"prompt": "x", **{str(n): n for n in range(MAX_MEMBERS)}}).encode(), "There may be 256 members"),
    ],
)
def test_bodies_that_are_no_request_are_400(edge: EdgeServer, http: httpx.Client, content: bytes, told: str) -> None:
    answer = http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]


def test_a_name_that_a_client_chose_is_told_in_part(edge: EdgeServer, http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "x", "logit_bias": {"x" * 100_000: 1}})
    assert answer.status_code == 400
    assert error_of(answer)["param"].startswith("logit_bias.xxx")
    assert error_of(answer)["message"].endswith("Names should be token ids, such as 42")
    assert len(answer.content) < 1000


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_bodies_of_another_type_are_415(edge: EdgeServer, http: httpx.Client, content_type: str) -> None:
    answer = http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": content_type})
    assert answer.status_code == 415
    assert "application/json" in error_of(answer)["message"]
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    for mark in (b"", b"\xef\xbb\xbf"):  # of UTF-8
        assert http.post(COMPLETIONS, content=mark + b'{"prompt": "x"}', headers=headers).status_code == 200


@pytest.mark.parametrize("stalled", [b"", b'{"prompt"'])
def test_a_body_that_does_not_arrive_is_408(edge: EdgeServer, monkeypatch: pytest.MonkeyPatch, stalled: bytes) -> None:
    """The body is shorter than declared, or arrives too slowly; a server cannot distinguish them."""
    monkeypatch.setattr("pdserve.router.http.json_body.BODY_TIMEOUT_S", 0.2)
    host, port = edge.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        connection.sendall(head.encode() + stalled)
        answer = b""
        while part := connection.recv(4096):  # until the server closes the connection
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive" in answer


def test_an_answer_may_take_longer_than_a_body(
    edge: EdgeServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.router.http.json_body.BODY_TIMEOUT_S", 0.05)

    async def slowly(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        await asyncio.sleep(0.2)
        yield token_event(0, 0, 70, None, FinishReason.LENGTH)

    edge.generator.script = slowly
    assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "warm"),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", "all"),
        ("max_tokens", True),
        ("frequency_penalty", True),
        ("stop", 3),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stream", "slowly"),
        ("model", ["small"]),
        ("max_tokens", 10**400),
        ("min_tokens", -1),
        ("min_tokens", 513),
        ("n", 0),
        ("n", 129),
        ("n", 1.5),
        ("best_of", 2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e39),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {"9999": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"５": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": 1, "05": 2}),
        ("logit_bias", dict.fromkeys(map(str, range(1025)), 1)),
        ("logit_bias", [5]),
        ("stop_token_ids", [9999]),
        ("stop_token_ids", [5] * 129),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("include_stop_str_in_output", 2),
        ("regex", "a*"),
        ("response_format", {"type": "json"}),
        ("response_format", "json_object"),
        ("structured_outputs", {"regex": 3}),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("priority", 5),
    ],
)
def test_values_that_are_not_served_name_their_field(
    edge: EdgeServer, http: httpx.Client, field: str, value: object
) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})):
        answer = http.post(path, json={**body, field: value})
        assert answer.status_code == 400
        error = error_of(answer)
        assert error["param"].split(".")[0] == field
        assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": MESSAGES * 20_000}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages.0.tool_calls.0.function",
        ),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": 2}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "logprobs": False}, "logprobs"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools.0"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [""]}, None),
        (CHAT, {"messages": MESSAGES, "stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"messages": MESSAGES, "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, None),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], ["a"]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 43, "n": 3}, "n"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": [9999]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_completion_tokens": 5}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": [7] * 512}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    ],
)
def test_mistakes_name_their_field(
    edge: EdgeServer, http: httpx.Client, path: str, body: dict[str, object], param: str | None
) -> None:
    answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    if param is None:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
def test_a_prompt_that_cannot_fit_is_refused_by_its_beginning(
    edge: EdgeServer, http: httpx.Client, path: str, field: str
) -> None:
    text = "the time " * 5000
    answer = http.post(path, json={field: [{"role": "user", "content": text}] if path == CHAT else text})
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert "at least" in error["message"]


def test_requests_hold_a_bounded_amount_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MAX_HELD_BYTES", 20_000)
    body = {"prompt": [7] * 300, "stream": True}
    with running_edge() as edge, httpx.Client(base_url=edge.url) as http:
        edge.generator.script = stuck_after([7])
        with http.stream("POST", COMPLETIONS, json=body) as stream:
            lines = stream.iter_lines()  # kept, because httpx closes the connection of a forgotten iterator
            next(lines)
            refused = http.post(COMPLETIONS, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            too_much = http.post(COMPLETIONS, json={"prompt": "a" * 10_000})
            assert too_much.status_code == 429, "bodies count, too"
        assert edge.generator.generations[0].cancelled.wait(HANG_S)
        edge.generator.script = saying([7])
        for _ in range(100):
            if (answer := http.post(COMPLETIONS, json=body)).status_code == 200:
                break
        assert answer.status_code == 200


def test_null_means_the_default(edge: EdgeServer, http: httpx.Client) -> None:
    for path, model, body in ((CHAT, ChatBody, {"messages": MESSAGES}), (COMPLETIONS, CompletionBody, {"prompt": "x"})):
        nulls = dict.fromkeys([*model.model_fields, "tools", "audio", "suffix"], None)
        assert http.post(path, json=nulls | body).status_code == 200


def test_an_assistant_may_have_said_nothing_or_refused(edge: EdgeServer, http: httpx.Client) -> None:
    def prompt_of(message: dict[str, Any]) -> list[int]:
        assert http.post(CHAT, json={"messages": [*MESSAGES, message, *MESSAGES]}).status_code == 200
        return edge.generator.last.prompt_tokens

    empty = prompt_of({"role": "assistant", "content": ""})
    assert prompt_of({"role": "assistant", "content": None}) == prompt_of({"role": "assistant"}) == empty
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert prompt_of(refusal) == prompt_of({"role": "assistant", "content": "No."}) != empty


def test_top_p_of_zero_keeps_the_most_likely_token(edge: EdgeServer, http: httpx.Client) -> None:
    assert http.post(CHAT, json={"messages": MESSAGES, "top_p": 0}).status_code == 200
    assert 0 < edge.generator.last.sampling.top_p < 1e-5


def test_an_answer_can_be_sent_back_as_it_came(edge: EdgeServer, http: httpx.Client) -> None:
    message = http.post(CHAT, json={"messages": MESSAGES}).json()["choices"][0]["message"]
    message |= {"tool_calls": None, "function_call": None, "audio": None, "annotations": []}
    assert http.post(CHAT, json={"messages": [*MESSAGES, message, *MESSAGES]}).status_code == 200


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ({"use_beam_search": True}, "set it to false, or leave it out"),
        ({"tool_choice": "required"}, 'set it to "none" or "auto", or leave it out'),
        ({"regex": "a"}, "regex is not supported; send structured_outputs.regex, and leave it out"),
        ({"lora_path": "a"}, "lora_path is not supported; leave it out"),
    ],
)
def test_a_remedy_can_be_sent_as_it_is_written(
    edge: EdgeServer, http: httpx.Client, body: dict[str, object], remedy: str
) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "x", **body})
    assert error_of(answer)["message"].endswith(remedy)


def test_unknown_fields_are_logged_once(
    edge: EdgeServer, http: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported_fields, "_logged", set())
    for _ in range(2):
        assert http.post(COMPLETIONS, json={"prompt": "x", "colour\n": "red", "user": "me"}).status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        "a request has the unknown field 'colour\\n'; it is ignored"
    ]


def test_the_log_names_so_many_unknown_fields_and_no_more(
    edge: EdgeServer, http: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported_fields, "_logged", set())
    monkeypatch.setattr(unsupported_fields, "MAX_LOGGED_FIELDS", 3)
    assert http.post(COMPLETIONS, json={"prompt": "x", **dict.fromkeys("abcde")}).status_code == 200
    named = [record.getMessage() for record in caplog.records]
    assert [message for message in named if "it is ignored" in message] == [
        f"a request has the unknown field {name!r}; it is ignored" for name in "abc"
    ]
    assert named[-1] == "requests have had 3 unknown fields; no more of them are named here"


@pytest.mark.parametrize("given_id", ["", "a b", "x" * 129])
def test_an_unfit_request_id_is_replaced(edge: EdgeServer, http: httpx.Client, given_id: str) -> None:
    minted = {http.get("/live", headers={"X-Request-Id": given_id}).headers["x-request-id"] for _ in range(2)}
    assert len(minted) == 2
    assert given_id not in minted


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_is_timed(edge: EdgeServer, http: httpx.Client, stream: bool) -> None:
    num_tokens = edge.say("the time to first token")
    http.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    http.get("/nothing")
    metrics = edge.metrics
    assert metrics.responses == [(COMPLETIONS, 200), ("other", 404)]
    assert len(metrics.first_tokens_s) == 1
    assert len(metrics.gaps_s) == num_tokens - 1
    (timing,) = metrics.answers
    assert timing.num_tokens == num_tokens
    assert timing.ttft_s == metrics.first_tokens_s[0]
    assert timing.tpot_s == pytest.approx(sum(metrics.gaps_s) / (num_tokens - 1))
    assert timing.answer_s == pytest.approx(timing.ttft_s + sum(metrics.gaps_s))


def test_one_token_has_no_tpot(edge: EdgeServer, http: httpx.Client) -> None:
    http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
    assert edge.metrics.answers[0].tpot_s is None


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/v1/chat/completions", "ChatBody"),
        ("/v1/completions", "CompletionBody"),
        ("/v1/responses", "ResponsesBody"),
        ("/v1/messages", "MessagesBody"),
        ("/v1/messages/count_tokens", "MessagesBody"),
        ("/tokenize", "TokenizeBody"),
        ("/detokenize", "DetokenizeBody"),
    ],
)
def test_the_schema_has_the_bodies(edge: EdgeServer, path: str, model: str) -> None:
    schema = edge.app.openapi()
    content = schema["paths"][path]["post"]["requestBody"]["content"]
    assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{model}"}
    assert schema["components"]["schemas"][model]["properties"]


def test_each_of_several_prompts_has_a_turn_of_the_loop(edge: EdgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, encode = list[int](), ChatTokenizer.encode
    num_turns = 0

    def count() -> None:
        nonlocal num_turns
        num_turns += 1
        if len(turns) < 5:
            asyncio.get_running_loop().call_soon(count)

    async def encode_in_turn(self: ChatTokenizer, text: str, **options: Any) -> list[int]:
        if not turns:
            count()
        turns.append(num_turns)
        return await encode(self, text, **options)

    monkeypatch.setattr(ChatTokenizer, "encode", encode_in_turn)
    body = {"model": MODEL, "prompt": ["ab"] * 5, "max_tokens": 1}
    assert httpx.post(edge.url + COMPLETIONS, json=body).status_code == 200
    assert len(set(turns)) == 5


def test_a_slow_upload_is_no_wait_for_token_0(edge: EdgeServer) -> None:
    body = json.dumps({"model": MODEL, "prompt": "ab", "max_tokens": 1}).encode()

    def pieces() -> Iterator[bytes]:
        yield body[:5]
        time.sleep(0.5)
        yield body[5:]

    headers = {"Content-Type": "application/json"}
    began_s = time.monotonic()
    assert httpx.post(edge.url + COMPLETIONS, content=pieces(), headers=headers).status_code == 200
    assert edge.metrics.first_tokens_s[0] < time.monotonic() - began_s - 0.5
    assert edge.metrics.answers[0].line()["duration_s"] > 0.4
