"""Work on many tokens does not block the event loop."""

from __future__ import annotations

import asyncio
import threading

from pdserve.router.http.writer import MAX_INLINE_TOKENS, off_loop


def test_only_long_work_goes_to_a_thread() -> None:
    async def run() -> tuple[int, int]:
        return await off_loop(MAX_INLINE_TOKENS, threading.get_ident), await off_loop(
            MAX_INLINE_TOKENS + 1, threading.get_ident
        )

    short, long = asyncio.run(run())
    assert short == threading.get_ident()
    assert long != threading.get_ident()
