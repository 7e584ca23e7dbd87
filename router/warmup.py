"""Readiness: a real round trip through both phases before the router calls itself ready.

Runs beside the dispatcher for the life of the process. Whenever both phases are up and unproven (at the start, and
after the last worker of a phase was lost) it sends a request of its own and waits for two tokens: from some prefill
worker and, by a handoff, some decode worker, or both from a mixed worker. Such a request counts in the metrics like any
other.
"""

from __future__ import annotations

import asyncio
import logging
import time

from pdserve.contracts.request import SamplingParams
from pdserve.router.dispatch import Dispatcher
from pdserve.router.fleet import Fleet
from pdserve.router.generation import GenerationError

log = logging.getLogger(__name__)

PROMPT = (1, 2, 1)
"""Token ids that every vocabulary has."""
SAMPLING = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
POLL_S = 0.05
RETRY_S = 0.5
ROUND_TRIP_TIMEOUT_S = 30.0


async def keep_proven(dispatcher: Dispatcher, fleet: Fleet) -> None:
    """Send a round trip whenever one is due; runs until cancelled."""
    while True:
        await asyncio.sleep(POLL_S)
        if fleet.serves_both_phases() and not dispatcher.is_ready and not dispatcher.is_draining:
            if await round_trip(dispatcher):
                dispatcher.prove()
            else:
                await asyncio.sleep(RETRY_S)


async def round_trip(dispatcher: Dispatcher) -> bool:
    """Whether a small request came back whole."""
    try:
        flight = dispatcher.start(PROMPT, SAMPLING, arrived_s=time.monotonic(), is_probe=True)
    except GenerationError as error:
        log.warning("no round trip: %s", error.message)
        return False
    try:
        async with asyncio.timeout(ROUND_TRIP_TIMEOUT_S):
            return len([delta async for delta in flight]) == SAMPLING.max_tokens
    except (GenerationError, TimeoutError) as error:
        log.warning("the round trip failed: %s", error)
        return False
    finally:
        flight.cancel()
