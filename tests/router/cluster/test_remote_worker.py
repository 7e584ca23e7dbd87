"""Sessions against a real gRPC server: identity, order, breaks, stalls and reconnects."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace
from unittest.mock import patch

import pytest

from pdserve.contracts.request import Grammar, GrammarKind
from pdserve.contracts.worker_config import TlsFiles, WorkerEndpoint, WorkerRole
from pdserve.proto.v1 import worker_pb2
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.cluster.remote_worker import RemoteWorker, SessionRefusedError
from pdserve.router.metrics import RouterMetrics
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.settings import DispatchSettings
from tests.router.rig import COST, sample
from tests.router.scripted_worker import ScriptedWorker, until


class Recorder(RemoteWorker):
    def __init__(
        self, endpoint: WorkerEndpoint, *, cluster_token: str = "", tls: TlsFiles | None = None, refuse: str = ""
    ) -> None:
        dispatcher = Dispatcher({}, DispatchSettings(), time.monotonic)
        super().__init__(
            endpoint, Cluster(dispatcher, RouterMetrics(), cluster_token=cluster_token, tls=tls, stall_timeout_s=0.6)
        )
        self.opened: list[worker_pb2.Welcome] = []
        self.steps: list[int] = []
        self.reasons: list[str] = []
        self._refuse = refuse

    def session_opened(self, welcome: worker_pb2.Welcome) -> None:
        if self._refuse:
            raise SessionRefusedError(self._refuse)
        super().session_opened(welcome)
        assert self.is_up
        self.opened.append(welcome)

    def frame_received(self, frame: worker_pb2.StepFrame) -> None:
        self.steps.extend(frame.tokens.index)

    def session_broken(self, reason: str) -> None:
        super().session_broken(reason)
        assert not self.is_up
        self.reasons.append(reason)


def test_frames_and_commands_arrive_in_order() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("prefill-0", WorkerRole.PREFILL).start()
        session = Recorder(worker.endpoint)
        session.start()
        await until(lambda: session.is_up)
        assert session.opened[0].worker_id == "prefill-0"
        request = worker_pb2.Request(request_id=1)
        for index in range(100):
            worker.send_token(request, index, 7)
            session.send(worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(request_id=index)))
        await until(lambda: len(session.steps) == 100)
        assert session.steps == list(range(100))
        received = [(await worker.next_command("cancel")).cancel.request_id for _ in range(100)]
        assert received == list(range(100))
        await session.close()
        assert session.reasons == ["closed"]
        await worker.stop()

    asyncio.run(run())


def test_broken_sessions_leave_no_task_behind() -> None:
    async def run() -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        worker = await ScriptedWorker("prefill-0", WorkerRole.PREFILL).start()
        session = Recorder(worker.endpoint)
        session.start()
        for number in range(3):
            await until(lambda: session.is_up)
            await worker.stop()
            await until(lambda: len(session.reasons) == number + 1)  # noqa: B023  # it is called here
            await asyncio.sleep(0.2)  # for attempts that nobody answers
            await worker.start()
        await session.close()
        await worker.stop()
        gc.collect()  # "Task was destroyed but it is pending!"
        await asyncio.sleep(0)
        assert not complaints

    asyncio.run(run())


def test_cache_events_of_a_frame_count_in_order() -> None:
    dispatcher = Dispatcher({}, DispatchSettings(), time.monotonic)
    endpoint = WorkerEndpoint(worker_id="d", role=WorkerRole.DECODE, address="127.0.0.1:1", epoch=1)
    worker = RemoteWorker(endpoint, Cluster(dispatcher, RouterMetrics()))
    worker.session_opened(worker_pb2.Welcome(num_blocks=2))
    changes = [([b"a", b"b"], []), ([b"c", b"d"], [b"a", b"b"]), ([b"a"], [b"c"])]
    events = [worker_pb2.CacheEvents(stored=stored, evicted=evicted) for stored, evicted in changes]
    worker.frame_received(worker_pb2.StepFrame(cache=events))
    assert [each in worker.cached_blocks for each in (b"a", b"b", b"c", b"d")] == [True, False, False, True]


def test_a_frame_leaves_the_snapshot_of_what_it_reports() -> None:
    endpoint = WorkerEndpoint(worker_id="d", role=WorkerRole.DECODE, address="127.0.0.1:1", epoch=1)
    dispatcher = Dispatcher({WorkerRole.DECODE: COST}, DispatchSettings(), time.monotonic)
    worker = RemoteWorker(endpoint, Cluster(dispatcher, RouterMetrics()))
    worker.session_opened(worker_pb2.Welcome(num_blocks=2))
    load = worker_pb2.Load(num_running=3, num_context_tokens=50, decode_correction=2.0)
    worker.frame_received(worker_pb2.StepFrame(load=load))
    made = worker._snapshot
    assert (made.num_decoding, made.next_step_s) == (3, 2 * COST.decode_s(4, 50))
    assert worker.snapshot() is made


@pytest.mark.parametrize("source_host", ["10.0.0.1", "10.0.0.2"])
def test_pulls_that_ended_correct_the_predictions_of_others(source_host: str) -> None:
    dispatcher = Dispatcher({WorkerRole.DECODE: COST}, DispatchSettings(), time.monotonic)
    endpoint = WorkerEndpoint(worker_id="d", role=WorkerRole.DECODE, address="10.0.0.1:1", epoch=1)
    worker = RemoteWorker(endpoint, Cluster(dispatcher, RouterMetrics()))
    worker.session_opened(worker_pb2.Welcome(num_blocks=2))
    is_near = source_host == "10.0.0.1"
    seconds = 3 * COST.pull_s(1000, same_host=is_near)
    report = worker_pb2.TransferReport(
        transport="tcp", source=f"{source_host}:7", bytes=9, num_tokens=1000, seconds=seconds
    )
    failed = worker_pb2.TransferReport(source=f"{source_host}:7", num_tokens=1000, seconds=9.0, failure_stage="copy")
    for _ in range(3000):
        worker.frame_received(worker_pb2.StepFrame(transfers=[report, failed]))
    factors = [correction.factor for correction in dispatcher.placement.pull_corrections]
    assert factors[is_near] == pytest.approx(3, rel=0.01)
    assert factors[not is_near] == 1


def test_a_source_is_left_alone_from_which_a_prefix_could_not_be_pulled() -> None:
    dispatcher = Dispatcher({WorkerRole.DECODE: COST}, DispatchSettings(), lambda: 5.0)
    cluster = Cluster(dispatcher, RouterMetrics())
    for name in ("decode-0", "decode-1"):
        endpoint = WorkerEndpoint(worker_id=name, role=WorkerRole.DECODE, address="10.0.0.1:1", epoch=1)
        cluster.workers[name] = worker = RemoteWorker(endpoint, cluster)
        worker.session_opened(worker_pb2.Welcome(kv_address=f"{name}:7", max_batch_tokens=32))
    reports = [
        worker_pb2.TransferReport(source="decode-0:7", is_prefix=True, num_tokens=64, transport="memfd"),
        worker_pb2.TransferReport(source="decode-0:7", is_prefix=True, failure_stage="deadline"),
        worker_pb2.TransferReport(source="decode-1:7", is_prefix=True, failure_stage="aborted"),
        worker_pb2.TransferReport(source="gone:7", is_prefix=True, failure_stage="connect"),
    ]
    with patch.object(dispatcher.placement, "prefix_failed") as prefix_failed:
        worker.frame_received(worker_pb2.StepFrame(transfers=reports))
    prefix_failed.assert_called_once_with("decode-0", 5.0 + DispatchSettings().cut_off_s)
    saved_s = sample(cluster.metrics, "pdserve_prefix_saved_seconds_total", source="decode")
    assert saved_s == pytest.approx(COST.prompt_s(64, 0, 32))


def test_a_grammar_is_announced_once_in_a_session() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        session = Recorder(worker.endpoint)
        session.start()
        grammars = [Grammar(GrammarKind.REGEX, text) for text in ("a", "b")]
        for num_sessions in (1, 2):
            await until(lambda: session.is_up)
            for grammar in (*grammars, *grammars):
                session.announce(grammar)
            session.cancel(7, num_sessions)
            announced = [(await worker.next_command("announce")).announce.text for _ in grammars]
            assert announced == ["a", "b"]
            assert (await worker.next_command("cancel")).cancel.attempt == num_sessions
            if num_sessions == 1:
                await worker.stop()
                await until(lambda: not session.is_up)
                await worker.start()
        await session.close()
        await worker.stop()

    asyncio.run(run())


def test_certificates_that_cannot_be_read_end_one_attempt_only(caplog: pytest.LogCaptureFixture) -> None:
    gone = TlsFiles(ca="/absent/ca.pem", certificate="/absent/host.pem", key="/absent/host.key")

    async def run() -> None:
        session = Recorder(WorkerEndpoint(worker_id="d", role=WorkerRole.DECODE, address="[::1]:1", epoch=1), tls=gone)
        session.start()
        await until(lambda: "security.tls: cannot read /absent/ca.pem" in caplog.text)
        await asyncio.sleep(0.3)
        assert session._task is not None
        assert not session._task.done()
        await session.close()

    asyncio.run(run())


def test_a_break_is_told_once_and_the_next_epoch_is_higher() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        session = Recorder(worker.endpoint)
        session.start()
        await until(lambda: session.is_up)
        await worker.stop()
        await until(lambda: session.reasons)
        await asyncio.sleep(0.3)
        assert len(session.reasons) == 1
        await worker.start()
        await until(lambda: session.is_up)
        worker.end_stream()
        await until(lambda: len(worker.hellos) == 3)
        epochs = [hello.session_epoch for hello in worker.hellos]
        assert epochs == sorted(set(epochs))
        assert len({hello.router_id for hello in worker.hellos}) == 1
        await session.close()
        await worker.stop()

    asyncio.run(run())


def test_silence_breaks_a_session() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        session = Recorder(worker.endpoint)
        session.start()
        await until(lambda: session.is_up)
        worker.is_silent = True
        await until(lambda: session.reasons)
        assert "silent for 0.6 s" in session.reasons[0]
        worker.is_silent = False
        await until(lambda: len(session.opened) == 2)
        await session.close()
        await worker.stop()

    asyncio.run(run())


def test_a_second_welcome_breaks_a_session() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        session = Recorder(worker.endpoint)
        session.start()
        await until(lambda: session.is_up)
        worker.send_welcome()
        await until(lambda: session.reasons)
        assert session.reasons == ["unexpected message 'welcome'"]
        await session.close()
        await worker.stop()

    asyncio.run(run())


@pytest.mark.parametrize("wrong", [{"epoch": 10**6}, {"worker_id": "decode-1"}])
def test_another_worker_on_the_address_is_refused(wrong: dict[str, object]) -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        session = Recorder(replace(worker.endpoint, **wrong))  # type: ignore[arg-type]
        session.start()
        await until(lambda: len(worker.hellos) == 2)
        assert not session.opened
        assert not session.reasons
        await session.close()
        await worker.stop()

    asyncio.run(run())


def test_a_refusal_of_the_sink_closes_without_a_break() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        session = Recorder(worker.endpoint, refuse="another model")
        session.start()
        await until(lambda: len(worker.hellos) == 2)
        assert not session.is_up
        assert not session.reasons
        await session.close()
        await worker.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("token", "opens"), [("secret", True), ("", False), ("wrong", False)])
def test_router_and_worker_know_the_same_token(token: str, opens: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start(cluster_token="secret")
        session = Recorder(worker.endpoint, cluster_token=token)
        session.start()
        await asyncio.sleep(0.5)
        assert session.is_up is opens
        await session.close()
        await worker.stop()
        if token == "wrong":
            assert not worker.hellos  # a false worker learns nothing
            address = worker.endpoint.address
            assert f"session with decode-0 at {address}: {address} does not know the cluster token" in caplog.text

    asyncio.run(run())


class FailingRecorder(Recorder):
    """Subclass that raises when its session breaks."""

    def session_broken(self, reason: str) -> None:
        super().session_broken(reason)
        raise RuntimeError("boom")


def test_a_session_outlives_a_sink_that_fails() -> None:
    async def run() -> None:
        worker = await ScriptedWorker("decode-0", WorkerRole.DECODE).start()
        session = FailingRecorder(worker.endpoint)
        session.start()
        await until(lambda: session.is_up)
        worker.end_stream()
        await until(lambda: len(session.opened) == 2)
        await session.close()
        assert len(session.reasons) == 2
        await worker.stop()

    asyncio.run(run())


def test_a_step_counts_for_as_many_as_its_mean_answer_has_tokens() -> None:
    endpoint = WorkerEndpoint(worker_id="d", role=WorkerRole.DECODE, address="127.0.0.1:1", epoch=1)
    worker = RemoteWorker(endpoint, Cluster(Dispatcher({}, DispatchSettings(), time.monotonic), RouterMetrics()))
    worker.session_opened(worker_pb2.Welcome(num_blocks=2))
    for request_ids, num_steps in (([1, 2], 1.0), ([1, 1, 1, 2], 3.0), ([], 3.0)):
        zeros, none = [0] * len(request_ids), [worker_pb2.FINISH_REASON_NONE] * len(request_ids)
        tokens = worker_pb2.Tokens(request_id=request_ids, attempt=zeros, index=zeros, token=zeros, finish=none)
        worker.frame_received(worker_pb2.StepFrame(tokens=tokens))
        assert worker.num_steps == num_steps
