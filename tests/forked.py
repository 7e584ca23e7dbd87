"""Processes that a server forks which has imported torch and what workers of a model need, once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from functools import cache
from io import StringIO
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from unittest.mock import patch

_IMPORTED = ("pdserve.engine.worker.worker", "pdserve.model.executors.model", "tests.kv_transfer.device_peer")


@cache
def fork_server() -> ForkServerContext:
    """One of each process that runs tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    with patch.dict(os.environ, OMP_WAIT_POLICY="passive"):  # as a worker does before it imports torch
        forkserver.ensure_running()
    return context


class ForkedProgram:
    """``python -m module arguments``, with the part of `subprocess.Popen` that tests use. It leaves by `os._exit`."""

    def __init__(self, module: str, arguments: Sequence[str], stdin: str) -> None:
        context = fork_server()
        stdout, theirs = context.Pipe(duplex=False)
        arguments = (module, *arguments)
        self._process = context.Process(target=_run, args=(arguments, dict(os.environ), stdin, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(stdout.fileno()))
        stdout.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, "the process still runs"
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(argv: Sequence[str], environment: dict[str, str], stdin: str, stdout: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(argv)
    sys.stdin = StringIO(stdin)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    sys.stdout = os.fdopen(1, "w")
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
