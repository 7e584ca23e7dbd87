"""Work on many tokens in a thread, so that other requests need not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

MAX_INLINE_TOKENS = 256
"""Tokens that take about as long to read or write one by one as it takes to ask a thread."""

Result = TypeVar("Result")


async def off_loop(num_tokens: int, work: Callable[[], Result]) -> Result:
    """What ``work`` on ``num_tokens`` tokens returns, from a thread where they are many."""
    return work() if num_tokens <= MAX_INLINE_TOKENS else await asyncio.to_thread(work)
