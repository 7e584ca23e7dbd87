"""An engine in a process of its own, with its pool on a "device": memory that its transfer process does not map. With
several ranks each has a pool of some heads, and the others are processes of `tests.kv_transfer.device_rank`.

The test commands it through a pipe and receives the messages of its transfer process there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.engine.worker import followers
from pdserve.engine.worker.followers import Followers, RanksCopies, RanksIpcCopies
from pdserve.engine.worker.staged_transfer import StagedTransfer
from pdserve.kv_transfer import group_copies
from pdserve.kv_transfer.group_copies import GroupCopies
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.ipc_copies import IpcCopies
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.proto.v1 import kv_pb2, transfer_pb2, worker_pb2
from tests.forked import fork_server
from tests.kv_transfer.peer import EVENT_GRACE_S
from tests.patience import HANG_S

LAYOUT = KvLayout(
    num_blocks=32, num_kv_heads=2, num_layers=3, block_size=16, head_dim=64, dtype="float32", model_hash="model"
)
BATCH_SIZE = 4
HURRY_S = 1.5
"""Silence after which engines in a hurry give each other up: not on a busy machine, unless a test waits for it."""
_FOLLOWER = "tests.kv_transfer.device_rank"
_FOLDER_PREFIX = "pdserve-peer-"


class GatedGenerations(Sequence[int]):
    """Generations of a pool. A copy that has read the one of ``held`` waits there."""

    def __init__(self, memory: PoolMemory, tell: Any) -> None:
        self._generations = memory.generations
        self._tell = tell
        self._lock = threading.Lock()
        self.held = -1
        self.opened = threading.Event()

    def __len__(self) -> int:
        return len(self._generations)

    def __getitem__(self, block_id: Any) -> Any:
        generation = self._generations[block_id]
        with self._lock:  # copies of several groups read the same blocks
            is_held = block_id == self.held
            self.held = -1 if is_held else self.held
        if is_held:
            self._tell("held")
            assert self.opened.wait(HANG_S)
        return generation


class RankPools:
    """The pools of all ranks, in files that they share. Blocks of several ranks move through links only."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        num_heads = LAYOUT.num_kv_heads // num_ranks
        heads = [range(rank * num_heads, (rank + 1) * num_heads) for rank in range(num_ranks)]
        self.shards = [KvShard(each, range(LAYOUT.num_layers)) for each in heads]
        num_bytes = LAYOUT.pool_bytes // num_ranks
        self.pools = [
            torch.from_file(str(folder / str(rank)), shared=True, size=num_bytes, dtype=torch.uint8).view(
                LAYOUT.num_blocks, num_heads, LAYOUT.head_bytes
            )
            for rank in range(num_ranks)
        ]

    def scramble(self, seed: int) -> None:
        content = torch.frombuffer(bytearray(random.Random(seed).randbytes(LAYOUT.pool_bytes)), dtype=torch.uint8)
        heads = content.view(LAYOUT.num_blocks, LAYOUT.num_kv_heads, LAYOUT.head_bytes)
        for shard, pool in zip(self.shards, self.pools, strict=True):
            pool.copy_(heads[:, shard.heads.start : shard.heads.stop])

    def block(self, block_id: int) -> bytes:
        return torch.cat([pool[block_id] for pool in self.pools]).numpy().tobytes()

    def copies(self, rank: int, generations: Sequence[int]) -> GroupCopies:
        pool = self.pools[rank].view(LAYOUT.num_blocks, -1)
        return GroupCopies(pool, generations, LAYOUT, shards=self.shards, rank=rank)


class GatedIpcCopies(IpcCopies):
    """Waits before each order while the gate is closed."""

    tell: Any
    gate: threading.Event

    def carry_out(self, order: transfer_pb2.CopyOrder) -> str:
        if order.rank_pools and not self.gate.is_set():
            self.tell("held")
            assert self.gate.wait(HANG_S)
        return super().carry_out(order)


@contextmanager
def small_batches() -> Iterator[None]:
    with (
        patch.object(group_copies, "BUFFER_BYTES", BATCH_SIZE * LAYOUT.block_bytes),
        patch.object(group_copies, "BATCH_TIMEOUT_S", HANG_S),
        patch.object(followers, "SILENCE_S", HANG_S),
    ):
        yield


def _followers(folder: Path, num_ranks: int, memory: PoolMemory) -> Followers:
    config = WorkerConfig(worker_id="peer", role=WorkerRole.PREFILL, model_path=str(folder), tensor_parallel=num_ranks)
    with (
        patch.object(followers, "_MODULE", _FOLLOWER),
        patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    ):
        return Followers(config, memory, os.memfd_create("unused"), on_loss=lambda reason: os._exit(1))


def _run(
    pipe: Connection,
    folder: Path,
    seed: int,
    transport: str,
    device: str,
    interface: str,
    num_ranks: int,
    handle: str,
) -> None:
    """Child process."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    stack = ExitStack()
    lock = threading.Lock()

    def tell(message: object) -> None:
        with lock:
            pipe.send(message)

    memory = PoolMemory.create(LAYOUT)
    pools = RankPools(folder, num_ranks)
    pools.scramble(seed)
    generations = GatedGenerations(memory, tell)
    for block_id in range(LAYOUT.num_blocks):
        memory.generations[block_id] = (block_id + 1) << 33
    own = pools.copies(0, generations)
    copies: GroupCopies | RanksCopies | RanksIpcCopies = own
    staging: Any = None
    if num_ranks == 1:
        staging = HostStaging(pools.pools[0].view(LAYOUT.num_blocks, -1), memory)
    else:
        ranks = _followers(folder, num_ranks, memory)
        stack.callback(ranks.close)
        ranks.wait_until_ready()
        copies = RanksCopies(own, ranks)
    if device == "cuda_ipc":
        ipc_copies = GatedIpcCopies(pools.pools[0].view(LAYOUT.num_blocks, -1), memory, pools.shards)
        ipc_copies.pool.handle = (handle or str(folder / "0")).encode()
        ipc_copies.tell, ipc_copies.gate = tell, generations.opened
        generations.opened.set()
        copies = RanksIpcCopies(ipc_copies, None)
    copies.device = device or copies.device
    start = partial(
        TransferProcess.start,
        memory=memory,
        worker_epoch=seed,
        host="127.0.0.1",
        cluster_token="secret",
        transport=transport,
        cpu_cores=(),
        on_death=lambda: tell("death"),
        device=copies.device,
        shards=copies.shards,
    )
    with stack, small_batches():
        transfer = StagedTransfer(
            staging,
            start,
            lambda message: tell(message.SerializeToString()),
            lambda: tell("failure"),
            copies,
        )
        tell(transfer.address)
        while (command := pipe.recv()) is not None:
            match command:
                case "send", order:
                    transfer.send(transfer_pb2.EngineToTransfer.FromString(order))
                case "hold", block_id:
                    generations.opened.clear()
                    generations.held = block_id
                case "let_go", _:
                    generations.opened.set()
                case "patience", seconds:
                    group_copies.BATCH_TIMEOUT_S = followers.SILENCE_S = seconds
                case "num_opened", _:
                    mappings = Path("/proc/self/maps").read_text().splitlines()
                    tell(sum(f"/{_FOLDER_PREFIX}" in line for line in mappings) - num_ranks)
                case "reuse", block_id:
                    memory.generations[block_id] += 1
                case "generations", block_ids:
                    tell([memory.generations[block_id] for block_id in block_ids])
                case "fill", value:
                    for pool in pools.pools:
                        pool.fill_(value)
                case "scramble", other_seed:
                    pools.scramble(other_seed)
                case "blocks", block_ids:
                    tell([pools.block(block_id) for block_id in block_ids])
                case "staged_blocks", block_ids:
                    tell([bytes(memory.block(block_id, 0, LAYOUT.num_kv_heads)) for block_id in block_ids])
                case "threads", _:
                    tell(sum(thread.name.startswith("kv-link") for thread in threading.enumerate()))
        transfer.close()


class DevicePeer:
    """The test's end. Built by `device_peer`."""

    def __init__(
        self, folder: Path, seed: int, transport: str, device: str, interface: str, num_ranks: int, handle: str
    ) -> None:
        server = fork_server()
        self._pipe, theirs = server.Pipe()
        arguments = (theirs, folder, seed, transport, device, interface, num_ranks, handle)
        self.process = server.Process(target=_run, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self._messages: list[object] = []
        self.device = device or f"gloo {self.process.pid}"
        self.epoch = seed
        self.address = str(self._receive(HANG_S))

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self.process.join(HANG_S)
        is_hanging = self.process.exitcode is None
        self.process.kill()
        assert not is_hanging

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def signal_follower(self, number: int) -> None:
        (follower,) = [child for child in psutil.Process(self.process.pid).children() if _FOLLOWER in child.cmdline()]
        follower.send_signal(number)

    def _receive(self, timeout_s: float = HANG_S) -> object:
        assert self._pipe.poll(timeout_s), "nothing came"
        return self._pipe.recv()

    def command(self, name: str, argument: object = None) -> None:
        """Have a command obeyed: what another peer does next comes after it."""
        self._pipe.send((name, argument))
        self.ask("threads")

    def ask(self, name: str, argument: object = None) -> Any:
        """Answer to a command."""
        self._pipe.send((name, argument))
        while isinstance(answer := self._receive(), (bytes, str)):
            self._messages.append(answer)
        return answer

    def send(self, **body: Any) -> None:
        self.command("send", transfer_pb2.EngineToTransfer(**body).SerializeToString())

    def expect(self, kind: str) -> Any:
        """Next message, which must be of this kind: of the transfer process, or "held"."""
        message = self._messages.pop(0) if self._messages else self._receive()
        if not isinstance(message, bytes):
            assert message == kind
            return message
        received = transfer_pb2.TransferToEngine.FromString(message)
        assert received.WhichOneof("body") == kind, received
        return getattr(received, kind)

    def expect_no_more(self) -> None:
        """Check that no message has come that was not expected."""
        self.ask("threads")
        assert not self._messages

    def expect_nothing(self) -> None:
        """Check that no message comes soon."""
        assert not self._messages
        assert not self._pipe.poll(EVENT_GRACE_S)

    def offer(self, block_ids: Sequence[int], *, num_first: int = 0, is_complete: bool = True) -> bytes:
        """Offer a prompt and grant its blocks, ``num_first`` of them by a grant of their own; returns the handle.

        Args:
            is_complete: whether a grant is the prompt's last.
        """
        handle = os.urandom(16)
        generations = self.ask("generations", block_ids)
        self.send(offer=transfer_pb2.Offer(handle=handle))
        for start, end in ((0, num_first), (num_first, len(block_ids))):
            grant = kv_pb2.Grant(
                first_index=start,
                block_ids=block_ids[start:end],
                generations=generations[start:end],
                final=is_complete and end == len(block_ids),
            )
            if grant.final:
                grant.num_tokens = len(block_ids) * LAYOUT.block_size
                grant.first_token.token = 7
            if start < end:
                self.send(grant=transfer_pb2.OfferedGrant(handle=handle, grant=grant))
        self.ask("threads")  # until it has sent them
        return handle

    def lend(self, handle: bytes, block_ids: Sequence[int]) -> None:
        """Grant cached blocks to a pull of a prefix."""
        generations, num_tokens = self.ask("generations", block_ids), len(block_ids) * LAYOUT.block_size
        grant = kv_pb2.Grant(block_ids=block_ids, generations=generations, final=True, num_tokens=num_tokens)
        self.send(grant=transfer_pb2.OfferedGrant(handle=handle, grant=grant))

    def pull(
        self,
        source: DevicePeer,
        handle: bytes,
        block_ids: Sequence[int],
        *,
        num_cached: int = 0,
        pull_id: int = 1,
        deadline_s: float = HANG_S,
        prefix: Sequence[bytes] = (),
    ) -> None:
        self.send(
            start_pull=transfer_pb2.StartPull(
                pull_id=pull_id,
                source=worker_pb2.KvSource(address=source.address, worker_epoch=source.epoch, handle=handle),
                num_cached_blocks=num_cached,
                block_ids=block_ids,
                deadline_s=deadline_s,
                prefix=prefix,
            )
        )

    def expect_done(self, failure_stage: str = "", transport: str = "") -> transfer_pb2.PullDone:
        """
        Args:
            transport: by default that from device to device.
        """
        done: transfer_pb2.PullDone = self.expect("pull_done")
        direct = "cuda_ipc" if self.device == "cuda_ipc" else "nccl"
        assert (done.failure_stage, done.transport) == (failure_stage, transport or direct), done
        return done


@contextmanager
def device_peer(
    seed: int,
    transport: str = "auto",
    device: str = "",
    interface: str = "lo",
    num_ranks: int = 1,
    handle: str = "",
) -> Iterator[DevicePeer]:
    """
    Args:
        device: id of the pool's device; by default one of its own.
        interface: network interface of groups.
    """
    with TemporaryDirectory(prefix=_FOLDER_PREFIX) as folder:
        peer = DevicePeer(Path(folder), seed, transport, device, interface, num_ranks, handle)
        try:
            yield peer
        finally:
            peer.close()
