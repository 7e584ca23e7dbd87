"""The transfer process: ``python -m pdserve.kv_transfer.transfer_process PIPE_FD MEMORY_FD``.

Runs next to an engine and maps the same pool, so that copies, digests and network calls never slow an engine step.
Started and owned by `pdserve.kv_transfer.transfer_client.TransferProcess`; its first frame on the pipe is a
`TransferConfig`. It never outlives its engine: the kernel kills it with its parent, and it exits when the pipe
closes. Never imports torch and decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

import grpc
import uvloop

from pdserve.contracts.codec import from_json
from pdserve.kv_transfer.data_stream import DataListener, tls_context
from pdserve.kv_transfer.ipc_pulls import IpcCopyOrders
from pdserve.kv_transfer.links import Links
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.puller import Puller
from pdserve.kv_transfer.source import Source
from pdserve.kv_transfer.transfer_client import ALIVE_INTERVAL_S, TransferConfig
from pdserve.proto.framing import MAX_FRAME_BYTES, encode_frame, read_frame, receive_frame
from pdserve.proto.parent_death import die_with_parent
from pdserve.proto.rpc import listen, server_options
from pdserve.proto.v1 import kv_pb2_grpc, transfer_pb2

MAX_PULL_MESSAGE_BYTES = 192 << 10
"""The largest is the first of a prefix's pull: a hash a block."""
MAX_CONCURRENT_PULLS = 4096

_log = logging.getLogger(__name__)


async def _serve(config: TransferConfig, memory: PoolMemory, pipe: socket.socket) -> None:
    """Serve until the engine sends `Shutdown` or is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=pipe)

    def send(message: transfer_pb2.TransferToEngine) -> None:
        writer.write(encode_frame(message.SerializeToString()))
        # An engine that has stopped reading counts as dead.
        assert writer.transport.get_write_buffer_size() <= MAX_FRAME_BYTES

    tls = config.tls
    listener = DataListener(
        host=config.host,
        token=config.cluster_token,
        tls=tls_context(tls, is_server=True) if tls else None,
        ports=config.ports,
    )
    links, ipc_orders = Links(config, send), IpcCopyOrders(send)
    source = Source(config=config, memory=memory, listener=listener, links=links, send=send)
    client_tls = tls_context(tls, is_server=False) if tls else None
    puller = Puller(config=config, memory=memory, links=links, ipc_orders=ipc_orders, tls=client_tls, send=send)
    server = grpc.aio.server(
        options=server_options(MAX_PULL_MESSAGE_BYTES),
        maximum_concurrent_rpcs=MAX_CONCURRENT_PULLS,
    )
    kv_pb2_grpc.add_KvTransferServicer_to_server(source, server)
    source.address = address = listen(server, config.host, config.tls, config.ports)
    await server.start()
    send(transfer_pb2.TransferToEngine(ready=transfer_pb2.Ready(address=address)))
    tasks = [
        asyncio.ensure_future(_keep_house(puller, ipc_orders, send)),
        asyncio.ensure_future(listener.accept_forever()),
    ]
    while (frame := await read_frame(reader)) is not None:
        message = transfer_pb2.EngineToTransfer.FromString(frame)
        match message.WhichOneof("body"):
            case "offer":
                source.offer(message.offer.handle)
            case "grant":
                source.grant(message.grant.handle, message.grant.grant)
            case "withdraw":
                source.withdraw(message.withdraw.handle)
            case "start_pull":
                puller.start(message.start_pull)
            case "abort_pull":
                puller.abort(message.abort_pull.pull_id)
            case "staged":
                source.staged(message.staged.stage_id)
            case "link_event":
                links.received(message.link_event)
            case "exported":
                source.rank_pools = message.exported.rank_pools
            case "copied":
                ipc_orders.copied(message.copied)
            case "shutdown":
                break
            case unknown:
                raise AssertionError(unknown)
    for task in tasks:
        task.cancel()
    await server.stop(None)


async def _keep_house(
    puller: Puller, ipc_orders: IpcCopyOrders, send: Callable[[transfer_pb2.TransferToEngine], None]
) -> None:
    """Forget the pools of dead workers, and show that this process works."""
    while True:
        await asyncio.sleep(ALIVE_INTERVAL_S)
        puller.peer_pools.drop_gone()
        ipc_orders.close_gone()
        send(transfer_pb2.TransferToEngine(alive=transfer_pb2.Alive()))


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which then sends Shutdown
    logging.basicConfig(level=logging.INFO, format="%(asctime)s transfer process: %(message)s")
    pipe_fd, memory_fd = (int(argument) for argument in sys.argv[1:])
    pipe = socket.socket(fileno=pipe_fd)
    first_frame = receive_frame(pipe)
    if first_frame is None:
        return
    config = from_json(TransferConfig, first_frame, "the transfer process's configuration")
    if os.getppid() != config.parent_pid:  # the parent died before the kernel was asked for the signal
        return
    if config.cpu_cores:
        os.sched_setaffinity(0, config.cpu_cores)
    uvloop.run(_serve(config, PoolMemory.from_fd(memory_fd, config.layout), pipe))


if __name__ == "__main__":
    main()
