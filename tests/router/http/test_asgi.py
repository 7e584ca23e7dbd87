from __future__ import annotations

import asyncio
import gc
import weakref

from starlette.types import Message, Receive, Scope, Send

from pdserve.router.http.asgi import EdgeMiddleware
from pdserve.router.http.exchange import Exchange
from tests.router.edge_server import ScriptedGenerator


async def _nothing() -> Message:
    return {"type": "http.request"}


async def _drop(message: Message) -> None:
    pass


def test_requests_that_arrive_together_begin_in_turns_of_the_loop() -> None:
    async def begin_five(method: str) -> list[int]:
        num_turns, begun = 0, list[int]()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            begun.append(num_turns)

        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        edge = EdgeMiddleware(app, ScriptedGenerator(), None, ())
        counting = asyncio.create_task(count_turns())
        scope = {"type": "http", "method": method, "path": "/", "headers": []}
        await asyncio.gather(*(edge({**scope}, _nothing, _drop) for _ in range(5)))
        counting.cancel()
        return begun

    assert len(set(asyncio.run(begin_five("POST")))) == 5
    assert len(set(asyncio.run(begin_five("GET")))) == 1


def test_nothing_of_a_request_outlives_it() -> None:
    """Its answers hold prompts, which may be large, and a collection of garbage may be far away."""
    exchanges: list[weakref.ref[Exchange]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchanges.append(weakref.ref(scope["state"]["exchange"]))

    edge = EdgeMiddleware(app, ScriptedGenerator(), None, ())
    gc.disable()
    try:
        asyncio.run(edge({"type": "http", "method": "POST", "path": "/", "headers": []}, _nothing, _drop))
        assert [each() for each in exchanges] == [None]
    finally:
        gc.enable()
