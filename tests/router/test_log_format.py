"""The router's log as JSON."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace

import pytest

from pdserve.contracts.events import RequestEventKind
from pdserve.router.log_format import JsonFormatter
from pdserve.router.token_stream import TokenStream
from tests.router.rig import hand_off, read_some, running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker


def test_a_record_is_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("router", logging.ERROR, "", 1, "request %s", ("a\nb",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == ("ERROR", "router", "request a\nb")
    assert fields["exception"].endswith("ValueError: two\nlines")
    assert fields["time"].endswith("+00:00")


def test_lines_about_a_request_have_the_clients_id(caplog: pytest.LogCaptureFixture) -> None:
    @with_workers("prefill-0", "decode-0")
    async def run(p: ScriptedWorker, d: ScriptedWorker) -> None:
        async with running_rig() as rig:
            await rig.up(p, d)
            with caplog.at_level(logging.INFO):
                spec = replace(rig.start().spec, request_id="client-7")
                request = TokenStream(rig.dispatcher, spec)
                await hand_off(p, d)
                rig.dispatcher.fail_all("the first")
                rig.dispatcher.start(request)
                sent = await hand_off(p, d)
                assert await read_some(request, 1) == [100]
                d.send_event(sent, RequestEventKind.FAILED)
                await hand_off(p, d, token=101)
                request.cancel()

    run()
    assert "request client-7 (2), attempt 0: failed" in caplog.text
