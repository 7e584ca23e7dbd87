"""API keys: their file, and what a real server refuses and allows with them."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdserve.contracts.errors import ConfigError
from pdserve.router.http import keys as keys_module
from pdserve.router.http.errors import ApiError
from pdserve.router.http.json_body import MAX_BODY_BYTES
from pdserve.router.http.keys import ApiKey, Budget, KeyFile, add_key, read_keys
from pdserve.router.replicas import Replicas
from pdserve.router.requests.request import GenerationError, Request, RequestSpec
from tests.patience import HANG_S
from tests.router.edge_server import (
    MODEL,
    EdgeServer,
    ScriptedGenerator,
    running_edge,
    saying,
    stuck_after,
)

SECRET = b"of the server"
PROMPT = "the time is"


@dataclass
class KeyedServer:
    edge: EdgeServer
    path: Path
    key: str

    def post(self, key: str = "", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, **fields}
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.post(f"{self.edge.url}/v1/completions", json=body, headers=headers, verify=False)

    def salt(self, key: str = "", **fields: Any) -> bytes:
        """Salt of the block hashes of a request."""
        assert self.post(key, **fields).status_code == 200
        return self.edge.generator.last.cache_salt


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KeyedServer]:
    path = tmp_path / "keys.jsonl"
    key = add_key(path, "team-a", max_in_flight=4, max_n=3, max_tokens=5)
    with running_edge(KeyFile(path, SECRET, ScriptedGenerator.tiers)) as edge:
        edge.generator.script = saying([7] * 100)
        yield KeyedServer(edge, path, key)


def routes(edge: EdgeServer) -> list[tuple[str, str]]:
    """Every method and path that the server has, and some that it does not have."""
    paths = edge.app.openapi()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [
        *found,
        ("GET", "/openapi.json"),
        ("GET", "/absent"),
        ("GET", "/live/"),
        ("OPTIONS", "/v1/models"),
        ("POST", "/v1/embeddings"),
    ]


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")
def test_every_route_but_live_needs_a_key(server: KeyedServer) -> None:
    every_route = routes(server.edge)
    assert {path for _, path in every_route} > {"/v1/chat/completions", "/v1/models/{name}", "/tokenize", "/live"}
    own_id = server.key.split("-")[1]
    wrong = ["", "Bearer", f"Bearer {server.key}x", f"Bearer pd-{own_id}-", f"Basic {server.key}", server.key]
    wrong += ["Bearer ü", f"Bearer {server.key.swapcase()}"]
    with httpx.Client(base_url=server.edge.url) as client:
        for method, path in every_route:
            for header in wrong if path == "/v1/models" else wrong[:1]:
                answer = client.request(method, path, headers=[(b"Authorization", header.encode())])
                assert answer.status_code == (200 if path.startswith("/live") else 401), (method, path, header)
        refusal = client.get("/v1/models")
        assert refusal.headers["www-authenticate"] == "Bearer"
        assert refusal.headers["x-request-id"]
        assert refusal.json()["error"]["code"] == "invalid_api_key"
        assert refusal.json()["error"]["type"] == "invalid_request_error"
        assert client.get("/v1/models", headers={"Authorization": f"bearer {server.key}"}).status_code == 200
        for key, status in ((server.key, 200), (f"{server.key}x", 401)):  # of Anthropic's clients
            assert client.get("/v1/models", headers={"X-Api-Key": key}).status_code == status
        refusal = client.post("/v1/messages/count_tokens", headers={"X-Api-Key": "none"})
        assert refusal.json()["error"]["type"] == "authentication_error"


def test_the_openai_client_with_a_right_and_a_wrong_key(server: KeyedServer) -> None:
    with openai.OpenAI(base_url=f"{server.edge.url}/v1", api_key=server.key) as client:
        assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3).usage
        with pytest.raises(openai.AuthenticationError, match="valid API key"):
            client.with_options(api_key="pd-none").models.list()


def test_no_body_is_read_without_a_key(server: KeyedServer) -> None:
    too_large: dict[str, Any] = {
        "content": b"{" * (MAX_BODY_BYTES + 1),
        "headers": {"Content-Type": "application/json"},
    }
    with running_edge() as open_edge:
        assert httpx.post(f"{open_edge.url}/v1/completions", **too_large).status_code == 413
    assert httpx.post(f"{server.edge.url}/v1/completions", **too_large).status_code == 401


def test_keys_are_added_and_revoked_while_the_server_runs(
    server: KeyedServer, caplog: pytest.LogCaptureFixture
) -> None:
    second = add_key(server.path, "team-b")
    assert server.post(second).status_code == 200
    lines = server.path.read_text().splitlines()
    server.path.write_text(lines[1])  # an editor may leave out the last newline
    assert server.post().status_code == 401
    assert server.post(second).status_code == 200
    third = add_key(server.path, "team-b")
    assert server.post(third).status_code == 200
    with caplog.at_level(logging.ERROR):
        server.path.write_text(f"{third}\n")
        assert server.post(second).status_code == 200, "a file that cannot be read changes nothing"
        server.path.unlink()
        assert server.post(second).status_code == 200
        assert server.post().status_code == 401
    assert "line 1 is not JSON" in caplog.text
    assert "No such file" in caplog.text
    assert third.split("-", 2)[2] not in caplog.text


def test_streams_go_on_while_a_changed_file_is_read_and_its_keys_count_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.jsonl"
    add_key(path, "team-a")
    keys = KeyFile(path, SECRET)
    read, num_reads = keys_module.read_keys, 0

    def read_slowly(path: Path) -> dict[str, ApiKey]:
        nonlocal num_reads
        num_reads += 1
        time.sleep(0.3)
        return read(path)

    monkeypatch.setattr(keys_module, "read_keys", read_slowly)
    text = add_key(path, "team-b")
    num_reads = 0

    async def ask() -> bool:
        await keys.refresh()
        return keys.caller(text) is not None

    async def run() -> int:
        asked = [asyncio.create_task(ask()) for _ in range(3)]
        num_turns = 0
        while not all(task.done() for task in asked):
            await asyncio.sleep(0.01)
            num_turns += 1
        assert all(task.result() for task in asked), "also those that came while it was read"
        return num_turns

    assert asyncio.run(run()) > 10
    assert num_reads == 1


def test_the_limits_of_a_key(server: KeyedServer) -> None:
    def refusal(**fields: Any) -> tuple[int, str | None, str]:
        answer = server.post(**fields)
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]

    assert refusal(n=4) == (400, "n", "this API key allows n up to 3; lower n")
    assert refusal(max_tokens=6) == (400, "max_tokens", "this API key allows answers of 5 tokens; lower max_tokens")
    assert refusal(n=3, prompt=["a", "b"])[0] == 400
    # Without max_tokens a completion has 16 and a chat all that the context leaves, up to the limit of the key.
    assert server.post(max_tokens=None).json()["usage"]["completion_tokens"] == 5
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {server.key}"}
    chat = httpx.post(f"{server.edge.url}/v1/chat/completions", json=body, headers=headers)
    assert chat.json()["usage"]["completion_tokens"] == 5
    unlimited = add_key(server.path, "team-b")
    assert server.post(unlimited, n=10, max_tokens=50).json()["usage"]["completion_tokens"] == 500


def test_answers_in_flight_are_counted_until_the_client_leaves(server: KeyedServer) -> None:
    generator = server.edge.generator
    generator.script = stuck_after([7])
    url = f"{server.edge.url}/v1/completions"
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "stream": True, "n": 3}
    headers = {"Authorization": f"Bearer {server.key}"}
    with httpx.stream("POST", url, json=body, headers=headers) as stream:
        lines = stream.iter_lines()  # kept, because httpx closes the connection of a forgotten iterator
        next(lines)
        refused = server.post(n=2)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        generator.script = saying([7] * 3)
        for _ in range(3):  # a whole answer, and a refused request, leave nothing counted
            assert server.post(n=1).status_code == 200
            assert server.post(n=1, max_tokens=6).status_code == 400
        assert server.post(add_key(server.path, "team-a")).status_code == 200, "keys are counted apart"
    assert generator.generations[0].cancelled.wait(HANG_S)
    for _ in range(100):
        if (answer := server.post(n=3)).status_code == 200:
            break
    assert answer.status_code == 200


def test_tenants_share_no_blocks(server: KeyedServer) -> None:
    same_tenant, other = add_key(server.path, "team-a"), add_key(server.path, "team-b")
    own = server.salt()
    assert len(own) == 32
    assert server.salt(same_tenant) == own
    assert server.salt(cache_salt="") == own
    divided = server.salt(cache_salt="x")
    assert server.salt(same_tenant, cache_salt="x") == divided
    # The text of a salt reaches no other tenant's blocks, not even with that tenant's name or salt.
    guesses = [server.salt(other, cache_salt=guess) for guess in ("x", "team-a", own.hex(), own.decode("latin-1"))]
    assert len({own, divided, server.salt(other), *guesses}) == 7
    with running_edge(KeyFile(server.path, b"another secret")) as elsewhere:
        elsewhere.generator.script = saying([7])
        assert KeyedServer(elsewhere, server.path, server.key).salt() != own


def test_what_is_the_clusters_own_cannot_be_forged(
    server: KeyedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    specs: list[RequestSpec] = []
    start = server.edge.generator.start

    def recorded(request: Request, *, is_further: bool) -> None:
        assert request.spec.request_id != "7"
        specs.append(replace(request.spec, arrived_s=0.0, request_id=""))
        start(request, is_further=is_further)

    monkeypatch.setattr(server.edge.generator, "start", recorded)
    forged: Any = {
        "tenant": "team-b", "tier": "gold", "is_probe": True, "uses_cache": False, "block_hashes": ["x"],
        "deadline_s": 1e9, "ttft_slo_s": 0.001, "request_id": 7, "attempt": 3, "handoff": True, "source": "host:1",
    }  # fmt: skip
    with caplog.at_level(logging.DEBUG):
        server.post(seed=1)
        server.post(seed=1, **forged)
        for field in ("priority", "kv_transfer_params"):
            odd: Any = {field: 1}
            assert server.post(**odd).status_code == 400
        server.post(f"{server.key}x")
    assert specs[0] == specs[1]
    assert server.key.split("-", 2)[2] not in caplog.text


def test_the_file_has_no_key_and_is_private(server: KeyedServer) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    _, key_id, secret = server.key.split("-", 2)
    assert len(secret) == 43
    assert secret not in server.path.read_text()
    (line,) = server.path.read_text().splitlines()
    assert json.loads(line)["id"] == key_id
    server.path.write_text("\ufeff" + server.path.read_text())  # as editors on Windows do
    assert read_keys(server.path)[key_id].max_in_flight == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tenant": "a b"}, "line 1: tenant must be 1 to 64 letters"),
        ({"hash": "pd-secret"}, "line 1: id, salt and hash must be as pdserve key wrote them"),
        ({"max_n": -1}, "max_n is -1; write a whole number from 0"),
        ({"max_nn": 1}, "did you mean 'max_n'"),
        ({"tiers": ["gold"]}, "of team-a has the tier 'gold'; slo has only default"),
    ],
)
def test_a_broken_line_is_named_without_its_secrets(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "keys.jsonl"
    add_key(path, "team-a")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}) + "\n")
    with pytest.raises(ConfigError, match=said) as raised:
        KeyFile(path, SECRET)
    assert "pd-secret" not in str(raised.value)


def test_no_key_is_added_to_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ConfigError):
        add_key(path, "team-b")


def test_a_key_has_the_tiers_of_its_line(server: KeyedServer) -> None:
    """The first of them, unless the request names another one; a key without any is in the default tier."""
    assert server.post().status_code == 200
    assert server.edge.generator.last.tier == "default"
    key = add_key(server.path, "team-b", tiers=("bulk", "fast"))
    for named, tier in ((None, "bulk"), ("auto", "bulk"), ("fast", "fast")):
        assert server.post(key, service_tier=named).status_code == 200
        assert server.edge.generator.last.tier == tier
    for caller, tiers in ((key, "bulk, fast"), ("", "default")):
        error = server.post(caller, service_tier="gold").json()["error"]
        assert error["param"] == "service_tier"
        assert f"use {tiers} or auto" in error["message"]


def test_two_lines_of_one_id_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    add_key(path, "team-a")
    path.write_text(path.read_text() * 2)
    with pytest.raises(ConfigError, match="line 2 has the id of an earlier line"):
        read_keys(path)


def test_a_budget_refills_steadily_and_can_be_overdrawn() -> None:
    budget = Budget(60, now_s=100.0)
    budget.spend(60, now_s=100.0)
    assert budget.left(100.0) == 0
    assert budget.seconds_until(1, 100.0) == 1
    assert budget.left(110.5) == 10.5
    budget.spend(40.5, now_s=110.5)
    assert budget.seconds_until(1, 110.5) == 31
    budget.spend(1000, now_s=110.5)
    assert budget.seconds_until(1, 110.5) == 61, "nobody waits longer than a minute for the first"
    assert budget.left(1000.0) == 60, "no more than a minute's is kept"


def test_requests_of_a_minute_are_limited(server: KeyedServer) -> None:
    key = add_key(server.path, "team-b", requests_per_minute=2)
    answers = [server.post(key) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    refusal = answers[-1]
    assert refusal.headers["x-ratelimit-limit-requests"] == "2"
    assert "x-ratelimit-limit-tokens" not in refusal.headers
    assert 1 <= int(refusal.headers["retry-after"]) <= 30
    assert 30 < float(refusal.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
    assert "spent its requests of this minute" in refusal.json()["error"]["message"]
    assert server.post(key, prompt=None).status_code == 429, "the body was read"
    assert server.post().status_code == 200, "another key"
    assert "x-ratelimit-limit-requests" not in server.post().headers


def test_routers_share_the_limits_of_a_key(tmp_path: Path) -> None:
    path, replicas = tmp_path / "keys.jsonl", Replicas(2)
    limits: dict[str, Any] = {
        "max_in_flight": 4,
        "requests_per_minute": 7,
        "tokens_per_minute": 9,
        "grammars_per_minute": 1,
    }
    text = add_key(path, "team-b", **limits, max_tokens=8)
    keys = KeyFile(path, SECRET, replicas=replicas)

    def share() -> dict[str, int]:
        caller = keys.caller(text)
        assert caller is not None
        assert caller.key.max_tokens == 8
        assert caller.rate_headers()["x-ratelimit-limit-requests"] == str(caller.key.requests_per_minute)
        return {name: getattr(caller.key, name) for name in limits}

    assert list(share().values()) == [2, 3, 4, 1]
    caller = keys.caller(text)
    assert caller is not None
    caller.check_left(4)  # more than a share, which one alone may have
    caller.begin(1)
    caller.check_left(1)
    with pytest.raises(ApiError, match="in flight"):
        caller.check_left(4)
    caller.close()
    caller.spend("requests", 2)
    replicas.put([9000])
    assert share() == limits
    with pytest.raises(ApiError, match="spent its requests"):  # also when another router ends
        caller.check_left()


def test_a_refused_prompt_gives_back_no_more_than_it_took(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    text = add_key(path, "team-b", tokens_per_minute=1000)
    keys = KeyFile(path, SECRET)
    first, second = keys.caller(text), keys.caller(text)
    assert first is not None
    assert second is not None
    first.spend("tokens", 900)
    second.spend_prompt(5000)  # overdraws the budget by what a minute brings, not by all of it
    second.close(is_refused=True)
    assert 100 <= int(first.rate_headers()["x-ratelimit-remaining-tokens"]) < 200


def test_grammars_are_those_of_a_tenant(server: KeyedServer) -> None:
    def owner(key: str) -> str:
        assert server.post(key, structured_outputs={"regex": "a"}).status_code == 200
        grammar = server.edge.generator.last.sampling.grammar
        assert grammar is not None
        return grammar.owner

    others = [add_key(server.path, tenant) for tenant in ("team-b", "team-b", "team-c")]
    first, same, other = map(owner, others)
    assert first == same != other
    assert "team" not in first


def test_new_grammars_of_a_minute_are_limited(server: KeyedServer) -> None:
    key = add_key(server.path, "team-b", grammars_per_minute=2)

    def status(pattern: str) -> int:
        return server.post(key, structured_outputs={"regex": pattern}).status_code

    assert [status(pattern) for pattern in ("a", "b", "a", "c", "b")] == [200, 200, 200, 429, 200]
    refusal = server.post(key, response_format={"type": "json_object"})
    assert "2 new structures a minute" in refusal.json()["error"]["message"]
    assert 1 <= int(refusal.headers["retry-after"]) <= 30
    assert server.post(key).status_code == 200
    assert server.post(structured_outputs={"regex": "c"}).status_code == 200, "another key"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_minute_count_prompts_and_answers(server: KeyedServer, stream: bool) -> None:
    key = add_key(server.path, "team-b", tokens_per_minute=100)
    first = server.post(key, max_tokens=60, stream=stream)
    num_prompt = len(server.edge.generator.last.prompt_tokens)
    assert 0 < num_prompt < 40
    assert first.headers["x-ratelimit-remaining-tokens"] == str(100 - num_prompt)
    second = server.post(key, max_tokens=60, stream=stream)
    left = 100 - 2 * num_prompt - 60
    assert left <= int(second.headers["x-ratelimit-remaining-tokens"]) <= left + 5, "some have come back"
    third = server.post(key)
    assert third.status_code == 429
    assert "spent its tokens of this minute" in third.json()["error"]["message"]
    assert third.headers["x-ratelimit-remaining-tokens"] == "0"


def test_refused_requests_are_not_charged(server: KeyedServer) -> None:
    key = add_key(server.path, "team-b", tokens_per_minute=600)
    server.edge.generator.start_refusal = GenerationError(429, "full")
    for fields in ({}, {"stream": True}, {"min_tokens": 5}):
        answer = server.post(key, prompt=[7] * 100, **fields)
        assert answer.status_code == (400 if "min_tokens" in fields else 429)
    server.edge.generator.start_refusal = None
    answer = server.post(key, max_tokens=1)
    num_prompt = len(server.edge.generator.last.prompt_tokens)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(600 - num_prompt)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [50]})])
def test_requests_for_the_tokenizer_are_limited(server: KeyedServer, path: str, body: dict[str, object]) -> None:
    headers = {"Authorization": f"Bearer {add_key(server.path, 'team-b', requests_per_minute=2)}"}
    answers = [httpx.post(server.edge.url + path, json=body, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


def test_pages_of_allowed_origins_may_call(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    key = add_key(path, "team-a")
    page = {"Origin": "https://chat.example.com"}
    asks = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with running_edge(KeyFile(path, SECRET), cors_origins=(page["Origin"],)) as edge:
        url = f"{edge.url}/v1/models"
        preflight = httpx.options(url, headers=asks)
        assert preflight.status_code == 200, "a browser asks without the key"
        assert preflight.headers["access-control-allow-origin"] == page["Origin"]
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = httpx.get(url, headers={**page, "Authorization": f"Bearer {key}"})
        assert answer.headers["access-control-allow-origin"] == page["Origin"]
        assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]
        refusal = httpx.get(url, headers=page)
        assert refusal.status_code == 401
        assert refusal.headers["access-control-allow-origin"] == page["Origin"], "the page can read why"
        assert httpx.options(url, headers={**asks, "Origin": "https://evil.example"}).status_code == 400
    with running_edge() as edge:
        assert "access-control-allow-origin" not in httpx.get(f"{edge.url}/live", headers=page).headers
