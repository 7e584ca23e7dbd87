"""Scripted worker: a gRPC server of `Worker.Session` that computes nothing and sends what a test specifies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

from pdserve.contracts.events import RequestEventKind, SchedulerLoad
from pdserve.contracts.request import FinishReason
from pdserve.contracts.worker_config import WorkerEndpoint, WorkerRole
from pdserve.proto.codec import load_to_proto
from pdserve.proto.token_proof import ServerProof
from pdserve.proto.v1 import worker_pb2
from pdserve.proto.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tests.patience import HANG_S

HEARTBEAT_S = 0.05
_epochs = itertools.count(1)


async def until(condition: Callable[[], object], timeout_s: float = HANG_S) -> None:
    """Wait for a condition in this process."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class ScriptedWorker(WorkerServicer):
    """Records commands and sends what the test specifies."""

    def __init__(self, worker_id: str, role: WorkerRole, **welcome: Any) -> None:
        self.worker_id = worker_id
        self.role = role
        self.epoch = next(_epochs)
        self.welcome = {
            "kv_address": "127.0.0.1:1", "model_hash": "m",
            "max_model_len": 4096, "block_size": 4, "num_blocks": 256, "max_batch_tokens": 256,
            "max_batch_size": 8, "tensor_parallel": 2, "pipeline_parallel": 1,
            "dtype": "bfloat16", "kv_dtype": "auto", "quantization": "none",
            "cpu_products": "auto", "products": "",
            **welcome,
        }  # fmt: skip
        self.load: dict[str, Any] = {"num_blocks_free": self.welcome["num_blocks"]}
        self.commands: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self.hellos: list[worker_pb2.Hello] = []
        self.is_silent = False
        self._outgoing: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._cluster_token = ""

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(
            worker_id=self.worker_id, role=self.role, address=f"127.0.0.1:{self._port}", epoch=self.epoch
        )

    async def start(self, *, cluster_token: str = "") -> ScriptedWorker:
        """Listen, on the previous port if there was one."""
        self._cluster_token = cluster_token
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_WorkerServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        """Break every stream, as a killed process does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        proof = ServerProof(self._cluster_token, self.endpoint.address, dict(context.invocation_metadata() or ()))
        await context.send_initial_metadata(proof.metadata)
        self.hellos.append((await anext(request_iterator)).hello)
        if not proof.is_proven(self.hellos[-1].proof):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED)
        self._outgoing = asyncio.Queue()
        self.commands = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, self.commands))
        try:
            self.send_welcome()
            while True:
                try:
                    message = await asyncio.wait_for(self._outgoing.get(), HEARTBEAT_S)
                except TimeoutError:
                    message = worker_pb2.WorkerMessage(frame=worker_pb2.StepFrame(load=self._load()))
                if message is None:
                    return
                if not self.is_silent:
                    yield message
        finally:
            reader.cancel()

    async def _read(
        self,
        requests: AsyncIterator[worker_pb2.RouterMessage],
        commands: asyncio.Queue[worker_pb2.RouterMessage],
    ) -> None:
        async for message in requests:
            commands.put_nowait(message)

    def _load(self) -> worker_pb2.Load:
        return load_to_proto(SchedulerLoad(**self.load))

    def send_welcome(self) -> None:
        welcome = worker_pb2.Welcome(worker_id=self.worker_id, worker_epoch=self.epoch, **self.welcome)
        self._outgoing.put_nowait(worker_pb2.WorkerMessage(welcome=welcome))

    def end_stream(self) -> None:
        """End the session cleanly."""
        self._outgoing.put_nowait(None)

    def send(self, frame: worker_pb2.StepFrame) -> None:
        frame.load.CopyFrom(self._load())
        self._outgoing.put_nowait(worker_pb2.WorkerMessage(frame=frame))

    def send_token(self, request: worker_pb2.Request, index: int, token: int, *, last: bool = False) -> None:
        """Send one token of the attempt in ``request``."""
        self.send_tokens(request, [(index, token)], last=last)

    def send_tokens(self, request: worker_pb2.Request, tokens: Iterable[tuple[int, int]], *, last: bool) -> None:
        """Send (index, token) pairs in one frame; the last one ends the choice if ``last``."""
        tokens = list(tokens)
        finish = [worker_pb2.FINISH_REASON_NONE] * len(tokens)
        if last:
            finish[-1] = worker_pb2.FinishReason.ValueType(FinishReason.LENGTH)
        columns = worker_pb2.Tokens(
            request_id=[request.request_id] * len(tokens),
            attempt=[request.attempt] * len(tokens),
            index=[index for index, _ in tokens],
            token=[token for _, token in tokens],
            finish=finish,
        )
        self.send(worker_pb2.StepFrame(tokens=columns))

    def send_event(self, request: worker_pb2.Request, kind: RequestEventKind, **fields: Any) -> None:
        event = worker_pb2.RequestEvent(
            request_id=request.request_id,
            attempt=request.attempt,
            kind=worker_pb2.RequestEvent.Kind.ValueType(kind),
            **fields,
        )
        self.send(worker_pb2.StepFrame(events=[event]))

    def send_prompt_logprobs(self, request: worker_pb2.Request, first_position: int, logprobs: Iterable[float]) -> None:
        """Send log probabilities of consecutive prompt tokens."""
        message = worker_pb2.PromptLogprobs(
            request_id=request.request_id,
            attempt=request.attempt,
            first_position=first_position,
            entries=[worker_pb2.Logprobs(logprob=logprob) for logprob in logprobs],
        )
        self.send(worker_pb2.StepFrame(prompt_logprobs=[message]))

    def offer(self, request: worker_pb2.Request) -> None:
        """Send LAST_CHUNK with a handle that nobody pulls."""
        self.send_event(request, RequestEventKind.LAST_CHUNK, handle=request.request_id.to_bytes(16, "big"))

    async def next_command(self, kind: str) -> worker_pb2.RouterMessage:
        """Return the next command, which must be a ``kind``."""
        message = await asyncio.wait_for(self.commands.get(), HANG_S)
        assert message.WhichOneof("body") == kind, message
        return message

    async def next_submit(self) -> worker_pb2.Request:
        """Return the next request to prefill, skipping cancels of earlier attempts."""
        return (await self._next_after_cancels("submit")).submit.request

    async def next_prepare(self) -> worker_pb2.Request:
        """Return the next request to decode, skipping cancels of earlier attempts."""
        return (await self._next_after_cancels("prepare")).prepare.request

    async def _next_after_cancels(self, kind: str) -> worker_pb2.RouterMessage:
        while True:
            message = await asyncio.wait_for(self.commands.get(), HANG_S)
            if message.WhichOneof("body") != "cancel":
                assert message.WhichOneof("body") == kind, message
                return message
