"""Two routers at one address: both learn of the new roles of workers, by hand and by a plan, and one of them is killed
under streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import inf
from typing import Any

import httpx
import pytest

from pdserve.deploy.cli import run
from pdserve.deploy.cluster.folder import admin_headers
from pdserve.planner.search.goodput import Trial
from tests.deploy.clusters import UpProcess, pdserve, running_up, wait_for
from tests.patience import HANG_S
from tests.shared import shared

NUM_STREAMS = 64
NUM_TOKENS = 300
DEPLOYMENT = "{router: {replicas: 2, max_queued_requests: 200}}"
ARGUMENTS = ("--emulate", "h100-sxm", "--prefill", "2", "--decode", "1", "--time-scale", "10")
FREE_S = 3.0
BODY = {"prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
BACK = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}
SWITCHED = {**BACK, "prefill-1": "decode"}


@pytest.fixture
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> UpProcess:
    return shared(request, lambda: running_up(tmp_path_factory.mktemp("routers"), DEPLOYMENT, *ARGUMENTS))


def status(admin_url: str) -> dict[str, Any]:
    answer = httpx.get(f"{admin_url}/status", headers=admin_headers(admin_url), trust_env=False, verify=False)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def read_stream(client: httpx.AsyncClient) -> tuple[int, bool]:
    """Number of tokens, and whether the stream ended with ``[DONE]`` and without an error."""
    body = {"prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    num_tokens, is_done = 0, False
    try:
        async with client.stream("POST", "/completions", json=body) as response:
            async for line in response.aiter_lines():
                assert "error" not in line
                is_done |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    [choice] = json.loads(line.removeprefix("data: "))["choices"]
                    num_tokens += len(choice.get("token_ids", ()))
    except httpx.RemoteProtocolError:
        pass
    return num_tokens, is_done


async def streams_while_one_router_dies(up: UpProcess, admin_urls: list[str]) -> tuple[list[tuple[int, bool]], int]:
    """What became of the streams, and the number of those that the router had which was killed."""
    victim = next(process for process in up.members("pdserve.router") if listens(process, admin_urls[1]))
    async with httpx.AsyncClient(base_url=up.banner("API"), timeout=HANG_S, trust_env=False, verify=False) as client:
        streams = [asyncio.create_task(read_stream(client)) for _ in range(NUM_STREAMS)]

        def held() -> list[int]:
            return [status(url)["in_flight"] for url in admin_urls]

        await asyncio.to_thread(wait_for, lambda: sum(held()) == NUM_STREAMS, "all streams to be under way")
        num_kept, num_lost = held()
        victim.kill()

        def num_held() -> int:
            workers = status(admin_urls[0])["workers"]
            return sum(worker["load"]["num_running"] + worker["load"]["num_waiting"] for worker in workers)

        async with asyncio.timeout(FREE_S):
            await asyncio.to_thread(wait_for, lambda: num_held() <= num_kept, "workers to free what it held")
        assert not all(stream.done() for stream in streams), "the streams ended before the workers were looked at"
        return await asyncio.gather(*streams), num_lost


def listens(process: Any, url: str) -> bool:
    return any(each.laddr.port == httpx.URL(url).port for each in process.net_connections("tcp"))


def workers(admin_url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = status(admin_url)["workers"]
    return found


def have_roles(up: UpProcess, roles: dict[str, str]) -> bool:
    """At both routers."""
    urls = up.banner("admin").split(", ")
    return all({each["worker_id"]: each["role"] for each in workers(url)} == roles for url in urls)


@contextmanager
def asking(up: UpProcess) -> Iterator[None]:
    """Four clients ask meanwhile, and all answers are that of an undisturbed cluster."""
    is_over = threading.Event()

    def ask(client: httpx.Client) -> str:
        answer = client.post(f"{up.banner('API')}/completions", json=BODY)
        return str(answer.json()["choices"][0]["text"]) if answer.is_success else answer.text

    def ask_on() -> set[str]:
        answers = set()
        while not is_over.is_set():
            with httpx.Client(trust_env=False, verify=False, timeout=HANG_S) as client:  # either router's
                answers.add(ask(client))
        return answers

    with httpx.Client(trust_env=False, verify=False) as client, ThreadPoolExecutor() as threads:
        undisturbed = ask(client)
        answers = [threads.submit(ask_on) for _ in range(4)]
        try:
            yield
        finally:
            is_over.set()
        assert {text for answer in answers for text in answer.result()} == {undisturbed}


def test_roles_change_while_requests_run_and_outlive_the_worker(up: UpProcess) -> None:
    """For both routers."""
    admin_urls = up.banner("admin").split(", ")

    def scale(*replicas: str) -> str:
        run = pdserve("scale", *replicas, "--admin-url", admin_urls[0])
        return run.stderr if run.returncode else run.stdout

    wait_for(lambda: have_roles(up, BACK), "the worker that a ready cluster may still lack")
    epochs = {each["worker_id"]: each["epoch"] for each in workers(admin_urls[0])}

    def is_another() -> bool:
        """Whether both routers have the successor of the worker that is killed."""
        now = [each for url in admin_urls for each in workers(url) if each["worker_id"] == "prefill-1"]
        return len(now) == 2 and all(each["epoch"] != epochs["prefill-1"] for each in now)

    with asking(up):
        assert scale("prefill=1", "decode=2") == "prefill-1 becomes a decode worker\n"
        wait_for(lambda: have_roles(up, SWITCHED), "the roles at both routers")
        assert {each["worker_id"]: each["epoch"] for each in workers(admin_urls[0])} == epochs
        shown = pdserve("status", "--admin-url", admin_urls[1]).stdout
        assert ["prefill-1", "decode"] in [line.split()[:2] for line in shown.splitlines()]
        up.members("ray::prefill-1")[0].kill()
        wait_for(lambda: have_roles(up, SWITCHED) and is_another(), "its successor, in its present role")
        assert scale("prefill=2", "decode=1") == "prefill-1 becomes a prefill worker\n"
        wait_for(lambda: have_roles(up, BACK), "the first roles at both routers")
    now = {each["worker_id"]: each["epoch"] for each in workers(admin_urls[0])}
    assert [name for name in epochs if epochs[name] != now[name]] == ["prefill-1"]


def test_a_wrong_number_of_prefill_workers_is_mended_under_load(
    up: UpProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short prompts with long answers keep prefill workers idle. The plan is applied, and then proposes nothing."""
    monkeypatch.setattr(Trial, "most_rate", inf)  # rates of short runs are too high, but of all layouts
    admin_url = up.banner("admin").split(", ")[0]

    def plan(option: str) -> list[str]:
        # An answer takes 1.6 s, and the four clients ask at the same time: some requests come in twice that.
        command = ["plan", "--live", admin_url, "--window", "3", "--requests", "100", "--jobs", "1", option]
        assert run(command) == 0
        return capsys.readouterr().out.splitlines()

    with asking(up):
        said = plan("--apply")
        undo = f"pdserve scale prefill=2 decode=1 --admin-url {admin_url}"
        assert said[-5:] == [
            "The change would move 1 workers to another role, at once, stop 0, start 0 and keep 2.",
            said[-4],
            "to do: prefill-1 becomes a decode worker, at once",
            "prefill-1 becomes a decode worker",
            f"What undoes it: {undo}",
        ]
        wait_for(lambda: have_roles(up, SWITCHED), "the roles at both routers")
        assert plan("--dry-run")[-1] == "Keep the placement: it is the best one found."
        assert pdserve(*undo.split()[1:]).stdout == "prefill-1 becomes a prefill worker\n"
        wait_for(lambda: have_roles(up, BACK), "the first roles at both routers")


def test_a_killed_router_ends_its_own_streams_alone(up: UpProcess) -> None:
    admin_urls = up.banner("admin").split(", ")
    outcomes, num_lost = asyncio.run(streams_while_one_router_dies(up, admin_urls))
    whole = [num_tokens for num_tokens, is_done in outcomes if is_done]
    assert set(whole) == {NUM_TOKENS}
    # On a busy machine one may have ended between the count and the kill.
    assert NUM_STREAMS - num_lost <= len(whole) < NUM_STREAMS
    assert num_lost < NUM_STREAMS
    assert all(num_tokens < NUM_TOKENS for num_tokens, is_done in outcomes if not is_done)

    addresses = [url.removeprefix("http://") for url in admin_urls]
    wait_for(lambda: status(admin_urls[0])["routers"] == addresses, "its successor")
    wait_for(lambda: status(admin_urls[1])["ready"], "its successor to serve")
    shown = pdserve("status", "--admin-url", admin_urls[1]).stdout
    assert shown.startswith("ready: 0 in flight"), shown
    assert "by 2 routers" in shown
