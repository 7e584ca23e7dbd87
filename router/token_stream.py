"""A request read token by token: by probes and measurements, which need no text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pdserve.contracts.events import TokenEvent
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.request import Request, RequestSpec


class TokenStream(Request):
    """Iterate for every token of every choice, once and in order within a choice; call `cancel` when leaving early.

    Iteration raises `GenerationError` if no token follows.
    """

    def __init__(self, dispatcher: Dispatcher, spec: RequestSpec) -> None:
        super().__init__(spec)
        self._dispatcher = dispatcher
        self._tokens = asyncio.Queue[TokenEvent | None]()

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        token = await self._tokens.get()
        if token is None:
            self.ended()  # for whoever reads on
            raise self.error or StopAsyncIteration
        return token

    def cancel(self) -> None:
        """Stop the request on every worker."""
        self._dispatcher.cancel(self)

    def token_received(self, token: TokenEvent) -> None:
        self._tokens.put_nowait(token)

    def ended(self) -> None:
        self._tokens.put_nowait(None)
