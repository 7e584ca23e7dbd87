"""Stops work for a client that has left.

Starlette notices a disconnect only while it streams, and from ASGI 2.4 on only at the next write. A request that is
still queued writes nothing, so the edge listens for itself from the moment it has the request's body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Sign = Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive, *signs: Sign) -> AsyncIterator[None]:
    """Cancel the body of the ``async with`` as soon as the client disconnects.

    Args:
        receive: of the request, whose body has been read.
        signs: each returns when something else shows that the client might as well have left.

    Raises:
        ClientDisconnect: the body was cancelled.
    """
    try:
        # A timeout without a deadline is asyncio's cancel scope; a listener moves the deadline to now.
        async with asyncio.timeout(None) as scope:
            all_signs: tuple[Sign, ...] = (partial(_disconnect, receive), *signs)
            listeners = [asyncio.create_task(_expire_after(sign, scope)) for sign in all_signs]
            try:
                yield
            finally:
                for listener in listeners:
                    listener.cancel()
    except TimeoutError:
        if not scope.expired():
            raise
        raise ClientDisconnect from None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _expire_after(sign: Sign, scope: asyncio.Timeout) -> None:
    await sign()
    scope.reschedule(asyncio.get_running_loop().time())
