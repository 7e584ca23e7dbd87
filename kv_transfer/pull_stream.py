"""The gRPC stream of one pull, seen from the puller: a connection of its own, and statuses turned into `PullError`.

One connection per pull costs about a millisecond, which the wait for the prompt's last chunk hides, and leaves no state
behind that could be stale when a source is restarted.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc

from pdserve.kv_transfer.auth import call_metadata
from pdserve.kv_transfer.grpc_options import channel_options
from pdserve.kv_transfer.transports import PullError
from pdserve.proto.v1 import kv_pb2, kv_pb2_grpc

OPEN_TIMEOUT_S = 5.0
"""A source answers an open at once; one that does not by then is unreachable."""
RELEASE_TIMEOUT_S = 2.0

_REFUSALS = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
)


class SourceBusyError(PullError):
    """Another pull of the prompt stands."""


class PullStream:
    """One pull's stream. `close` it in every case."""

    def __init__(self, *, address: str, cluster_token: str, max_message_bytes: int) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))
        self._call = kv_pb2_grpc.KvTransferStub(self._channel).Pull(None, metadata=call_metadata(cluster_token))

    async def open(self, opening: kv_pb2.PullOpen) -> kv_pb2.Opened:
        """Ask for a prompt.

        Raises:
            PullError: the source cannot be reached or refuses.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the read below says why
                    await self._call.write(kv_pb2.PullMessage(open=opening))
                message = await self.read("connect")
        except TimeoutError:
            raise PullError("connect", f"the source did not answer within {OPEN_TIMEOUT_S} s") from None
        if message.WhichOneof("body") != "opened":
            raise PullError("connect", f"the source answered with {message.WhichOneof('body')}")
        return message.opened

    async def read(self, stage: str) -> kv_pb2.SourceMessage:
        """The source's next message.

        Args:
            stage: of the pull, if the stream is broken.

        Raises:
            PullError: there is none.
        """
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _pull_error(error, stage) from error
        if not isinstance(message, kv_pb2.SourceMessage):  # the end of the stream
            raise PullError(stage, "the source ended the stream too early")
        return message

    async def close(self, *, release: bool) -> None:
        """End the stream, telling the source first that it may free the prompt if ``release``."""
        if release:
            # Best effort: the blocks are here, and a source that does not hear it frees the prompt after its park time.
            with suppress(TimeoutError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await self._call.write(kv_pb2.PullMessage(release=kv_pb2.Release()))
                    await self._call.done_writing()
                    await self._call.code()
        self._call.cancel()
        await self._channel.close(None)


def _pull_error(error: grpc.aio.AioRpcError, stage: str) -> PullError:
    message = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.ALREADY_EXISTS:
        return SourceBusyError("refused", message)
    return PullError("refused" if error.code() in _REFUSALS else stage, message)
