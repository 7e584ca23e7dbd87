"""Long work of a request in a thread, which pauses between its parts.

A thread that computes shares the interpreter evenly with the event loop: without pauses, each step of all streams would
take twice as long meanwhile. What works on a request part by part calls `pause` before each.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

MAX_INLINE_TOKENS = 256
"""Tokens that are processed inline about as fast as they are handed to a thread."""
TURN_S = 0.001
"""A thread works for so long, and then as long it does not. A step of many streams takes longer than that."""

_thread = ThreadPoolExecutor(1, "off-loop")
"""For all such work: more would only wait for one another."""

Result = TypeVar("Result")

_end_s: ContextVar[float] = ContextVar("end of the thread's turn", default=math.inf)


async def off_loop(size: int, work: Callable[[], Result], most: int = MAX_INLINE_TOKENS) -> Result:
    """Return ``work()``, run in a thread if its size, by default in tokens, is over ``most``."""
    return work() if size <= most else await asyncio.get_running_loop().run_in_executor(_thread, in_turns, work)


def pause() -> None:
    """Have the event loop go first where the turn of a thread has ended. Elsewhere this does nothing."""
    if time.monotonic() > _end_s.get():
        time.sleep(TURN_S)
        _end_s.set(time.monotonic() + TURN_S)


def in_turns(work: Callable[[], Result]) -> Result:
    """Return ``work()``, whose pauses count: for a thread."""
    _end_s.set(time.monotonic() + TURN_S)
    return work()
