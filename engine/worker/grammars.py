"""Compiled grammars of a worker.

A grammar is compiled when its first request arrives, or when the router announces it: by a child process
(`pdserve.engine.worker.grammar_compiler`) whose memory and time are bounded: some grammars take minutes. A thread here
then reads the result or, if that takes longer, compiles the grammar again; xgrammar holds no lock of the interpreter
meanwhile. Requests wait in the step loop, which computes others. Grammars of live requests are kept; others up to a
bound, the least recently used of the tenant that takes most dropped first. Tenants have their grammars compiled in
turns. Thread and child start with the first grammar.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from pdserve.contracts.codec import to_json
from pdserve.contracts.request import Grammar
from pdserve.contracts.step import ModelLimits
from pdserve.engine.worker.grammar_compiler import (
    BUSY,
    FAILED,
    MAX_WALL_S,
    CompilerConfig,
    compile_grammar,
    give_way,
)
from pdserve.engine.worker.loop import Busy
from pdserve.engine.worker.xgrammar_import import import_xgrammar
from pdserve.proto.framing import encode_frame, receive_frame

if TYPE_CHECKING:  # it imports torch
    import xgrammar

MAX_KEPT_BYTES = 64 << 20
"""Compiled grammars kept, besides those of live requests; the newest whatever it needs."""
MAX_FAILURES = 1024
"""Grammars remembered as impossible to compile."""
MAX_WAIT_S = 30.0
"""For others, before a grammar is refused; also how long it is refused at once after that, or after a failure of the
compiler itself."""
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 2.0

_MODULE = "pdserve.engine.worker.grammar_compiler"
_log = logging.getLogger(__name__)


class _BusyError(Exception):
    """There was no time to compile a grammar."""


class Grammars:
    """Any thread may call `find` and `close`, and the step loop's thread `compiled`."""

    def __init__(self, folder: Path, limits: ModelLimits, cpu_cores: tuple[int, ...] = ()) -> None:
        """
        Args:
            folder: of the checkpoint, whose ``tokenizer.json`` is read.
            cpu_cores: to compile on, apart from those of steps if there are others; empty keeps those of the thread
                that asks first.
        """
        self.on_compiled: Callable[[Grammar], None] = lambda grammar: None
        """Called once `find` has an answer that it had not before, on a thread of this object."""
        self._config = CompilerConfig(str(folder), limits.vocab_size, limits.eos_token_ids, os.getpid())
        self._cpu_cores = cpu_cores
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, deque[tuple[Grammar, float]]] = OrderedDict()
        """Grammars and when they came, by owner, the next one first."""
        self._has_jobs = threading.Condition(self._lock)
        self._is_closed = False
        self._pending: set[Grammar] = set()
        self._live: WeakValueDictionary[Grammar, xgrammar.CompiledGrammar] = WeakValueDictionary()
        self._kept: OrderedDict[Grammar, xgrammar.CompiledGrammar] = OrderedDict()
        self._failures: OrderedDict[Grammar, tuple[str, float]] = OrderedDict()
        """Reason, and until when it holds."""
        self._thread: threading.Thread | None = None

    def find(self, grammar: Grammar) -> xgrammar.CompiledGrammar | str | None:
        """Return the compiled grammar, why it cannot be compiled (for some seconds if `Busy`), or ``None`` while it is
        being compiled.

        Who keeps the compiled grammar keeps it from being dropped.
        """
        with self._lock:
            failure, until_s = self._failures.get(grammar, ("", 0.0))
            if time.monotonic() < until_s:
                return failure if until_s == inf else Busy(failure)
            self._failures.pop(grammar, None)
            if (compiled := self._live.get(grammar)) is not None:
                if grammar in self._kept:
                    self._kept.move_to_end(grammar)
                else:
                    self._keep(grammar, compiled)
                return compiled
            if grammar not in self._pending:
                self._pending.add(grammar)
                self._jobs.setdefault(grammar.owner, deque()).append((grammar, time.monotonic()))
                self._has_jobs.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
        return None

    def compiled(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Return a grammar that somebody keeps.

        Raises:
            KeyError: nobody does.
        """
        return self._live[grammar]

    def close(self) -> None:
        """End the compiler; grammars in the queue stay pending."""
        with self._lock:
            self._is_closed = True
            self._has_jobs.notify()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _keep(self, grammar: Grammar, compiled: xgrammar.CompiledGrammar) -> None:
        self._kept[grammar] = self._live[grammar] = compiled
        while True:
            held = Counter[str]()
            for each, kept in self._kept.items():
                held[each.owner] += kept.memory_size_bytes
            if held.total() <= MAX_KEPT_BYTES:
                return
            owner = max(held, key=held.__getitem__)
            oldest = next(each for each in self._kept if each.owner == owner)
            if oldest == grammar:  # all that its owner has
                return
            del self._kept[oldest]

    def _next(self) -> tuple[Grammar, float] | None:
        """Wait for the next grammar of the owner whose turn it is, and when it came; None once closed."""
        with self._has_jobs:
            while not self._jobs and not self._is_closed:
                self._has_jobs.wait()
            if self._is_closed:
                return None
            owner, grammars = self._jobs.popitem(last=False)
            job = grammars.popleft()
            if grammars:
                self._jobs[owner] = grammars
            return job

    def _run(self) -> None:
        if self._cpu_cores:
            os.sched_setaffinity(0, self._cpu_cores)  # of this thread and its child
        compiler = _Compiler(self._config)
        try:
            while (job := self._next()) is not None:
                grammar, came_s = job
                failure, until_s, compiled = "", inf, None
                try:
                    if time.monotonic() - max(came_s, compiler.ready_s) > MAX_WAIT_S:
                        raise _BusyError(f"others were compiled for {MAX_WAIT_S:g} s before it; try again")
                    compiled = compiler.compile(grammar)
                except (_BusyError, OSError) as error:  # not by its fault
                    failure, until_s = str(error), time.monotonic() + MAX_WAIT_S
                except (ValueError, RuntimeError, ImportError) as error:
                    failure = str(error)
                except Exception as error:  # a fault of ours or of the library ends this grammar alone
                    _log.exception("a grammar was not compiled")
                    failure = f"unexpected {type(error).__name__}: {error}"
                    compiler.close()
                with self._lock:
                    self._pending.discard(grammar)
                    if compiled is not None:
                        self._keep(grammar, compiled)
                    else:
                        self._failures[grammar] = failure, until_s
                        if len(self._failures) > MAX_FAILURES:
                            self._failures.popitem(last=False)
                self.on_compiled(grammar)
        finally:
            compiler.close()


class _Compiler:
    """The child process; started again if it has ended."""

    def __init__(self, config: CompilerConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._vocabulary: xgrammar.TokenizerInfo | None = None
        self.ready_s = 0.0
        """When it had started."""

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """
        Raises:
            ValueError: the grammar cannot be compiled, or not within its bounds.
            _BusyError: the machine was too busy.
            ImportError: xgrammar is not installed.
            RuntimeError, OSError: the child does not start; its log has the reason.
        """
        if find_spec("xgrammar") is None:
            raise ImportError("the worker has no xgrammar, which structured output needs: install it")
        try:
            serialised = self._ask(grammar)
        except OSError:  # it was killed while idle: start another
            self.close()
            serialised = self._ask(grammar)

        import xgrammar

        assert self._vocabulary is not None
        give_way()
        if not serialised:
            return compile_grammar(self._vocabulary, grammar)
        return xgrammar.CompiledGrammar.deserialize_json(serialised.decode(), self._vocabulary)

    def _ask(self, grammar: Grammar) -> bytes:
        if self._socket is None:
            self._start()
        assert self._socket is not None
        self._socket.sendall(encode_frame(bytes([grammar.kind]) + grammar.text.encode()))
        return self._receive()

    def _start(self) -> None:
        self._socket, child = socket.socketpair()
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(child.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[child.fileno()],
            )
        self._socket.settimeout(START_TIMEOUT_S)
        self._socket.sendall(encode_frame(to_json(self._config).encode()))

        import_xgrammar()
        import xgrammar

        self._vocabulary = xgrammar.TokenizerInfo.deserialize_json(self._receive().decode())
        self._socket.settimeout(2 * MAX_WALL_S)
        self.ready_s = time.monotonic()

    def _receive(self) -> bytes:
        assert self._socket is not None
        answer = receive_frame(self._socket)
        if answer is None:
            raise OSError("the grammar compiler has ended; the worker's log has the reason")
        if answer[:1] == FAILED:
            raise ValueError(answer[1:].decode())
        if answer[:1] == BUSY:
            raise _BusyError(answer[1:].decode())
        return answer[1:]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
            self._process = None
