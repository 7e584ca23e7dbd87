"""The worker's gRPC service over a real channel. The test plays the step loop."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future

import grpc
import pytest

from pdserve.contracts.events import ClientEvent, RequestEvent, RequestEventKind, RequestKey, SchedulerLoad, TokenEvent
from pdserve.contracts.request import (
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    KvSource,
    SamplingParams,
)
from pdserve.contracts.step import ModelLimits, StepOutput
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.engine.scheduling.interface import FirstToken, PullResult
from pdserve.engine.worker import service as service_module
from pdserve.engine.worker.live_loop import Inbox
from pdserve.engine.worker.loop import Step, StepReport
from pdserve.engine.worker.messages import AddRequest, CancelRequest, Message, SessionEnded
from pdserve.engine.worker.service import MAX_UNPROVEN_SESSIONS, WorkerService
from pdserve.engine.worker.sessions import Session
from pdserve.engine.worker.step_times import Prediction
from pdserve.kv_transfer.block_pool import CacheEvents
from pdserve.proto.codec import request_to_proto
from pdserve.proto.token_proof import ClientProof
from pdserve.proto.v1 import worker_pb2
from pdserve.proto.v1.worker_pb2_grpc import WorkerStub
from tests.workers import RouterClient, wait_until

LIMITS = ModelLimits(max_model_len=256, vocab_size=512, eos_token_ids=(2,))
NO_HANDLE: Future[StepOutput] = Future()


class LoopSide:
    """The service under test with the inbox that it fills."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.is_healthy = True
        config = WorkerConfig(
            worker_id="decode-0",
            role=WorkerRole.DECODE,
            model_path="",
            cluster_token="secret",
        )
        welcome = worker_pb2.Welcome(worker_id="decode-0", worker_epoch=7, max_model_len=256, kv_address="127.0.0.1:1")
        self.announced: list[Grammar] = []
        self.service = WorkerService(
            config,
            LIMITS,
            welcome,
            self.inbox,
            is_healthy=lambda: self.is_healthy,
            announce=self.announced.append,
        )
        self.address = self.service.start()
        self.received: list[Message] = []

    def next_message(self) -> Message:
        wait_until(lambda: self._pull(), "a message in the inbox")
        return self.received.pop(0)

    def next_key(self) -> RequestKey:
        message = self.next_message()
        assert isinstance(message, AddRequest)
        return message.key

    def publish(self, *events: ClientEvent, step_s: float = 0.0) -> None:
        step = Step(1, 1, None, NO_HANDLE) if step_s else None
        load = SchedulerLoad(num_running=3)
        self.service.publish(StepReport(load=load, step=step, step_s=step_s, events=list(events)))

    def _pull(self) -> bool:
        self.received += self.inbox.take_all(0.01) or []
        return bool(self.received)


@pytest.fixture
def loop_side() -> Iterator[LoopSide]:
    side = LoopSide()
    yield side
    side.service.stop()


def a_request(request_id: int = 1, **fields: object) -> GenerationRequest:
    values: dict[str, object] = {"prompt_tokens": (1, 2, 3), "sampling": SamplingParams(max_tokens=8), **fields}
    return GenerationRequest(request_id=request_id, **values)  # type: ignore[arg-type]


def a_token(key: RequestKey, index: int = 0) -> TokenEvent:
    return TokenEvent(key, 0, index, 42, None, FinishReason.NONE)


def test_welcome_then_commands_then_frames(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        began_s = time.monotonic()
        request = a_request(9, attempt=2, cache_salt=b"tenant", handoff=True)
        source = KvSource(address="127.0.0.1:5", worker_epoch=3, handle=bytes(16))
        router.submit(request)
        router.prepare(request, source)
        router.cancel(9, 2)

        added = loop_side.next_message()
        assert isinstance(added, AddRequest)
        key = added.key
        assert (key.request_id, key.attempt) == (9, 2)
        assert added.request == request
        prepared = loop_side.next_message()
        assert isinstance(prepared, AddRequest)
        assert prepared == AddRequest(key, request, prepared.received_s, source)
        assert began_s <= added.received_s <= prepared.received_s <= time.monotonic()
        assert loop_side.next_message() == CancelRequest(key)

        loop_side.publish(
            RequestEvent(key=key, kind=RequestEventKind.LAST_CHUNK, handle=bytes(range(16))), a_token(key)
        )
        assert router.wait_for_tokens(9, 1) == [42]
        assert router.welcome.worker_epoch == 7
        assert router.wait_for_source(9) == KvSource(address="127.0.0.1:1", worker_epoch=7, handle=bytes(range(16)))
        assert router.load.num_running == 3


def test_events_reach_only_their_session_and_steps_reach_all(loop_side: LoopSide) -> None:
    with (
        RouterClient(loop_side.address, token="secret") as one,
        RouterClient(loop_side.address, token="secret") as other,
    ):
        other.wait_for(lambda: bool(other.frames), "the first frame")
        one.submit(a_request(1))
        key = loop_side.next_key()
        loop_side.publish(a_token(key), step_s=0.125)
        one.wait_for_tokens(1, 1)
        other.wait_for(
            lambda: any(step.seconds == 0.125 for frame in other.frames for step in frame.steps), "the step's load"
        )
        assert not other.tokens


def test_a_router_without_requests_gets_few_frames_and_misses_nothing(loop_side: LoopSide) -> None:
    """Steps of 2 ms, each of which stores a block, evicts one and stores one evicted before."""
    num_steps = 300
    blocks = [index.to_bytes(16, "little") for index in range(num_steps + 1)]
    with (
        RouterClient(loop_side.address, token="secret") as owner,
        RouterClient(loop_side.address, token="secret") as idle,
    ):
        idle.wait_for(lambda: bool(idle.frames), "the first frame")
        owner.submit(a_request(1))
        key = loop_side.next_key()
        began_s, num_before = time.monotonic(), len(idle.frames)
        for index in range(num_steps):
            report = StepReport(
                load=SchedulerLoad(num_running=index, draining=index == num_steps - 1),
                step=Step(index, 1, None, NO_HANDLE),
                step_s=float(index),
                pulls=[PullResult(pull_id=index, num_bytes=index)],
                events=[a_token(key, index)],
                cache=CacheEvents([blocks[index + index % 2]], [blocks[index + 1 - index % 2]]),
            )
            loop_side.service.publish(report)
            time.sleep(0.002)
        idle.wait_for(lambda: idle.load.draining, "the last load", service_module.NEWS_INTERVAL_S + 0.2)
        num_frames, seconds = len(idle.frames) - num_before, time.monotonic() - began_s
        assert num_frames <= seconds / service_module.NEWS_INTERVAL_S + 1
        assert not idle.tokens
        assert owner.wait_for_tokens(1, num_steps)
        assert [token.index for token in owner.tokens[1]] == list(range(num_steps))
        with RouterClient(loop_side.address, token="secret") as late:
            late.wait_for(lambda: bool(late.frames), "the first frame")
            for router in (owner, idle):
                assert router.load == late.load
                assert cached_blocks(router) == cached_blocks(late)
        for router in (owner, idle):
            assert [step.seconds for frame in router.frames for step in frame.steps] == list(
                map(float, range(num_steps))
            )
            assert [pull.bytes for frame in router.frames for pull in frame.transfers] == list(range(num_steps))


def cached_blocks(router: RouterClient) -> set[bytes]:
    """The prefix cache of the worker in the view of a router."""
    blocks: set[bytes] = set()
    for events in (events for frame in router.frames for events in frame.cache):
        blocks = (set() if events.cleared else blocks).union(events.stored).difference(events.evicted)
    return blocks


@pytest.mark.parametrize("change", [SchedulerLoad(draining=True), SchedulerLoad(num_parked=2)])
def test_what_changes_without_a_step_is_told_to_all(loop_side: LoopSide, change: SchedulerLoad) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        router.wait_for(lambda: bool(router.frames), "the first frame")
        loop_side.service.publish(StepReport())
        router.wait_for(lambda: router.load.decode_correction == 1, "the first load")
        loop_side.service.publish(StepReport(load=change))
        router.wait_for(
            lambda: router.load.draining or router.load.num_parked == 2,
            "the change",
            service_module.NEWS_INTERVAL_S + 0.1,
        )


def test_a_frame_carries_the_load_the_step_and_the_pulls_of_its_report(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        router.wait_for(lambda: bool(router.frames), "the first frame")
        report = StepReport(
            load=SchedulerLoad(num_waiting=4, prefill_correction=1.5, decode_correction=0.75, draining=True),
            pulls=[
                PullResult(pull_id=1, transport="memfd", seconds=0.5, num_bytes=99, failure_stage="copy"),
                PullResult(pull_id=2, first_token=FirstToken(7, FinishReason.STOP)),
                PullResult(pull_id=3, first_token=FirstToken(7)),
            ],
            step=Step(1, 7, Prediction(True, 0.125, True, 7), NO_HANDLE),
            step_s=0.25,
        )
        loop_side.service.publish(report)
        router.wait_for(lambda: len(router.frames) > 1, "the report")
        frame = router.frames[1]
        assert frame.load == worker_pb2.Load(
            num_waiting=4, prefill_correction=1.5, decode_correction=0.75, draining=True
        )
        assert list(frame.steps) == [worker_pb2.Step(seconds=0.25, num_tokens=7, predicted_s=0.125, has_prefill=True)]
        assert list(frame.transfers) == [
            worker_pb2.TransferReport(transport="memfd", seconds=0.5, bytes=99, failure_stage="copy"),
            worker_pb2.TransferReport(ended_request=True),
            worker_pb2.TransferReport(),
        ]
        router.wait_for(lambda: len(router.frames) > 2, "a heartbeat")
        assert router.frames[2] == worker_pb2.StepFrame(load=frame.load)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt_tokens": (1, 600)}, "vocabulary"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(stop_token_ids=(512,))}, "stop_token_ids"),
        ({"emitted_tokens": (1,) * 8}, "already emitted"),
    ],
)
def test_a_bad_request_is_rejected_and_the_session_goes_on(
    loop_side: LoopSide, fields: dict[str, object], complaint: str
) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        router.submit(a_request(1, **fields))
        router.submit(a_request(2))
        rejected = router.wait_for_event(1, worker_pb2.RequestEvent.REJECTED)
        assert complaint in rejected.message
        assert rejected.refusal == worker_pb2.REFUSAL_CODE_INVALID
        assert loop_side.next_key().request_id == 2


def test_a_bad_source_is_rejected(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        router.prepare(a_request(1), KvSource(address="127.0.0.1:5", worker_epoch=3, handle=b"short"))
        assert "handle" in router.wait_for_event(1, worker_pb2.RequestEvent.REJECTED).message


def test_announced_grammars_are_compiled_and_odd_ones_forgotten(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        odd, regex = worker_pb2.Grammar(text="a"), worker_pb2.Grammar(kind=worker_pb2.Grammar.REGEX, text="a+")
        for grammar in (odd, regex):
            router.send(worker_pb2.RouterMessage(announce=grammar))
        router.submit(a_request())
        loop_side.next_key()
        assert loop_side.announced == [Grammar(GrammarKind.REGEX, "a+")]


def test_a_session_starts_with_a_hello_and_has_one(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        router.send(worker_pb2.RouterMessage(hello=worker_pb2.Hello(router_id="again", session_epoch=2)))
        router.wait_for(lambda: router.error is grpc.StatusCode.ABORTED, "the stream's end")
    assert isinstance(loop_side.next_message(), SessionEnded)
    with RouterClient(loop_side.address, token="secret", router_id="x" * 129) as router:
        router.wait_for(lambda: router.error is grpc.StatusCode.INVALID_ARGUMENT, "a refusal")


def test_a_broken_session_ends(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        router.submit(a_request(1))
        key = loop_side.next_key()
    assert loop_side.next_message() == SessionEnded(key.session)


def test_a_newer_epoch_ends_the_older_session_at_once_and_an_older_one_is_refused(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret", router_id="r", epoch=5) as old:
        old.submit(a_request(1))
        key = loop_side.next_key()
        with RouterClient(loop_side.address, token="secret", router_id="r", epoch=6) as new:
            assert loop_side.next_message() == SessionEnded(key.session)
            old.wait_for(lambda: old.error is grpc.StatusCode.ABORTED, "the old stream's end")
            with RouterClient(loop_side.address, token="secret", router_id="r", epoch=5) as late:
                late.wait_for(lambda: late.error is grpc.StatusCode.FAILED_PRECONDITION, "a refusal")
            new.submit(a_request(2))
            assert loop_side.next_key().session != key.session


def test_nothing_comes_from_a_session_after_its_end(loop_side: LoopSide) -> None:
    """A command still on its way would start a request that nobody reads and nobody cancels."""
    session = Session(7, "router", 1)

    async def commands() -> AsyncIterator[worker_pb2.RouterMessage]:
        for request_id in (1, 2):
            yield worker_pb2.RouterMessage(submit=worker_pb2.Submit(request=request_to_proto(a_request(request_id))))
            session.close("the router opened a newer session")

    asyncio.run(loop_side.service._read(session, commands()))
    assert loop_side.next_key() == RequestKey(7, 1, 0)
    assert not loop_side.received


def test_a_stalled_router_loses_its_session_and_delays_no_other(loop_side: LoopSide) -> None:
    stalled = RouterClient(loop_side.address, token="secret", is_reading=False)
    with RouterClient(loop_side.address, token="secret") as router:
        stalled.submit(a_request(1))
        stalled_key = loop_side.next_key()
        router.submit(a_request(2))
        key = loop_side.next_key()
        batch = [a_token(stalled_key)] * 4000
        ended: list[Message] = []
        for index in range(2000):
            loop_side.publish(*batch, a_token(key, index))
            router.wait_for_tokens(2, index + 1)
            ended += loop_side.inbox.take_all(0) or []
            if ended:
                break
        assert ended == [SessionEnded(stalled_key.session)]
    stalled.close()


def test_heartbeats_come_while_the_loop_is_healthy(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        router.wait_for(lambda: len(router.frames) >= 3, "two heartbeats after the first frame")
        loop_side.is_healthy = False
        time.sleep(0.1)
        count = len(router.frames)
        time.sleep(0.7)
        assert len(router.frames) == count


def test_a_full_inbox_rejects_requests_but_takes_cancels(loop_side: LoopSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.engine.worker.live_loop.MAX_WAITING_MESSAGES", 0)
    with RouterClient(loop_side.address, token="secret") as router:
        router.submit(a_request(1))
        rejected = router.wait_for_event(1, worker_pb2.RequestEvent.REJECTED)
        assert rejected.refusal == worker_pb2.REFUSAL_CODE_OVERLOADED
        router.cancel(1)
        assert isinstance(loop_side.next_message(), CancelRequest)


def test_a_report_that_cannot_be_packed_is_the_end(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret") as router:
        router.submit(a_request(1))
        loop_side.publish(TokenEvent(loop_side.next_key(), 0, 0, -1, None, FinishReason.NONE))
        with pytest.raises(RuntimeError, match="gRPC service died"):
            loop_side.next_message()


def test_a_loop_that_outruns_the_service_waits_for_it(loop_side: LoopSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "STALL_LIMIT_S", 0.2)
    is_open = threading.Event()
    with RouterClient(loop_side.address, token="secret") as router:
        router.submit(a_request(1))
        key = loop_side.next_key()
        event_loop = loop_side.service._loop
        assert event_loop is not None
        event_loop.call_soon_threadsafe(is_open.wait)
        for index in range(service_module.MAX_WAITING_REPORTS):
            loop_side.publish(a_token(key, index))
        with pytest.raises(RuntimeError, match="takes no reports"):
            loop_side.publish()
        is_open.set()
        for index in range(service_module.MAX_WAITING_REPORTS, 4 * service_module.MAX_WAITING_REPORTS):
            loop_side.publish(a_token(key, index))
        router.wait_for_tokens(1, 4 * service_module.MAX_WAITING_REPORTS)
        assert [token.index for token in router.tokens[1]] == list(range(4 * service_module.MAX_WAITING_REPORTS))


def test_stop_ends_the_thread() -> None:
    side = LoopSide()
    with RouterClient(side.address, token="secret") as router:
        router.wait_for(lambda: bool(router.frames), "the first frame")
        side.service.stop()
        router.wait_for(lambda: router.error is not None, "the stream's end")
    assert not [thread for thread in threading.enumerate() if thread.name == "worker-service"]


@pytest.mark.parametrize("token", ["", "guess"])
def test_a_bad_cluster_token_is_refused(loop_side: LoopSide, token: str) -> None:
    with RouterClient(loop_side.address, token=token) as router:
        router.wait_for(lambda: router.error is grpc.StatusCode.UNAUTHENTICATED, "a refusal")


def test_strangers_that_wait_keep_no_router_out(loop_side: LoopSide) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(loop_side.address) as channel:
            strangers = [WorkerStub(channel).Session(None) for _ in range(MAX_UNPROVEN_SESSIONS)]
            await asyncio.gather(*(stranger.initial_metadata() for stranger in strangers))
            await asyncio.to_thread(open_and_close)
            ends = [asyncio.ensure_future(stranger.details()) for stranger in strangers]
            ended, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert ended.pop().result() == "no proof of the cluster token came before newer calls took its place"

    def open_and_close() -> None:
        with RouterClient(loop_side.address, token="secret") as router:
            router.wait_for(lambda: bool(router.frames), "the first frame")

    asyncio.run(run())


def test_a_late_session_is_told_of_the_whole_prefix_cache(loop_side: LoopSide) -> None:
    with RouterClient(loop_side.address, token="secret") as early:
        early.wait_for(lambda: bool(early.frames), "the first frame")
        loop_side.service.publish(StepReport(load=SchedulerLoad(), cache=CacheEvents([b"a", b"b"], [])))
        loop_side.service.publish(StepReport(load=SchedulerLoad(), cache=CacheEvents([b"c"], [b"a"])))
        early.wait_for(
            lambda: any(b"c" in events.stored for frame in early.frames for events in frame.cache), "the cache events"
        )
        with RouterClient(loop_side.address, token="secret") as late:
            late.wait_for(lambda: bool(late.frames), "the first frame")
            assert list(late.frames[0].cache) == [worker_pb2.CacheEvents(cleared=True, stored=[b"b", b"c"])]


def test_a_late_session_is_told_of_a_large_prefix_cache_in_pieces_parents_first(
    loop_side: LoopSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "HASHES_PER_FRAME", 100)
    monkeypatch.setattr(service_module, "MAX_SNAPSHOT_HASHES", 250)
    chain = [index.to_bytes(16, "little") for index in range(301)]
    with RouterClient(loop_side.address, token="secret") as early:
        early.wait_for(lambda: bool(early.frames), "the first frame")
        for start in range(0, 301, 43):
            stored = chain[start : start + 43]
            loop_side.service.publish(StepReport(load=SchedulerLoad(), cache=CacheEvents(stored, [])))
        loop_side.service.publish(StepReport(load=SchedulerLoad(), cache=CacheEvents([], [chain[-1], b"unknown"])))
        early.wait_for(
            lambda: any(chain[-1] in events.evicted for frame in early.frames for events in frame.cache),
            "the cache events",
        )
        with RouterClient(loop_side.address, token="secret") as late:
            late.wait_for(lambda: len(late.frames) >= 3, "the snapshot")
            pieces = [events for frame in late.frames[:3] for events in frame.cache]
            assert [piece.cleared for piece in pieces] == [True, False, False]
            assert [block_hash for piece in pieces for block_hash in piece.stored] == chain[:250]


class Cable:
    """TCP proxy in front of the service that can be cut: bytes stop, and neither side is notified."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = (host, int(port))
        self._is_cut = threading.Event()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def cut(self) -> None:
        self._is_cut.set()
        self._thread.join()

    def close(self) -> None:
        self.cut()
        for end in (self._listener, *self._ends):
            end.close()

    def _carry(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._ends = (near, far)
        other = {near: far, far: near}
        while not self._is_cut.is_set():
            readable, _, _ = select.select(self._ends, [], [], 0.02)
            for end in readable:
                other[end].sendall(end.recv(1 << 16))


def test_a_cut_cable_ends_the_session(loop_side: LoopSide) -> None:
    cable = Cable(loop_side.address)
    with RouterClient(cable.address, token="secret", server_address=loop_side.address) as router:
        router.submit(a_request(1))
        key = loop_side.next_key()
        cable.cut()
        assert loop_side.next_message() == SessionEnded(key.session)
        cable.close()


def test_a_call_that_is_cancelled_while_its_parts_end_ends_its_session(loop_side: LoopSide) -> None:
    """A router closes its half and cancels the call right after."""
    is_ending = asyncio.Event()
    ours = ClientProof("secret", loop_side.address)
    proofs: asyncio.Queue[bytes] = asyncio.Queue()

    class SlowToEnd:
        def invocation_metadata(self) -> tuple[tuple[str, bytes], ...]:
            return ours.metadata

        async def send_initial_metadata(self, metadata: tuple[tuple[str, bytes], ...]) -> None:
            proofs.put_nowait(ours.check(dict(metadata)))

        async def write(self, message: bytes) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                is_ending.set()
                await asyncio.Event().wait()

    async def hello_alone() -> AsyncIterator[worker_pb2.RouterMessage]:
        hello = worker_pb2.Hello(router_id="r", session_epoch=1, proof=await proofs.get())
        yield worker_pb2.RouterMessage(hello=hello)

    async def cancel_late() -> None:
        call = asyncio.create_task(loop_side.service._session(hello_alone(), SlowToEnd()))  # type: ignore[arg-type]
        await is_ending.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancel_late())
    assert loop_side.next_message() == SessionEnded(1)
