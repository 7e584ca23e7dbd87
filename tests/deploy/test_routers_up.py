"""Two routers at one address, one of which is killed under streams."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from pdserve.deploy.cluster.folder import admin_headers
from tests.deploy.clusters import UpProcess, pdserve, wait_for
from tests.patience import HANG_S

NUM_STREAMS = 64
NUM_TOKENS = 300
DEPLOYMENT = "{router: {replicas: 2, max_queued_requests: 200}}"
ARGUMENTS = ("--emulate", "h100-sxm", "--prefill", "1", "--decode", "1", "--time-scale", "10")
FREE_S = 3.0


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
    """What became of the streams, and the number of those whose router was killed."""
    async with httpx.AsyncClient(base_url=up.banner("API"), timeout=HANG_S, trust_env=False, verify=False) as client:
        streams = [asyncio.create_task(read_stream(client)) for _ in range(NUM_STREAMS)]

        def held() -> list[int]:
            return [status(url)["in_flight"] for url in admin_urls]

        await asyncio.to_thread(wait_for, lambda: sum(held()) == NUM_STREAMS, "all streams to be under way")
        num_kept, num_lost = held()
        victim = next(process for process in up.members("pdserve.router") if listens(process, admin_urls[1]))
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


def test_a_killed_router_ends_its_own_streams_alone(tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text(DEPLOYMENT)
    up = UpProcess(tmp_path / "log", str(tmp_path / "deployment.yaml"), *ARGUMENTS)
    try:
        up.wait_ready()
        admin_urls = up.banner("admin").split(", ")
        outcomes, num_lost = asyncio.run(streams_while_one_router_dies(up, admin_urls))
        whole = [num_tokens for num_tokens, is_done in outcomes if is_done]
        assert whole == [NUM_TOKENS] * (NUM_STREAMS - num_lost)
        assert 0 < num_lost < NUM_STREAMS
        assert all(num_tokens < NUM_TOKENS for num_tokens, is_done in outcomes if not is_done)

        addresses = [url.removeprefix("http://") for url in admin_urls]
        wait_for(lambda: status(admin_urls[0])["routers"] == addresses, "its successor")
        wait_for(lambda: status(admin_urls[1])["ready"], "its successor to serve")
        shown = pdserve("status", "--admin-url", admin_urls[1]).stdout
        assert shown.startswith("ready: 0 in flight"), shown
        assert "by 2 routers" in shown
    finally:
        assert up.stop() == 0, "\n".join(up.lines)
        assert up.leftovers() == []
