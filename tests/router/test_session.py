"""Sessions against a real gRPC server: identity, order, breaks, stalls and reconnects."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.contracts.placement import WorkerRole
from pdserve.proto.v1 import worker_pb2
from pdserve.router.session import Credentials, SessionRefusedError, WorkerSession
from tests.router.scripted_worker import ScriptedWorker, until

CREDENTIALS = Credentials(router_id="router", stall_timeout_s=0.6)


class Recorder:
    """A sink that writes everything down."""

    def __init__(self, refuse: str = "") -> None:
        self.opened: list[worker_pb2.Welcome] = []
        self.steps: list[int] = []
        self.reasons: list[str] = []
        self._refuse = refuse

    def session_opened(self, session: WorkerSession, welcome: worker_pb2.Welcome) -> None:
        assert session.is_open
        if self._refuse:
            raise SessionRefusedError(self._refuse)
        self.opened.append(welcome)

    def frame_received(self, session: WorkerSession, frame: worker_pb2.StepFrame) -> None:
        self.steps.extend(frame.tokens.index)

    def session_broken(self, session: WorkerSession, reason: str) -> None:
        assert not session.is_open
        self.reasons.append(reason)


def test_frames_and_commands_arrive_in_order() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("prefill-0", WorkerRole.PREFILL).start()
        sink = Recorder()
        session = WorkerSession(worker.endpoint, sink, CREDENTIALS)
        session.start()
        await until(lambda: session.is_open)
        assert sink.opened[0].worker_id == "prefill-0"
        request = worker_pb2.Request(request_id=1)
        for index in range(100):
            worker.send_token(request, index, 7)
            session.send(worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(request_id=index)))
        await until(lambda: len(sink.steps) == 100)
        assert sink.steps == list(range(100))
        received = [(await worker.next_command("cancel")).cancel.request_id for _ in range(100)]
        assert received == list(range(100))
        await session.close()
        assert sink.reasons == ["closed"]
        await worker.stop()

    asyncio.run(run())


def test_a_break_is_told_once_and_the_next_epoch_is_higher() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        sink = Recorder()
        session = WorkerSession(worker.endpoint, sink, CREDENTIALS)
        session.start()
        await until(lambda: session.is_open)
        await worker.stop()
        await until(lambda: sink.reasons)
        await asyncio.sleep(0.3)
        assert len(sink.reasons) == 1
        await worker.start()
        await until(lambda: session.is_open)
        worker.end_stream()
        await until(lambda: len(worker.hellos) == 3)
        epochs = [hello.session_epoch for hello in worker.hellos]
        assert epochs == sorted(set(epochs))
        assert {hello.router_id for hello in worker.hellos} == {"router"}
        await session.close()
        await worker.stop()

    asyncio.run(run())


def test_silence_breaks_a_session() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        sink = Recorder()
        session = WorkerSession(worker.endpoint, sink, CREDENTIALS)
        session.start()
        await until(lambda: session.is_open)
        worker.is_silent = True
        await until(lambda: sink.reasons)
        assert "silent for 0.6 s" in sink.reasons[0]
        worker.is_silent = False
        await until(lambda: len(sink.opened) == 2)
        await session.close()
        await worker.stop()

    asyncio.run(run())


@pytest.mark.parametrize("wrong", [{"epoch": 10**6}, {"worker_id": "decode-1"}, {"role": WorkerRole.MIXED}])
def test_another_worker_on_the_address_is_refused(wrong: dict[str, object]) -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        sink = Recorder()
        session = WorkerSession(replace(worker.endpoint, **wrong), sink, CREDENTIALS)  # type: ignore[arg-type]
        session.start()
        await until(lambda: len(worker.hellos) == 2)
        assert not sink.opened
        assert not sink.reasons
        await session.close()
        await worker.stop()

    asyncio.run(run())


def test_a_refusal_of_the_sink_closes_without_a_break() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        sink = Recorder(refuse="another model")
        session = WorkerSession(worker.endpoint, sink, CREDENTIALS)
        session.start()
        await until(lambda: len(worker.hellos) == 2)
        assert not session.is_open
        assert not sink.reasons
        await session.close()
        await worker.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("token", "opens"), [("secret", True), ("", False), ("wrong", False)])
def test_the_cluster_token_is_sent(token: str, opens: bool) -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start(cluster_token="secret")
        sink = Recorder()
        session = WorkerSession(worker.endpoint, sink, replace(CREDENTIALS, cluster_token=token))
        session.start()
        await asyncio.sleep(0.5)
        assert session.is_open is opens
        await session.close()
        await worker.stop()

    asyncio.run(run())


class FailingRecorder(Recorder):
    """A sink that cannot take the news of a break."""

    def session_broken(self, session: WorkerSession, reason: str) -> None:
        super().session_broken(session, reason)
        raise RuntimeError("boom")


def test_a_session_outlives_a_sink_that_fails() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        sink = FailingRecorder()
        session = WorkerSession(worker.endpoint, sink, CREDENTIALS)
        session.start()
        await until(lambda: session.is_open)
        worker.end_stream()
        await until(lambda: len(sink.opened) == 2)
        await session.close()
        assert len(sink.reasons) == 2
        await worker.stop()

    asyncio.run(run())
