"""KV transfer between real transfer processes: GB/s and latency by number of blocks, each transport against its limit.

    pdserve bench transfer [--blocks 1,16,64,256] [--rounds 5] [--json FILE]

Blocks are those of Llama-3-8B in bfloat16, 2 MiB for 16 tokens: 256 blocks are a prompt of 4,096 tokens. A pull is
timed from the engine's order to its `PullDone`, with all blocks granted before. In the same rounds the same bytes move,
block by block:

- memcpy, the limit of memfd: from one mapped pool to the other in this process.
- socket, the limit of tcp: another process sends each block and the digests of its heads with blocking calls; this one
  receives them into the pool (``recv_into``) and compares digests.

Figures are those of the fastest round.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import xxhash

from pdserve.bench.script import publish, script_parser
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.worker_config import TlsFiles
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.transfer_client import TransferProcess
from pdserve.proto.v1 import kv_pb2, transfer_pb2, worker_pb2

TRANSPORTS = ("memfd", "tcp")
LIMITS = {"memfd": "memcpy", "tcp": "socket"}
EPOCH = 1
TOKEN = "bench"
PULL_TIMEOUT_S = 60.0
_DIGEST_BYTES = 8
_SETTLE_S = 0.01
"""From an offer to its pull."""


def layout_of(num_blocks: int) -> KvLayout:
    """A pool of Llama-3-8B in bfloat16."""
    return KvLayout(
        num_blocks=num_blocks, num_kv_heads=8, num_layers=32, block_size=16, head_dim=128, dtype="bfloat16",
        model_hash="bench",
    )  # fmt: skip


Messages = queue.SimpleQueue[transfer_pb2.TransferToEngine | None]
"""Messages of transfer processes; None when one has died."""


def offer_orders(
    layout: KvLayout, num_blocks: int, generation: int = 0
) -> tuple[bytes, list[transfer_pb2.EngineToTransfer]]:
    """Orders that offer and grant a pool's first blocks, with their handle."""
    handle = os.urandom(16)
    grant = kv_pb2.Grant(
        block_ids=range(num_blocks), generations=[generation] * num_blocks, final=True,
        num_tokens=num_blocks * layout.block_size, first_token=kv_pb2.FirstToken(token=1),
    )  # fmt: skip
    offer = transfer_pb2.EngineToTransfer(offer=transfer_pb2.Offer(handle=handle))
    return handle, [
        offer,
        transfer_pb2.EngineToTransfer(grant=transfer_pb2.OfferedGrant(handle=handle, grant=grant)),
    ]


def pull_order(address: str, handle: bytes, num_blocks: int, pull_id: int = 1) -> transfer_pb2.EngineToTransfer:
    """Order to pull what was offered at ``address`` into a pool's first blocks."""
    order = transfer_pb2.StartPull(
        pull_id=pull_id,
        source=worker_pb2.KvSource(address=address, worker_epoch=EPOCH, handle=handle),
        block_ids=range(num_blocks),
        deadline_s=PULL_TIMEOUT_S,
    )
    return transfer_pb2.EngineToTransfer(start_pull=order)


def wait_until_pulled(messages: Messages) -> None:
    """Wait for the end of a pull.

    Raises:
        RuntimeError: it failed, or a process died.
    """
    while (message := messages.get(timeout=2 * PULL_TIMEOUT_S)) is not None and not message.HasField("pull_done"):
        pass
    if message is None or message.pull_done.failure_stage:
        done = None if message is None else message.pull_done
        raise RuntimeError(f"a pull failed: {f'{done.failure_stage}: {done.message}' if done else 'a process died'}")


class Engine:
    """The engine's side of a transfer process."""

    def __init__(self, memory: PoolMemory, transport: str, tls: TlsFiles | None = None) -> None:
        self.memory = memory
        self._messages: Messages = queue.SimpleQueue()
        self.process = TransferProcess.start(
            memory=memory, worker_epoch=EPOCH, host="127.0.0.1", cluster_token=TOKEN, transport=transport,
            cpu_cores=(), on_message=self._messages.put, on_death=lambda: self._messages.put(None), tls=tls,
        )  # fmt: skip

    def pull(self, source: Engine, num_blocks: int) -> float:
        """Seconds of a pull of the source's first blocks, soon after they were offered."""
        handle, orders = offer_orders(self.memory.layout, num_blocks)
        for order in orders:
            source.process.send(order)
        time.sleep(_SETTLE_S)
        started_s = time.perf_counter()
        self.process.send(pull_order(source.process.address, handle, num_blocks))
        wait_until_pulled(self._messages)
        return time.perf_counter() - started_s


def copy_blocks(target: PoolMemory, source: PoolMemory, num_blocks: int) -> float:
    num_heads = target.layout.num_kv_heads
    started_s = time.perf_counter()
    for block_id in range(num_blocks):
        target.block(block_id, 0, num_heads)[:] = source.block(block_id, 0, num_heads)
    return time.perf_counter() - started_s


def _digests(block: memoryview[int], head_bytes: int) -> bytes:
    return b"".join(
        xxhash.xxh3_64_digest(block[start : start + head_bytes]) for start in range(0, len(block), head_bytes)
    )


def _send_blocks(listener: socket.socket, layout: KvLayout) -> None:
    """Child process: answer each request for a number of blocks with their bytes and digests."""
    memory = PoolMemory.create(layout)
    memory.blocks[:] = bytes(memory.blocks)  # touch every page
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := connection.recv(4):
        for block_id in range(int.from_bytes(request, "little")):
            block = memory.block(block_id, 0, layout.num_kv_heads)
            digests = _digests(block, layout.head_bytes)
            connection.sendall(block)
            connection.sendall(digests)


def _receive(connection: socket.socket, buffer: memoryview[int]) -> None:
    while buffer:
        buffer = buffer[connection.recv_into(buffer) :]


def receive_blocks(connection: socket.socket, target: PoolMemory, num_blocks: int) -> float:
    layout = target.layout
    digests = bytearray(layout.num_kv_heads * _DIGEST_BYTES)
    started_s = time.perf_counter()
    connection.sendall(num_blocks.to_bytes(4, "little"))
    for block_id in range(num_blocks):
        block = target.block(block_id, 0, layout.num_kv_heads)
        _receive(connection, block)
        _receive(connection, memoryview(digests))
        if digests != _digests(block, layout.head_bytes):
            raise RuntimeError("a block was damaged")
    return time.perf_counter() - started_s


@contextmanager
def _others(target: PoolMemory, source: PoolMemory) -> Iterator[dict[str, Callable[[int], float]]]:
    """Seconds for a number of blocks by what the transports are compared with."""
    layout = target.layout
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = spawn.Process(target=_send_blocks, args=(listener, layout), daemon=True)
        child.start()
        try:
            with socket.create_connection(listener.getsockname()) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield {
                    "memcpy": lambda num_blocks: copy_blocks(target, source, num_blocks),
                    "socket": lambda num_blocks: receive_blocks(connection, target, num_blocks),
                }
        finally:
            child.kill()
            child.join()


def measure(
    layout: KvLayout, block_counts: Sequence[int], num_rounds: int, tls: TlsFiles | None = None
) -> dict[str, dict[int, float]]:
    """Seconds of the fastest round, by case and number of blocks, between two pools of ``layout``."""
    with ExitStack() as stack:
        pools = _pools(layout, stack)
        cases = stack.enter_context(_others(pools[1], pools[0]))
        cases.update(_transports(pools, TRANSPORTS, tls, stack))
        return _fastest(cases, block_counts, num_rounds)


def pull_seconds(
    layout: KvLayout, transports: Sequence[str], num_rounds: int, tls: TlsFiles | None = None
) -> dict[str, float]:
    """Seconds of the fastest pull of a whole pool, by transport.

    Raises:
        RuntimeError: a transfer process does not start, or a pull failed.
    """
    with ExitStack() as stack:
        cases = _transports(_pools(layout, stack), transports, tls, stack)
        seconds = _fastest(cases, [layout.num_blocks], num_rounds)
    return {name: of_case[layout.num_blocks] for name, of_case in seconds.items()}


def _pools(layout: KvLayout, stack: ExitStack) -> list[PoolMemory]:
    pools = [PoolMemory.create(layout) for _ in range(2)]
    for pool in pools:
        stack.callback(pool.close)
        pool.blocks[:] = random.Random(0).randbytes(layout.block_bytes) * layout.num_blocks
    return pools


def _transports(
    pools: Sequence[PoolMemory], names: Sequence[str], tls: TlsFiles | None, stack: ExitStack
) -> dict[str, Callable[[int], float]]:
    """Pulls from the first pool to the second, by transport."""
    source = Engine(pools[0], "auto", tls)
    stack.callback(source.process.close)
    cases: dict[str, Callable[[int], float]] = {}
    for transport in names:
        engine = Engine(pools[1], transport, tls)
        stack.callback(engine.process.close)
        cases[transport] = partial(engine.pull, source)
    return cases


def _fastest(
    cases: Mapping[str, Callable[[int], float]], block_counts: Sequence[int], num_rounds: int
) -> dict[str, dict[int, float]]:
    seconds: dict[str, dict[int, float]] = {name: dict.fromkeys(block_counts, inf) for name in cases}
    for round_number in range(num_rounds + 1):
        for num_blocks in block_counts:
            for name, move in cases.items():
                taken_s = move(num_blocks)
                if round_number > 0:  # the first round touches every page
                    seconds[name][num_blocks] = min(taken_s, seconds[name][num_blocks])
    return seconds


def report(seconds: Mapping[str, Mapping[int, float]], block_bytes: int) -> dict[str, Any]:
    """Milliseconds and GB/s of each case, and the shares of the transports of their limits."""
    result: dict[str, Any] = {}
    for name, of_case in seconds.items():
        result[name] = {}
        for num_blocks, taken_s in of_case.items():
            figures = {
                "ms": round(1e3 * taken_s, 3),
                "gbytes_per_s": round(num_blocks * block_bytes / taken_s / 1e9, 3),
            }
            if name in LIMITS:
                figures["share_of_limit"] = round(seconds[LIMITS[name]][num_blocks] / taken_s, 3)
            result[name][str(num_blocks)] = figures
    return result


def result_lines(result: Mapping[str, Any]) -> list[str]:
    """A table of ``result``."""
    lines = [f"{'':8}{'blocks':>8}{'ms':>10}{'GB/s':>8}   share of limit"]
    for name in (*LIMITS, *LIMITS.values()):
        for num_blocks, figures in result[name].items():
            share = f"   {figures['share_of_limit']:.0%} of {LIMITS[name]}" if name in LIMITS else ""
            lines.append(f"{name:8}{num_blocks:>8}{figures['ms']:>10.1f}{figures['gbytes_per_s']:>8.2f}{share}")
    return lines


def run(block_counts: Sequence[int], num_rounds: int, tls: TlsFiles | None = None) -> dict[str, Any]:
    layout = layout_of(max(block_counts))
    result = report(measure(layout, block_counts, num_rounds, tls), layout.block_bytes)
    return {"block_bytes": layout.block_bytes, "rounds": num_rounds, "tls": tls is not None, **result}


def tls_files(folder: Path) -> TlsFiles:
    """Files of ``scripts/make-certificates FOLDER``."""
    return TlsFiles(ca=f"{folder}/ca.pem", certificate=f"{folder}/host.pem", key=f"{folder}/host.key")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--blocks", default="1,16,64,256", help="numbers of blocks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", type=Path, help="folder of scripts/make-certificates: encrypt")
    arguments = parser.parse_args()
    tls = tls_files(arguments.tls) if arguments.tls else None
    publish(run([int(count) for count in arguments.blocks.split(",")], arguments.rounds, tls), arguments.json)


if __name__ == "__main__":
    main()
