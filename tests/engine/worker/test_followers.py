"""Workers of several ranks as processes: same tokens for any degrees, and no rank outlives another."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from pdserve.contracts.precision import Precision
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.engine.worker import followers
from pdserve.engine.worker.followers import Direction, Followers, RanksIpcCopies
from pdserve.engine.worker.served_model import cores_of_rank
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.proto.v1 import transfer_pb2
from pdserve.proto.v1.kv_pb2 import RankPool
from tests.kv_transfer.peer import LAYOUT
from tests.patience import HANG_S
from tests.workers import WorkerProcess, hand_off, wait_until

if TYPE_CHECKING:
    from pdserve.kv_transfer.ipc_copies import IpcCopies

VOCAB_SIZE = 211

Degrees = tuple[int, int]
"""Tensor-parallel ranks, and pipeline stages."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        vocab_size=VOCAB_SIZE,
    )


def config(folder: Path, role: WorkerRole, degrees: Degrees, transport: str = "auto") -> WorkerConfig:
    return WorkerConfig(
        worker_id=f"{role.value}-0",
        role=role,
        model_path=str(folder),
        precision=Precision(dtype="float32", quantization="int8", kv_dtype="int8"),
        tensor_parallel=degrees[0],
        pipeline_parallel=degrees[1],
        max_model_len=256,
        num_kv_blocks=24 * degrees[1],
        max_batch_tokens=64,
        swap_memory_bytes=1 << 20,
        transport=transport,
        cluster_token="secret",
    )


def make_requests() -> list[GenerationRequest]:
    """More than the pool holds at once, so that some are preempted."""
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.1, seed=5, top_p=0.9, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.2, max_tokens=40, ignore_eos=True),
    ]
    return [
        GenerationRequest(
            request_id=n,
            prompt_tokens=tuple((13 * position + 7 * n) % VOCAB_SIZE for position in range(20 + 17 * n)),
            sampling=sampling[n % 3],
        )
        for n in range(6)
    ]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    with WorkerProcess(config(checkpoint, WorkerRole.MIXED, (1, 1))) as worker, worker.connect() as router:
        for request in make_requests():
            router.submit(request)
        return [router.wait_for_answer(request.request_id) for request in make_requests()]


@pytest.mark.parametrize(
    ("prefill_degrees", "decode_degrees", "transport"),
    [((2, 1), (1, 2), "memfd"), ((1, 2), (2, 1), "tcp"), ((2, 2), (1, 1), "memfd")],
)
def test_any_degree_hands_off_to_any_other(
    checkpoint: Path, expected: list[list[int]], prefill_degrees: Degrees, decode_degrees: Degrees, transport: str
) -> None:
    with (
        WorkerProcess(config(checkpoint, WorkerRole.PREFILL, prefill_degrees, transport)) as prefill_worker,
        WorkerProcess(config(checkpoint, WorkerRole.DECODE, decode_degrees, transport)) as decode_worker,
        ExitStack() as stack,
    ):
        prefills, decodes = (
            [stack.enter_context(worker.connect(micro_batch=index)) for index in range(len(worker.endpoints))]
            for worker in (prefill_worker, decode_worker)
        )
        turns = zip(cycle(prefills), cycle(decodes), make_requests(), strict=False)
        assert [hand_off(prefill, decode, request) for prefill, decode, request in turns] == expected
        for router in prefills + decodes:
            router.wait_until_free()


@pytest.mark.parametrize(("number", "degrees"), [(signal.SIGKILL, (1, 2)), (signal.SIGSTOP, (2, 1))])
def test_a_worker_ends_with_any_of_its_ranks(
    checkpoint: Path, expected: list[list[int]], number: signal.Signals, degrees: Degrees
) -> None:
    with WorkerProcess(config(checkpoint, WorkerRole.MIXED, degrees)) as worker, worker.connect() as router:
        for request in make_requests():
            router.submit(request)
        assert router.wait_for_answer(0) == expected[0]
        (follower,) = followers_of(worker)
        children = worker.children()
        os.kill(follower, number)
        assert worker.process.wait(HANG_S) == 1
        wait_until_ended(children)


def test_ranks_end_with_their_leader(checkpoint: Path) -> None:
    with WorkerProcess(config(checkpoint, WorkerRole.MIXED, (2, 1))) as worker:
        children = worker.children()
        worker.process.kill()
        wait_until_ended(children)


UNREADY_RANK = """
import threading
from pdserve.engine.worker import follower

def fail(*arguments):
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("no weights")

follower.build_follower = fail
follower.main()
"""
"""Fails while another of its threads waits."""


@contextmanager
def started(command: list[str], losses: queue.Queue[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Followers]:
    """One follower whose process runs ``command``."""
    popen = subprocess.Popen

    def start(default: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen(command + default[3:], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(followers, "STOP_TIMEOUT_S", 0.0)
    with closing(PoolMemory.create(LAYOUT)) as memory:
        worker = config(Path(), WorkerRole.MIXED, (2, 1))
        with closing(Followers(worker, memory, os.memfd_create("ranks"), losses.put)) as ranks:
            yield ranks


def test_a_rank_that_fails_before_it_is_ready_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        started([sys.executable, "-c", UNREADY_RANK], queue.Queue(), monkeypatch) as ranks,
        pytest.raises(RuntimeError, match="rank 1 ended before it was up"),
    ):
        ranks.wait_until_ready()


def test_a_rank_that_is_silent_before_it_is_ready_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(followers, "START_SILENCE_S", 0.2)
    monkeypatch.setattr(followers, "SILENCE_S", 0.1)
    with started(["sh", "-c", "sleep 600"], losses, monkeypatch):
        assert losses.get(timeout=HANG_S) == "rank 1 is silent for 0.2 s"


def test_a_rank_that_does_not_end_a_copy_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(followers, "COPY_TIMEOUT_S", 0.1)
    with started(["sh", "-c", "sleep 600"], losses, monkeypatch) as ranks:
        with pytest.raises(TimeoutError), ranks.copying(Direction.H2D, b""):
            pass
        assert losses.get(timeout=HANG_S) == "rank 1 does not end a copy within 0.1 s"


ANSWERING_RANK = """
import socket, sys
from pdserve.proto.framing import encode_frame, receive_frame
with socket.socket(fileno=int(sys.argv[6])) as leader:
    while receive_frame(leader):
        leader.sendall(encode_frame(b"copiedno way"))
"""
"""Cannot copy from another worker."""


class Unhindered:
    """The leader's copies, which succeed."""

    shards, generations = (), ()
    pool = RankPool()

    def carry_out(self, order: transfer_pb2.CopyOrder) -> str:
        return ""


def test_a_copy_that_one_rank_cannot_make_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[transfer_pb2.EngineToTransfer] = []
    with started([sys.executable, "-c", ANSWERING_RANK], queue.Queue(), monkeypatch) as ranks:
        copies = RanksIpcCopies(cast("IpcCopies", Unhindered()), ranks)
        copies.start(sent.append)
        copies.handle(transfer_pb2.CopyOrder(copy_id=3, rank_pools=[RankPool()]))
        copies.handle(transfer_pb2.CopyOrder(copy_id=4))
    assert [message.copied for message in sent[1:]] == [transfer_pb2.Copied(copy_id=3, failure="no way")]


def test_cores_are_shared_out() -> None:
    config = WorkerConfig(worker_id="w", role=WorkerRole.MIXED, model_path="", cpu_cores=(4, 5, 6, 7, 9))
    assert [cores_of_rank(replace(config, tensor_parallel=2), rank) for rank in range(2)] == [(4, 5), (6, 7, 9)]
    fewer = replace(config, cpu_cores=(4, 5), tensor_parallel=3)
    assert [cores_of_rank(fewer, rank) for rank in range(3)] == [(4, 5)] * 3


def followers_of(worker: WorkerProcess, module: str = "pdserve.engine.worker.follower") -> list[int]:
    return [pid for pid in worker.children() if module in psutil.Process(pid).cmdline()]


def wait_until_ended(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), f"the end of {pids}")


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
