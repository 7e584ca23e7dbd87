"""Life of a transfer process, as its engine sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from pdserve.kv_transfer import transfer_client
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.proto.v1 import transfer_pb2
from tests.kv_transfer.peer import LAYOUT, Peer, running_peer
from tests.patience import HANG_S

ENGINE = """
import time
from tests.kv_transfer.peer import LAYOUT, Peer
peer = Peer(LAYOUT, "auto", 0, "")
print(peer.process.pid, flush=True)
time.sleep(600)
"""


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until_dead(pid: int) -> None:
    deadline_s = time.monotonic() + HANG_S
    while _is_alive(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_close_leaves_nothing() -> None:
    fds_before = set(os.listdir("/proc/self/fd"))
    with running_peer() as peer:
        pid = peer.process.pid
        assert _is_alive(pid)
    assert not psutil.pid_exists(pid)
    assert peer.messages.empty()
    peer.process.close()
    del peer
    assert set(os.listdir("/proc/self/fd")) <= fds_before  # fewer, if a channel of an earlier test closes meanwhile
    assert "kv-transfer-reader" not in {thread.name for thread in threading.enumerate()}


def test_death_is_told_once() -> None:
    with running_peer() as peer:
        os.kill(peer.process.pid, signal.SIGKILL)
        peer.expect_death()
        peer.process.send(transfer_pb2.EngineToTransfer(offer=transfer_pb2.Offer(handle=b"lost")))
    assert peer.messages.empty()


def test_torch_is_not_imported() -> None:
    code = "import sys, pdserve.kv_transfer.transfer_process as _; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_outlives_the_thread_that_asked_for_it() -> None:
    peers: list[Peer] = []
    thread = threading.Thread(target=lambda: peers.append(Peer(LAYOUT, "auto", 0, "")))
    thread.start()
    thread.join()
    (peer,) = peers
    time.sleep(0.2)
    assert _is_alive(peer.process.pid)
    assert peer.messages.empty()
    peer.process.close()
    peer.memory.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_it_dies_with_its_engine(is_stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        if is_stopped:  # it cannot read the end of its pipe: the kernel must kill it
            os.kill(pid, signal.SIGSTOP)
        engine.kill()
        _wait_until_dead(pid)


def test_it_leaves_when_its_pipe_closes() -> None:
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "pdserve.kv_transfer.transfer_process", str(ours), "0"]
    with subprocess.Popen(command, pass_fds=(ours,), stderr=subprocess.PIPE) as process:
        os.close(ours)
        os.close(theirs)
        assert process.wait(HANG_S) is not None


def test_ctrl_c_is_left_to_the_engine() -> None:
    with running_peer() as peer:
        os.kill(peer.process.pid, signal.SIGINT)
        time.sleep(0.2)
        assert _is_alive(peer.process.pid)


def test_one_that_does_not_read_is_killed() -> None:
    with running_peer() as peer:
        os.kill(peer.process.pid, signal.SIGSTOP)
        message = transfer_pb2.EngineToTransfer(offer=transfer_pb2.Offer(handle=bytes(10_000)))
        deadline_s = time.monotonic() + HANG_S
        while peer.messages.empty():
            assert time.monotonic() < deadline_s
            peer.process.send(message)
        peer.expect_death()


def test_one_that_hangs_is_killed() -> None:
    with running_peer() as peer:
        os.kill(peer.process.pid, signal.SIGSTOP)
        peer.expect_death()


def test_close_kills_one_that_does_not_react(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_client, "STOP_TIMEOUT_S", 0.1)
    with running_peer() as peer:
        pid = peer.process.pid
        os.kill(pid, signal.SIGSTOP)
        closing = threading.Thread(target=peer.process.close, daemon=True)
        closing.start()
        closing.join(HANG_S)
        is_closed = not closing.is_alive()
        if not is_closed:
            os.kill(pid, signal.SIGKILL)
    assert is_closed
    assert not psutil.pid_exists(pid)


def test_a_process_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    memory = PoolMemory.create(LAYOUT)
    with pytest.raises(RuntimeError, match="did not start"):
        TransferProcess.start(
            memory=memory,
            worker_epoch=1,
            host="127.0.0.1",
            cluster_token="",
            transport="auto",
            cpu_cores=(),
            on_message=lambda message: None,
            on_death=lambda: pytest.fail("it never lived"),
        )
    memory.close()


def test_it_runs_on_its_cores() -> None:
    core = min(os.sched_getaffinity(0))
    memory = PoolMemory.create(LAYOUT)
    process = TransferProcess.start(
        memory=memory,
        worker_epoch=1,
        host="127.0.0.1",
        cluster_token="",
        transport="auto",
        cpu_cores=(core,),
        on_message=lambda message: None,
        on_death=lambda: None,
    )
    assert os.sched_getaffinity(process.pid) == {core}
    process.close()
    memory.close()
