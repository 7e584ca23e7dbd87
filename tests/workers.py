"""Worker processes for tests, and a minimal router to drive them: one session, read by a thread."""

from __future__ import annotations

import itertools
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import psutil

from pdserve.contracts.codec import from_json, to_json
from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import GenerationRequest, KvSource
from pdserve.contracts.worker_config import WorkerConfig, WorkerEndpoint, WorkerRole
from pdserve.proto.codec import request_to_proto, source_to_proto, unpack_tokens
from pdserve.proto.token_proof import ClientProof
from pdserve.proto.v1 import worker_pb2, worker_pb2_grpc
from tests.forked import ForkedProgram
from tests.patience import HANG_S

_MODULE = "pdserve.engine.worker.process"
_router_numbers = itertools.count()


class RouterClient:
    """One session with one worker. Keeps everything received; `wait_for` waits until it satisfies a condition."""

    def __init__(
        self,
        address: str,
        *,
        router_id: str = "",
        epoch: int = 1,
        token: str = "",
        is_reading: bool = True,
        server_address: str = "",
    ) -> None:
        """
        Args:
            token: a wrong one is not noticed on this side.
            server_address: where the worker listens, if ``address`` leads there through a proxy.
            is_reading: False for a stalled router, which opens a session and never reads it.
        """
        self.welcome = worker_pb2.Welcome()
        self.load = worker_pb2.Load()
        self.frames: list[worker_pb2.StepFrame] = []
        self.tokens: defaultdict[int, list[TokenEvent]] = defaultdict(list)
        self.events: defaultdict[int, list[worker_pb2.RequestEvent]] = defaultdict(list)
        self.error: grpc.StatusCode | None = None
        """Status that ended the stream; None while it is open."""
        self.error_details = ""
        self._changed = threading.Condition()
        self._outgoing: queue.SimpleQueue[worker_pb2.RouterMessage | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        proof = ClientProof(token, server_address or address)
        self._call = worker_pb2_grpc.WorkerStub(self._channel).Session(self._requests(), metadata=proof.metadata)
        hello = worker_pb2.Hello(router_id=router_id or f"router-{next(_router_numbers)}", session_epoch=epoch)
        with suppress(PermissionError):
            hello.proof = proof.check(dict(self._call.initial_metadata()))
        self.send(worker_pb2.RouterMessage(hello=hello))
        self._reader = threading.Thread(target=self._read, daemon=True)
        if is_reading:
            self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Break the stream."""
        self._outgoing.put(None)
        self._call.cancel()  # type: ignore[no-untyped-call]
        if self._reader.is_alive():
            self._reader.join()
        self._channel.close()

    def send(self, message: worker_pb2.RouterMessage) -> None:
        self._outgoing.put(message)

    def submit(self, request: GenerationRequest) -> None:
        self.send(worker_pb2.RouterMessage(submit=worker_pb2.Submit(request=request_to_proto(request))))

    def prepare(self, request: GenerationRequest, source: KvSource) -> None:
        prepare = worker_pb2.Prepare(request=request_to_proto(request), source=source_to_proto(source))
        self.send(worker_pb2.RouterMessage(prepare=prepare))

    def cancel(self, request_id: int, attempt: int = 0) -> None:
        cancel = worker_pb2.Cancel(request_id=request_id, attempt=attempt)
        self.send(worker_pb2.RouterMessage(cancel=cancel))

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = HANG_S) -> None:
        """Wait until ``condition()`` holds. On timeout, an AssertionError names ``what`` did not happen."""
        with self._changed:
            happened = self._changed.wait_for(condition, timeout_s)
        assert happened, f"not seen in {timeout_s} s: {what}; stream: {self.error} {self.error_details}"

    def wait_for_event(self, request_id: int, kind: worker_pb2.RequestEvent.Kind.ValueType) -> worker_pb2.RequestEvent:
        """Wait for the first event of this kind of a request."""

        def found() -> list[worker_pb2.RequestEvent]:
            return [event for event in self.events[request_id] if event.kind == kind]

        name = worker_pb2.RequestEvent.Kind.Name(kind)
        self.wait_for(lambda: bool(found()), f"{name} of request {request_id}, only {self.events[request_id]}")
        return found()[0]

    def wait_for_source(self, request_id: int) -> KvSource:
        """Wait until a prompt submitted with ``handoff`` can be pulled; returns its source."""
        event = self.wait_for_event(request_id, worker_pb2.RequestEvent.LAST_CHUNK)
        welcome = self.welcome
        return KvSource(address=welcome.kv_address, worker_epoch=welcome.worker_epoch, handle=event.handle)

    def wait_for_tokens(self, request_id: int, count: int) -> list[int]:
        """Wait for the first ``count`` tokens of a request."""
        self.wait_for(
            lambda: len(self.tokens[request_id]) >= count,
            f"{count} tokens of request {request_id}, only {len(self.tokens[request_id])}: {self.events[request_id]}",
        )
        return [entry.token for entry in self.tokens[request_id][:count]]

    def wait_for_answer(self, request_id: int) -> list[int]:
        """Wait for all tokens of a request, up to the last one. Checks that their indices have no gaps."""
        self.wait_for(
            lambda: bool(self.tokens[request_id]) and self.tokens[request_id][-1].finish != 0,
            f"the end of request {request_id}",
        )
        entries = self.tokens[request_id]
        first = entries[0].index
        assert [entry.index for entry in entries] == list(range(first, first + len(entries)))
        return [entry.token for entry in entries]

    def wait_until_free(self, timeout_s: float = HANG_S) -> None:
        """Wait for a load report without referenced blocks and without running, waiting or parked requests."""
        self.wait_for(
            lambda: (
                bool(self.frames)
                and self.load.num_blocks_free + self.load.num_blocks_cached > 0
                and self.load.num_blocks_referenced == 0
                and self.load.num_running + self.load.num_waiting + self.load.num_parked == 0
            ),
            "every block free",
            timeout_s,
        )

    def _requests(self) -> Iterator[worker_pb2.RouterMessage]:
        while (message := self._outgoing.get()) is not None:
            yield message

    def _read(self) -> None:
        try:
            for message in self._call:
                with self._changed:
                    self._take(message)
                    self._changed.notify_all()
        except grpc.RpcError:
            pass
        with self._changed:
            self.error = self._call.code()
            self.error_details = self._call.details() or ""
            self._changed.notify_all()

    def _take(self, message: worker_pb2.WorkerMessage) -> None:
        if message.WhichOneof("body") == "welcome":
            self.welcome = message.welcome
            return
        self.frames.append(message.frame)
        self.load = message.frame.load
        for entry in unpack_tokens(message.frame.tokens):
            self.tokens[entry.key.request_id].append(entry)
        for event in message.frame.events:
            self.events[event.request_id].append(event)


def _start(module: str, stdin: str, *, is_forked: bool) -> subprocess.Popen[str] | ForkedProgram:
    arguments = ["--config", "-", "--die-with-parent"]
    if is_forked:
        return ForkedProgram(module, arguments, stdin)
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(stdin)
    return process


class WorkerProcess:
    """A worker as a plain process. Leaving the context kills it with SIGKILL if it still runs."""

    def __init__(self, config: WorkerConfig, *, module: str = _MODULE, is_forked: bool = True) -> None:
        """Start the process and wait for its endpoint. If it does not come up, an AssertionError shows its output.

        Args:
            module: the program.
            is_forked: False: Python starts and ends as always, though the worker imports torch.
        """
        is_with_torch = not config.emulate or module != _MODULE
        self.process = _start(module, to_json(config) + "\n", is_forked=is_with_torch and is_forked)
        assert self.process.stdout is not None
        self._stdout = self.process.stdout
        lines = [self._stdout.readline() for _ in range(config.pipeline_parallel)]
        if not lines[0]:
            self.close()
        assert lines[0], f"the worker did not start: exit status {self.process.returncode}"
        self.endpoints = [from_json(WorkerEndpoint, line, "the endpoint") for line in lines]
        self.endpoint = self.endpoints[0]
        self.cluster_token = config.cluster_token

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._stdout.close()

    def connect(
        self, *, router_id: str = "", epoch: int = 1, is_reading: bool = True, micro_batch: int = 0
    ) -> RouterClient:
        return RouterClient(
            self.endpoints[micro_batch].address,
            router_id=router_id,
            epoch=epoch,
            token=self.cluster_token,
            is_reading=is_reading,
        )

    def children(self) -> list[int]:
        """Process ids of the worker's children."""
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]


def emulated_config(model_path: Path, role: WorkerRole, **fields: object) -> WorkerConfig:
    """A small worker whose executor hashes tokens in no time."""
    values: dict[str, object] = {
        "worker_id": f"{role.value}-0",
        "max_model_len": 512,
        "num_kv_blocks": 128,
        "max_batch_tokens": 64,
        "emulate": "h100-sxm",
        "time_scale": 0.0,
        "cluster_token": "secret",
        **fields,
    }
    return WorkerConfig(role=role, model_path=str(model_path), **values)  # type: ignore[arg-type]


def hand_off(prefill: RouterClient, decode: RouterClient, request: GenerationRequest) -> list[int]:
    """Run a request through both phases and return its answer. The prefill worker must emit token 0, and hands a
    request off that may have more."""
    prefill.submit(replace(request, handoff=True))
    if len(request.emitted_tokens) + 1 < request.sampling.max_tokens:
        decode.prepare(request, prefill.wait_for_source(request.request_id))
    first = prefill.wait_for_tokens(request.request_id, 1)
    if prefill.tokens[request.request_id][0].finish:
        return first
    rest = decode.wait_for_answer(request.request_id)
    assert decode.tokens[request.request_id][0].index == len(request.emitted_tokens) + 1
    return first + rest


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = HANG_S) -> None:
    """Poll a condition that no thread signals."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not seen in {timeout_s} s: {what}"
        time.sleep(0.02)
