"""Every call to Ray, from one thread, so that a Ray that hangs stops only that thread.

The supervisor submits calls and polls their results. A call that takes longer than `SILENT_S` means that Ray is
silent. Ray's core worker belongs to the process, so a call that hangs cannot be cut short; later calls wait behind it.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SILENT_S = 10.0
"""Duration of a call after which Ray counts as silent."""
_STUCK_S = 1.0


class RayDesk:
    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._began_s: float | None = None
        threading.Thread(target=self._serve, name="ray", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run ``call`` after those before it; the future of an object reference ends with that object."""
        answer: Future[Any] = Future()
        self._calls.put((call, answer))
        return answer

    @property
    def is_stuck(self) -> bool:
        """True if the running call takes so long that no deadline of a later call should count."""
        return self._waited_s() > _STUCK_S

    @property
    def is_silent(self) -> bool:
        """True if Ray does not answer."""
        return self._waited_s() > SILENT_S

    def _waited_s(self) -> float:
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def _serve(self) -> None:
        while True:
            call, answer = self._calls.get()
            self._began_s = time.monotonic()
            try:
                _pass_on(call(), answer)
            except BaseException as error:  # the submitter decides
                answer.set_exception(error)
            self._began_s = None
            del call, answer  # Ray ends an actor when its last handle goes


def _pass_on(result: Any, answer: Future[Any]) -> None:
    ray = sys.modules.get("ray")
    if ray is None or not isinstance(result, ray.ObjectRef):
        answer.set_result(result)
        return

    def finish(done: Future[Any]) -> None:
        if (error := done.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(done.result())

    result.future().add_done_callback(finish)
