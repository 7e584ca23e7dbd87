"""gRPC streams to a source: of one pull, or of a link. Statuses become `PullError`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc

from pdserve.contracts.worker_config import TlsFiles
from pdserve.kv_transfer.transports import ABORTED, REFUSED, PullError
from pdserve.proto.rpc import channel_options, open_channel
from pdserve.proto.token_proof import ClientProof
from pdserve.proto.v1 import kv_pb2, kv_pb2_grpc

OPEN_TIMEOUT_S = 5.0
"""Timeout of an open. A source answers immediately; otherwise it is unreachable."""
RELEASE_TIMEOUT_S = 2.0

_REFUSALS = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
)


class PullStream:
    """gRPC stream of one pull, with statuses converted to `PullError`. Always `close` it.

    A connection per pull costs about a millisecond, hidden by the wait for the prompt's last chunk, and leaves no
    stale state behind when a source restarts.
    """

    def __init__(
        self,
        *,
        address: str,
        cluster_token: str,
        tls: TlsFiles | None = None,
        max_message_bytes: int,
        method: str = "Pull",
    ) -> None:
        try:
            self._channel = open_channel(address, channel_options(max_message_bytes), tls)
        except ValueError as error:
            raise PullError("connect", str(error)) from error
        self._proof = ClientProof(cluster_token, address)
        start = getattr(kv_pb2_grpc.KvTransferStub(self._channel), method)
        self._call = start(None, metadata=self._proof.metadata)

    async def open(self, opening: kv_pb2.PullOpen) -> kv_pb2.Opened:
        """Request a prompt, and add the proof to ``opening``.

        Raises:
            PullError: the source is unreachable or refuses.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                opening.proof = await self._proof.answer(self._call)
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the read below raises the reason
                    await self._call.write(kv_pb2.PullMessage(open=opening))
                message = await self.read("connect")
        except grpc.aio.AioRpcError as error:
            raise _pull_error(error, "connect") from error
        except PermissionError as error:
            raise PullError(REFUSED, f"the source at {error}") from error
        except TimeoutError:
            raise PullError("connect", f"the source did not answer within {OPEN_TIMEOUT_S} s") from None
        if message.WhichOneof("body") != "opened":
            raise PullError("connect", f"the source answered with {message.WhichOneof('body')}")
        return message.opened

    async def read(self, stage: str) -> kv_pb2.SourceMessage:
        """Read the source's next message.

        Args:
            stage: stage of the pull, for the error.

        Raises:
            PullError: the stream ended or broke.
        """
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _pull_error(error, stage) from error
        if not isinstance(message, kv_pb2.SourceMessage):  # the end of the stream
            raise PullError(stage, "the source ended the stream too early")
        return message

    async def write(self, message: kv_pb2.PullMessage) -> None:
        """Write a message.

        Raises:
            PullError: the stream has broken.
        """
        try:
            await self._call.write(message)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self.read("copy")  # raises the reason

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the stream has ended or broken."""
        self._call.add_done_callback(lambda _: callback())

    async def failure(self, stage: str, message: str) -> PullError:
        """Failure of the data stream: the status of this one if the source has ended it, else ``message``."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                while True:
                    await self.read(stage)
        except PullError as reason:
            return reason
        except TimeoutError:
            return PullError(stage, message)

    async def close(self, *, release: bool) -> None:
        """End the stream. With ``release``, first inform the source that it may free the prompt."""
        if release:
            # Best effort: the blocks have arrived, and a source that misses the release frees the prompt after its park
            # time.
            with suppress(TimeoutError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await self._call.write(kv_pb2.PullMessage(release=kv_pb2.Release()))
                    await self._call.done_writing()
                    await self._call.code()
        self._call.cancel()
        await self._channel.close(None)


def _pull_error(error: grpc.aio.AioRpcError, stage: str) -> PullError:
    message = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.ABORTED:
        return PullError(ABORTED, message)
    return PullError(REFUSED if error.code() in _REFUSALS else stage, message)
