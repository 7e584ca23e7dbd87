from __future__ import annotations

import asyncio

import grpc
import pytest

from pdserve.kv_transfer.auth import TokenInterceptor, call_metadata


async def _code_of_a_call(server_token: str, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    server = grpc.aio.server(interceptors=(TokenInterceptor(server_token),))
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Say": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/test.Echo/Say", bytes, bytes)(b"hello", metadata=metadata)
        code = await call.code()
    await server.stop(None)
    return code


@pytest.mark.parametrize(
    ("server_token", "metadata", "code"),
    [
        ("abc", call_metadata("abc"), grpc.StatusCode.OK),
        ("", call_metadata(""), grpc.StatusCode.OK),
        ("", call_metadata("abc"), grpc.StatusCode.OK),
        ("abc", (), grpc.StatusCode.UNAUTHENTICATED),
        ("abc", call_metadata("abd"), grpc.StatusCode.UNAUTHENTICATED),
        ("abc", call_metadata("abcd"), grpc.StatusCode.UNAUTHENTICATED),
        ("abc", (("authorization", "abc"),), grpc.StatusCode.UNAUTHENTICATED),
        ("abc", (("x-authorization", "Bearer abc"),), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_only_the_right_token_passes(
    server_token: str, metadata: tuple[tuple[str, str], ...], code: grpc.StatusCode
) -> None:
    assert asyncio.run(_code_of_a_call(server_token, metadata)) is code
