"""Log of requests: one JSON object per line and request, without prompts, answers or keys."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from contextlib import suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path

import msgspec

from pdserve.router.record import RequestRecord

MAX_WAITING_LINES = 8192
"""Lines that wait for a slow disk. Further ones are dropped, so that no stream waits."""
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class _File(WatchedFileHandler):
    """Raises what it cannot write: logging would tell of each line, with a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - its name in logging
        error = sys.exc_info()[1]
        assert error is not None
        raise error


class RequestLog:
    """Appends to a file, which may be moved or removed at any time, as logrotate does, from a thread of its own."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: the file cannot be written.
        """
        try:
            self._file = _File(path)
        except OSError as error:
            raise ValueError(
                f"router.request_log {path} cannot be written ({error.strerror}); name a file in a folder of this user"
            ) from error
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING_LINES)
        self._num_dropped = 0
        self._writer = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        self._writer.start()

    def write(self, record: RequestRecord) -> None:
        """Append the request's line, soon."""
        try:
            self._lines.put_nowait(msgspec.json.encode(record.line()))
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Write what waits, and end."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
        self._writer.join(CLOSE_TIMEOUT_S)

    def _write_all(self) -> None:
        num_told, is_writable = 0, True
        while (line := self._lines.get()) is not None:
            try:
                self._file.handle(logging.makeLogRecord({"msg": line.decode()}))
                is_writable = True
            except OSError as error:  # full disk, or it was moved, and there can be no new one yet
                if is_writable:
                    log.error("the request log cannot be written, and its lines are lost until it can: %s", error)
                is_writable = False
            if self._num_dropped > num_told:
                num_told = self._num_dropped
                log.warning("the request log is too slow: %d lines dropped so far", num_told)
        with suppress(OSError):
            self._file.close()
