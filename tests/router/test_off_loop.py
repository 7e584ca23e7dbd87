"""Work on many tokens or parts does not block the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from pdserve.router import off_loop as off_loop_module
from pdserve.router.http.json_body import decoded
from pdserve.router.http.messages import messages_of, turns_of
from pdserve.router.http.schema import ChatBody
from pdserve.router.off_loop import MAX_INLINE_TOKENS, off_loop, pause
from pdserve.router.text.harmony import turns_for_template
from pdserve.router.text.tokenizer import ChatTokenizer
from tests.patience import HANG_S
from tests.router.small_tokenizers import BOS, write_tokenizer

MESSAGES = [{"role": "user", "content": "the time " * 20}] * 1000
RESULTS = [{"role": "tool", "content": "the time"}] * len(MESSAGES)
PARTS = [{"type": "text", "text": "the time"}] * len(MESSAGES)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Calls of `time.sleep` for turns that end at once."""
    sleeps = Mock()
    monkeypatch.setattr(time, "sleep", sleeps)
    monkeypatch.setattr(off_loop_module, "TURN_S", 0.0)
    return sleeps


def test_only_long_work_goes_to_a_thread() -> None:
    async def run() -> tuple[int, int]:
        return await off_loop(MAX_INLINE_TOKENS, threading.get_ident), await off_loop(
            MAX_INLINE_TOKENS + 1, threading.get_ident
        )

    short, long = asyncio.run(run())
    assert short == threading.get_ident()
    assert long != threading.get_ident()


def test_only_a_thread_pauses_and_only_at_the_end_of_its_turn(sleeps: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(off_loop(1, pause, 1))
    pause()
    assert not sleeps.called
    asyncio.run(off_loop(2, pause, 1))
    assert sleeps.call_count == 1
    monkeypatch.setattr(off_loop_module, "TURN_S", 100.0)
    asyncio.run(off_loop(2, pause, 1))
    assert sleeps.call_count == 1


@pytest.mark.parametrize(
    "part",
    [
        "decode",
        "validate",
        "parts",
        "halves",
        "responses",
        "turns",
        "blocks",
        "messages",
        "results",
        "render",
        "mark",
        "mark one",
    ],
)
def test_a_thread_may_pause_before_each_message_and_part(part: str, sleeps: Mock, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert tokenizer.template is not None
    chat = {"messages": MESSAGES}
    work = {
        "decode": partial(decoded, json.dumps(chat).encode()),
        "validate": partial(ChatBody.model_validate, chat),
        "parts": partial(ChatBody.model_validate, {"messages": [{"role": "user", "content": PARTS}]}),
        "halves": partial(decoded, rb'{"messages": "%b"}' % (rb"\ud800." * len(MESSAGES))),
        "responses": partial(messages_of, None, MESSAGES, {}),
        "turns": partial(turns_of, None, MESSAGES, {}),
        "blocks": partial(turns_of, None, [{"role": "user", "content": PARTS}], {}),
        "messages": partial(turns_for_template, MESSAGES),
        "results": partial(
            turns_for_template, [{"role": "assistant", "tool_calls": [{"id": ""}], "content": ""}, *RESULTS]
        ),
        "render": partial(tokenizer.template.render, MESSAGES),
        "mark": partial(tokenizer.chat_text, MESSAGES),
        "mark one": partial(tokenizer.chat_text, [{"role": "user", "content": BOS * 10_000}]),
    }
    asyncio.run(off_loop(1, work[part], 0))
    pieces = {"render": 64, "mark one": 200}.get(part, 1)  # for each pause
    assert sleeps.call_count >= len(MESSAGES) // pieces


def test_a_thread_may_pause_before_each_part_that_it_tokenises(sleeps: Mock, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    text = tokenizer.chat_text([{"role": "user", "content": BOS * 100}])
    sleeps.reset_mock()
    asyncio.run(tokenizer.encode_chat(text))
    assert sleeps.call_count >= 100


def test_other_threads_do_not_wait_for_long_work() -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        release = threading.Event()
        work = asyncio.create_task(off_loop(1, partial(release.wait, HANG_S), 0))
        await asyncio.sleep(0)
        await asyncio.to_thread(release.set)
        assert await work

    asyncio.run(run())
