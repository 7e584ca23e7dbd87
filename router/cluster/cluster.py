"""The `Generator` behind the HTTP edge: runs requests over the dispatch core and reads them without blocking the loop.

Owns the periodic work that the core has no clock for: the deadline sweep, the wait for a drain, and readiness, which
requires a real round trip through both phases.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import SamplingParams
from pdserve.router.cluster.fleet import Fleet
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.generation import ServedModel
from pdserve.router.requests.request import GenerationError, Request, RequestSpec

log = logging.getLogger(__name__)

SWEEP_S = 0.1
"""Seconds between sweeps of deadlines."""
PROBE_PROMPT = (1, 2, 1)
"""Token ids that exist in every vocabulary."""
PROBE_SAMPLING = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
PROBE_POLL_S = 0.05
PROBE_RETRY_S = 0.5
PROBE_TIMEOUT_S = 30.0


class TokenStream(Request):
    """Request read by one task; implements `pdserve.router.requests.generation.Generation`."""

    def __init__(self, dispatcher: Dispatcher, spec: RequestSpec) -> None:
        super().__init__(spec)
        self._dispatcher = dispatcher
        self._tokens: deque[TokenEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._tokens:
            if self.error is not None:
                raise self.error
            if self.outcome is not None:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._tokens.popleft()

    def take_ready(self) -> Sequence[TokenEvent]:
        ready = list(self._tokens)
        self._tokens.clear()
        return ready

    def finish(self, choice: int) -> None:
        self._dispatcher.finish(self, choice)

    def cancel(self) -> None:
        self._dispatcher.cancel(self)

    def token_received(self, token: TokenEvent) -> None:
        self._tokens.append(token)
        if self._waiter is not None:
            self._wake()

    def ended(self) -> None:
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Cluster:
    """Implements `pdserve.router.requests.generation.Generator`."""

    def __init__(self, dispatcher: Dispatcher, fleet: Fleet) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet

    @property
    def is_ready(self) -> bool:
        fleet = self._fleet
        return fleet.is_proven and not self._dispatcher.is_draining and fleet.serves_both_phases()

    @property
    def model(self) -> ServedModel | None:
        return self._fleet.model

    def start(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        arrived_s: float,
        cache_salt: bytes = b"",
        num_choices: int = 1,
        is_probe: bool = False,
    ) -> TokenStream:
        """Start a request as `Generator.start` does; ``is_probe`` as in `RequestSpec.is_probe`."""
        assert prompt_tokens
        assert num_choices >= 1
        spec = RequestSpec(
            prompt_tokens=tuple(prompt_tokens),
            sampling=sampling,
            arrived_s=arrived_s,
            num_choices=num_choices,
            cache_salt=cache_salt,
            is_probe=is_probe,
        )
        stream = TokenStream(self._dispatcher, spec)
        self._dispatcher.start(stream)
        return stream

    async def sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._dispatcher.sweep()

    async def wait_idle(self) -> None:
        while self._dispatcher.num_in_flight:  # noqa: ASYNC110  # the core knows no event loop
            await asyncio.sleep(SWEEP_S)

    async def keep_proven(self) -> None:
        """Send a probe request whenever both phases are up and unproven: at startup, and after the last worker of a
        phase was lost. A probe generates two tokens: one from a prefill worker and, after a handoff, one from a decode
        worker, or both from a mixed worker. Probes count in the metrics like any other request."""
        while True:
            await asyncio.sleep(PROBE_POLL_S)
            if self._fleet.is_proven or self._dispatcher.is_draining or not self._fleet.serves_both_phases():
                continue
            if await self.round_trip():
                self._fleet.is_proven = self._fleet.serves_both_phases()
            else:
                await asyncio.sleep(PROBE_RETRY_S)

    async def round_trip(self) -> bool:
        """Whether a probe request completed."""
        try:
            stream = self.start(PROBE_PROMPT, PROBE_SAMPLING, arrived_s=time.monotonic(), is_probe=True)
        except GenerationError as error:
            log.warning("no round trip: %s", error.message)
            return False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return len([token async for token in stream]) == PROBE_SAMPLING.max_tokens
        except (GenerationError, TimeoutError) as error:
            log.warning("the round trip failed: %s", error)
            return False
        finally:
            stream.cancel()
