"""The log of requests: a line for each, whatever becomes of it."""

from __future__ import annotations

import json
import logging
import threading
import time
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.contracts.request import FinishReason
from pdserve.router.http import request_log
from pdserve.router.http.keys import KeyFile, add_key
from pdserve.router.http.request_log import RequestLog
from pdserve.router.record import RequestRecord
from tests.patience import HANG_S
from tests.router.edge_server import EdgeServer, running_edge, stuck_after
from tests.workers import wait_until

PROMPT = "nobody may read this"


def lines_of(path: Path, num_lines: int = 1) -> list[dict[str, Any]]:
    """All lines, once there are ``num_lines``: a client may have its answer before the line is written."""
    deadline_s = time.monotonic() + HANG_S
    while not path.exists() or len(path.read_text().splitlines()) < num_lines:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(request_id: str) -> RequestRecord:
    return RequestRecord(id=request_id, path="/v1/completions", arrived_s=0.0)


def complete(edge: EdgeServer, key: str = "", request_id: str = "client-7", **fields: object) -> httpx.Response:
    headers = {"X-Request-Id": request_id} | ({"Authorization": f"Bearer {key}"} if key else {})
    with httpx.Client(timeout=HANG_S, headers=headers) as client:
        return client.post(f"{edge.url}/v1/completions", json={"prompt": PROMPT, **fields})


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_says_where_the_time_went_and_who_served(tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "requests.jsonl"
    with running_edge(sinks=[RequestLog(path)]) as edge:
        num_tokens = edge.say("an answer", FinishReason.LENGTH)
        assert complete(edge, stream=stream, max_tokens=num_tokens).headers["X-Request-Id"] == "client-7"
        num_prompt_tokens = len(edge.generator.last.prompt_tokens)
        (line,) = lines_of(path)
    assert (line["request_id"], line["path"], line["status"]) == ("client-7", "/v1/completions", 200)
    assert (line["outcome"], line["workers"]) == ("finished", ["prefill-0", "decode-1"])
    assert (line["prompt_tokens"], line["completion_tokens"]) == (num_prompt_tokens, num_tokens)
    assert (line["phases_s"], line["retries"]) == ({"queue": 0.001, "prefill": 0.002}, 0)
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert 0 <= line["tpot_s"] * (num_tokens - 1) <= line["duration_s"]
    assert "tenant" not in line


def test_refused_and_abandoned_requests_have_a_line_without_secrets(tmp_path: Path) -> None:
    path, keys = tmp_path / "requests.jsonl", tmp_path / "keys.jsonl"
    key = add_key(keys, "team-a")
    with running_edge(KeyFile(keys, b"secret"), sinks=[RequestLog(path)]) as edge:
        assert complete(edge, "pd-wrong").status_code == 401
        assert complete(edge, key, max_tokens="many").status_code == 400
        edge.generator.script = stuck_after([])
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.5) as client:
            client.post(
                f"{edge.url}/v1/completions", json={"prompt": PROMPT}, headers={"Authorization": f"Bearer {key}"}
            )
        httpx.get(f"{edge.url}/live")
        lines = lines_of(path, 3)
    assert [(line["status"], line.get("tenant"), line.get("outcome")) for line in lines] == [
        (401, None, None),
        (400, "team-a", None),
        (499, "team-a", "cancelled"),
    ]
    assert lines[-1]["ttft_s"] is None
    text = path.read_text()
    assert not any(secret in text for secret in (key, "pd-wrong", PROMPT))


def test_a_file_that_was_moved_away_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with running_edge(sinks=[RequestLog(path)]) as edge:
        complete(edge, request_id="first")
        lines_of(path)
        path.rename(tmp_path / "requests.jsonl.1")
        complete(edge, request_id="second")
        assert [line["request_id"] for line in lines_of(path)] == ["second"]


def test_a_folder_that_is_gone_for_a_while_costs_the_lines_of_that_while_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "logs" / "requests.jsonl"
    path.parent.mkdir()
    log = RequestLog(path)
    path.parent.rename(tmp_path / "moved")
    for request_id in ("lost", "lost, too"):
        log.write(record(request_id))
    wait_until(log._lines.empty, "the writer to take the lines")
    wait_until(lambda: "cannot be written" in caplog.text, "the writer to say so")
    path.parent.mkdir()
    log.write(record("written"))
    log.close()
    assert lines_of(path)[-1]["request_id"] == "written"
    assert caplog.text.count("cannot be written") == 1


def test_a_full_disk_is_told_of_once(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"))
    for request_id in ("lost", "lost, too"):
        log.write(record(request_id))
    log.close()
    assert caplog.text.count("cannot be written, and its lines are lost until it can") == 1
    assert not capfd.readouterr().err


def test_a_disk_that_hangs_stops_nobody_and_lines_beyond_the_bound_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.jsonl"
    monkeypatch.setattr(request_log, "MAX_WAITING_LINES", 3)
    is_mended = threading.Event()
    write = WatchedFileHandler.emit

    def emit(handler: WatchedFileHandler, record: logging.LogRecord) -> None:
        assert is_mended.wait(HANG_S)
        write(handler, record)

    monkeypatch.setattr(WatchedFileHandler, "emit", emit)
    log = RequestLog(path)

    def add(request_id: int) -> None:
        log.write(record(str(request_id)))

    add(0)
    wait_until(log._lines.empty, "the writer to take the first line")
    for request_id in range(1, 9):
        add(request_id)
    is_mended.set()
    log.close()
    assert [line["request_id"] for line in lines_of(path, 4)] == ["0", "1", "2", "3"]
    assert "5 lines dropped so far" in caplog.text


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent/log cannot be written \(No such file or directory\); name a file"):
        RequestLog(tmp_path / "absent" / "log")
