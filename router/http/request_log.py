"""Log of requests: one JSON object per line and request, without prompts, answers or keys."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

import msgspec

from pdserve.contracts.request import Outcome
from pdserve.router.http.token_timer import TokenTimer
from pdserve.router.metrics import PHASES
from pdserve.router.requests.journey import Journey
from pdserve.router.text.answer import Answer

MAX_WAITING_LINES = 8192
"""Lines that wait for a slow disk. Further ones are dropped, so that no stream waits."""
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class RequestLog:
    """Appends to a file, which may be moved or removed at any time, as logrotate does, from a thread of its own."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: the file cannot be written.
        """
        try:
            self._file = WatchedFileHandler(path)
        except OSError as error:
            raise ValueError(
                f"router.request_log {path} cannot be written ({error.strerror}); name a file in a folder of this user"
            ) from error
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING_LINES)
        self._num_dropped = 0
        self._writer = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        self._writer.start()

    def write(self, entry: RequestEntry, status: int) -> None:
        """Append ``entry``, soon; ``status`` is `CLIENT_LEFT` if none was sent."""
        try:
            self._lines.put_nowait(_encode(entry.fields(status)))
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
            except OSError as error:  # it was moved, and there can be no new one yet
                if is_writable:
                    log.error("the request log cannot be written, and its lines are lost until it can: %s", error)
                is_writable = False
            if self._num_dropped > num_told:
                num_told = self._num_dropped
                log.warning("the request log is too slow: %d lines dropped so far", num_told)
        self._file.close()


class RequestEntry:
    """What the log says of one request; `answering` adds what is known once it generates."""

    def __init__(self, request_id: str, path: str, arrived_s: float) -> None:
        """``arrived_s``: by `time.monotonic`."""
        self.tenant = ""
        self.path = path
        self.arrived_s = arrived_s
        self._request_id = request_id
        self._answers: Sequence[Answer] = ()
        self._timer: TokenTimer | None = None

    @property
    def journeys(self) -> list[Journey]:
        """Of each prompt."""
        return [answer.journey for answer in self._answers]

    def is_good(self, status: int) -> bool | None:
        """Whether both objectives were met; None for a request that ended otherwise by its sender's fault or wish."""
        if self._timer is None:
            return None
        if self._timer.is_good is None and (status >= 500 or status == 429 or self._outcome is Outcome.FAILED):
            return False
        return self._timer.is_good

    @property
    def _outcome(self) -> Outcome:
        outcomes = [each.outcome or Outcome.REJECTED for each in self._answers]
        return next((each for each in outcomes if each is not Outcome.FINISHED), Outcome.FINISHED)

    def answering(self, answers: Sequence[Answer], timer: TokenTimer) -> None:
        self._answers, self._timer = answers, timer

    def fields(self, status: int) -> dict[str, Any]:
        """Times are in seconds. ``outcome`` is that of the first prompt which did not finish; ``phases_s``
        are the longest of the prompts. ``workers`` are in the order in which they got the request, one more for each
        fail-over."""
        fields: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self._request_id,
            "path": self.path,
            "status": status,
            "duration_s": round(time.monotonic() - self.arrived_s, 6),
        }
        if self.tenant:
            fields["tenant"] = self.tenant
        if self._timer is None:
            return fields
        journeys = self.journeys
        return fields | {
            "outcome": self._outcome.value,
            "prompt_tokens": sum(len(answer.spec.prompt_tokens) for answer in self._answers),
            "cached_tokens": sum(answer.num_cached_tokens for answer in self._answers),
            "completion_tokens": sum(answer.num_completion_tokens for answer in self._answers),
            "ttft_s": _rounded(self._timer.ttft_s),
            "tpot_s": _rounded(self._timer.tpot_s),
            "phases_s": {
                phase: round(max(each.phases_s.get(phase, 0.0) for each in journeys), 6)
                for phase in PHASES
                if any(phase in each.phases_s for each in journeys)
            },
            "retries": sum(each.num_retries for each in journeys),
            "workers": [worker for each in journeys for worker in each.workers],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
