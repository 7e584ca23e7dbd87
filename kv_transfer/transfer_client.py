"""The engine's handle on its transfer process, and the messages on the pipe between them.

The first frame on the pipe is a `TransferConfig` as JSON. It is not on the command line, where every user of the
host could read the cluster token. After it, messages of `transfer.proto` go both ways.

The step loop sends. One reader thread receives; its callbacks must only enqueue. A transfer process that hangs is
killed. A dead one is not restarted here: the worker ends with it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.contracts.codec import to_json
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.worker_config import TlsFiles
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard
from pdserve.proto.framing import encode_frame, receive_frame
from pdserve.proto.v1.transfer_pb2 import EngineToTransfer, Shutdown, TransferToEngine

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 2.0
SEND_TIMEOUT_S = 1
"""A transfer process that does not empty its pipe within this time is killed."""
ALIVE_INTERVAL_S = 0.5
SILENCE_S = 2.5
"""A transfer process that sends nothing for this long hangs and is killed: it would keep its blocks for ever."""

_MODULE = "pdserve.kv_transfer.transfer_process"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    layout: KvLayout
    worker_epoch: int
    """Incarnation of the worker. Pulls of any other are refused."""
    host: str
    """Address to listen on, reachable by peers."""
    cluster_token: str
    transport: str
    """``auto``, or one of `TRANSPORTS`."""
    cpu_cores: tuple[int, ...]
    """Cores to run on; empty leaves the affinity alone."""
    parent_pid: int
    """Process id of the engine, with which the transfer process dies."""
    tls: TlsFiles | None = None
    """Encrypts pulls over the network; memfd copies bytes within a host all the same."""
    ports: tuple[int, int] = (0, 0)
    """First and last port to listen on; (0, 0) takes any."""
    device: str = ""
    """How other devices reach the pool, ``cuda_ipc`` or as `pdserve.kv_transfer.group_copies.device_id` names its own;
    empty for a pool that the process maps itself, or whose granted blocks are in the staging file."""
    shards: tuple[tuple[int, int, int, int], ...] = ()
    """Part of every block that each rank of a pool with a device holds: first and end head, first and end layer."""


class TransferProcess:
    """A running transfer process. Created by `start`."""

    def __init__(
        self, memory_fd: int, on_message: Callable[[TransferToEngine], None], on_death: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._pipe, self._child_pipe = socket.socketpair()
        self._pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self._send_lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, args=(memory_fd,), name="kv-transfer-reader", daemon=True)
        self._started = threading.Event()
        """Set once the process serves, or never will."""
        self._is_closing = False
        self.address = ""
        """``host:port`` where pulls are served."""

    @classmethod
    def start(
        cls,
        *,
        memory: PoolMemory,
        worker_epoch: int,
        host: str,
        cluster_token: str,
        transport: str,
        cpu_cores: tuple[int, ...],
        on_message: Callable[[TransferToEngine], None],
        on_death: Callable[[], None],
        tls: TlsFiles | None = None,
        ports: tuple[int, int] = (0, 0),
        device: str = "",
        shards: Sequence[KvShard] = (),
    ) -> TransferProcess:
        """Start the process and wait until it serves.

        Args:
            memory: the engine's pool.
            on_message: called on the reader thread with every message except `Ready` and `Alive`; must only enqueue.
            on_death: called once, on the reader thread, if the process ends without `close`.

        Raises:
            RuntimeError: it does not serve within `START_TIMEOUT_S`.
        """
        config = TransferConfig(
            layout=memory.layout,
            worker_epoch=worker_epoch,
            host=host,
            cluster_token=cluster_token,
            transport=transport,
            cpu_cores=cpu_cores,
            parent_pid=os.getpid(),
            tls=tls,
            ports=ports,
            device=device,
            shards=tuple((heads.start, heads.stop, layers.start, layers.stop) for heads, layers in shards),
        )
        process = cls(memory.fd, on_message, on_death)
        process._pipe.sendall(encode_frame(to_json(config).encode()))
        process._thread.start()
        process._started.wait(START_TIMEOUT_S)
        if not process.address:
            process.close()
            raise RuntimeError("the KV transfer process did not start; its log has the reason")
        return process

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, message: EngineToTransfer) -> None:
        """Send a message, from any thread. If the process is dead the message is lost, and ``on_death`` follows.

        Blocks while the pipe is full, for at most `SEND_TIMEOUT_S`, then kills the process.
        """
        frame = encode_frame(message.SerializeToString())
        with self._send_lock:
            try:
                self._pipe.sendall(frame)
            except BlockingIOError:
                _log.error("the KV transfer process (pid %d) does not read its pipe and is killed", self.pid)
                self._kill()
            except OSError as error:
                _log.warning("a message to the KV transfer process is lost: %s", error)

    def close(self) -> None:
        """End the process without ``on_death``. May be called at any time and repeatedly, but not from a callback."""
        self._is_closing = True
        if self._thread.is_alive():
            self.send(EngineToTransfer(shutdown=Shutdown()))
            self._thread.join(STOP_TIMEOUT_S)
            self._kill()
            self._thread.join()

    def _run(self, memory_fd: int) -> None:
        # The thread that starts the process stays with it to its end: Linux kills a child that asked to die with its
        # parent as soon as the *thread* that started it is gone.
        try:
            with self._child_pipe:
                fds = (self._child_pipe.fileno(), memory_fd)
                command = [sys.executable, "-P", "-m", _MODULE, *map(str, fds)]
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
            self._read_messages()
        finally:
            self._end()

    def _read_messages(self) -> None:
        try:
            while (frame := receive_frame(self._pipe)) is not None:
                message = TransferToEngine.FromString(frame)
                if message.HasField("ready"):
                    silence = struct.pack("ll", int(SILENCE_S), int(SILENCE_S % 1 * 1e6))
                    self._pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
                    self.address = message.ready.address
                    self._started.set()
                elif not message.HasField("alive"):
                    self._on_message(message)
        except BlockingIOError:
            _log.error("the KV transfer process (pid %d) hangs and is killed", self.pid)
            self._kill()

    def _end(self) -> None:
        self._started.set()
        if self._process is not None:
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._kill()
                self._process.wait()
        with self._send_lock:
            self._pipe.close()
        if self.address and not self._is_closing:
            self._on_death()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
