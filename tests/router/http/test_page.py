"""The page's files, its stream of events, and its use of API keys."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import uvicorn

from pdserve.contracts.deployment import SloConfig
from pdserve.router.http.app import create_app
from pdserve.router.http.keys import KeyFile, add_key
from pdserve.router.http.page import MAX_VIEWERS
from pdserve.router.overview import Overview
from pdserve.router.text.tokenizer import ChatTokenizer
from tests.router.edge_server import deployment_of
from tests.router.rig import Rig, hand_off, running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker, until
from tests.router.small_tokenizers import CHAT_TEMPLATE, write_tokenizer

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def app_of(rig: Rig, folder: Path, overview: Overview | None, keys: KeyFile | None = None) -> Any:
    write_tokenizer(folder, CHAT_TEMPLATE)
    tokenizer = ChatTokenizer.from_folder(folder)
    return create_app(rig.cluster, tokenizer, deployment_of(), keys=keys, overview=overview)


def overview_of(rig: Rig) -> Overview:
    return Overview(rig.cluster, rig.metrics, SloConfig(), "tiny")


@asynccontextmanager
async def page_of(rig: Rig, folder: Path, keys: KeyFile | None = None) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """Client of a router with a page, and the task that samples."""
    overview = overview_of(rig)
    app = app_of(rig, folder, overview, keys)
    sampling = asyncio.create_task(overview.sample_forever())
    await asyncio.sleep(0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        yield client, sampling
    sampling.cancel()


async def read_events(client: httpx.AsyncClient, sampling: asyncio.Task[None], seconds: float) -> list[dict[str, Any]]:
    """Events of a stream that the end of the router's life ends after ``seconds``."""
    reading = asyncio.create_task(client.get("/page/events"))
    await asyncio.sleep(seconds)
    sampling.cancel()
    answer = await asyncio.wait_for(reading, 5)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def test_files_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_rig() as rig, page_of(rig, tmp_path) as (client, _):
            page = await client.get("/")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            for path in ("/page/page.js", "/page/page.css"):
                assert path in page.text
                assert (await client.head(path)).status_code == 200
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            script = (await client.get("/page/page.js")).text
            assert "http" not in (page.text + script).replace("http://www.w3.org/2000/svg", "")
            assert "innerHTML" not in script

    asyncio.run(run())


def test_the_stream_begins_with_the_trend_and_ends_with_the_router(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_rig() as rig, page_of(rig, tmp_path) as (client, sampling):
            first, *later = await read_events(client, sampling, 1.3)
            assert (first["now"]["model"], first["now"]["state"]) == ("tiny", "not ready")
            assert len(first["points"]) == 1
            assert len(later) in (1, 2)
            assert all(each["points"] == [] for each in later)

    asyncio.run(run())


def test_the_state_is_computed_once_for_all_viewers_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.router.overview.SAMPLE_S", 0.2)
    taken: list[dict[str, Any]] = []
    now = Overview.now

    def recorded(overview: Overview) -> dict[str, Any]:
        taken.append(now(overview))
        return taken[-1]

    async def run() -> None:
        async with running_rig() as rig, page_of(rig, tmp_path) as (client, sampling):
            await asyncio.sleep(0.5)
            assert taken == []  # nobody looks
            viewers = [asyncio.create_task(client.get("/page/events")) for _ in range(MAX_VIEWERS)]
            await asyncio.sleep(1.0)
            sampling.cancel()
            taken_s = [each["last"]["at_s"] for each in taken]
            assert len(taken_s) == len(set(taken_s)) > 2
            for viewer in viewers:
                events = (await asyncio.wait_for(viewer, 10)).text.split("\n\n")[:-1]
                assert {json.loads(each.removeprefix("data: "))["now"]["last"]["at_s"] for each in events} <= {*taken_s}

    monkeypatch.setattr(Overview, "now", recorded)
    asyncio.run(run())


def test_a_browser_gives_its_key_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    key = add_key(path, "team-a")

    async def run() -> None:
        async with running_rig() as rig, page_of(rig, tmp_path, KeyFile(path, b"secret")) as (client, sampling):
            assert "data-needs-key" in (await client.get("/")).text
            assert (await client.get("/page/events")).status_code == 401
            wrong = await client.post("/page/session", headers={"Authorization": f"Bearer {key}x"})
            assert (wrong.status_code, dict(client.cookies)) == (401, {})
            kept = await client.post("/page/session", headers={"Authorization": f"Bearer {key}"})
            assert kept.status_code == 204
            cookie = kept.headers["set-cookie"].lower()
            assert "httponly" in cookie
            assert "samesite=strict" in cookie
            assert "max-age" not in cookie
            assert (await client.get("/v1/models")).status_code == 200
            assert "data-needs-key" not in (await client.get("/")).text
            assert (await client.get("/v1/models", headers={"Authorization": "Bearer pd-0-0"})).status_code == 401
            assert await read_events(client, sampling, 0.1)
            path.write_text("")
            assert (await client.get("/v1/models")).status_code == 401

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/", "/page/events", "/page/page.js"])
def test_a_router_without_a_page_has_none_of_it(path: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with running_rig() as rig:
            transport = httpx.ASGITransport(app_of(rig, tmp_path, None))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                assert (await client.get(path)).status_code == 404

    asyncio.run(run())


async def text_in_browser(url: str, profile: Path) -> str:
    """Text of the document after its script has run."""
    assert BROWSER is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--timeout=2000")
    browser = await asyncio.create_subprocess_exec(
        BROWSER, *options, "--dump-dom", url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await asyncio.wait_for(browser.communicate(), 60)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", output.decode()))


@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")
@with_workers("prefill-0", "decode-0")
async def test_a_browser_draws_the_workers(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start()
        await hand_off(p, d)
        overview = overview_of(rig)
        overview.sample(0.0)
        with TemporaryDirectory() as folder:
            app = app_of(rig, Path(folder), overview)
            server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
            serving = asyncio.create_task(server.serve())
            await until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            shown, deadline_s = "", time.monotonic() + 30
            while "running" not in shown and time.monotonic() < deadline_s:  # often taken before the first event
                shown = await text_in_browser(f"http://127.0.0.1:{port}/", Path(folder))
            server.should_exit = server.force_exit = True
            await serving
        assert "prefill-0 up" in shown
        assert "decode-0 up" in shown
        assert "In flight 1" in shown
        assert "objective 250 ms" in shown
        stream.cancel()
