"""Stops work for a client that has left.

Starlette notices a disconnect only while it streams, and from ASGI 2.4 on only at the next write. A request that is
still queued writes nothing, so the edge listens for itself from the moment it has the request's body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Receive


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body of the ``async with`` as soon as the client disconnects.

    Args:
        receive: of the request, whose body has been read.

    Raises:
        ClientDisconnect: the body was cancelled.
    """
    try:
        # A timeout without a deadline is asyncio's cancel scope; the listener moves the deadline to now.
        async with asyncio.timeout(None) as scope:
            listener = asyncio.create_task(_expire_on_disconnect(receive, scope))
            try:
                yield
            finally:
                listener.cancel()
    except TimeoutError:
        if not scope.expired():
            raise
        raise ClientDisconnect from None


async def _expire_on_disconnect(receive: Receive, scope: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.reschedule(asyncio.get_running_loop().time())
