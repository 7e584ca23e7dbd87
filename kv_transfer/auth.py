"""The cluster token on gRPC calls between members: checked by the server, added by the client.

Used by the transfer processes and by the engine's worker service.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

_KEY = "authorization"


def call_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call to a cluster member; empty for an empty token."""
    return ((_KEY, f"Bearer {token}"),) if token else ()


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses every call that does not carry ``token``; an empty token lets every call pass."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        if self._expected and not self._is_authorized(handler_call_details.invocation_metadata):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return await continuation(handler_call_details)

    def _is_authorized(self, metadata: Any) -> bool:
        return any(
            key == _KEY and hmac.compare_digest(str(value).encode(), self._expected) for key, value in metadata or ()
        )


async def _refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    # On the wire all four kinds of call look alike, so one handler refuses them all.
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")
