"""Members of a cluster prove to each other that its authority knows them."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import grpc
import pytest

from pdserve.contracts.worker_config import TlsFiles
from pdserve.kv_transfer.pull_stream import PullStream
from pdserve.kv_transfer.transports import PullError
from pdserve.proto.rpc import channel_options, listen, open_channel, server_options
from tests.kv_transfer.peer import running_peer

SCRIPT = Path(__file__).parents[2] / "scripts/make-certificates"


def certificates(folder: Path) -> TlsFiles:
    subprocess.run([SCRIPT, folder], check=True, capture_output=True)
    return TlsFiles(ca=f"{folder}/ca.pem", certificate=f"{folder}/host.pem", key=f"{folder}/host.key")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return certificates(tmp_path_factory.mktemp("ours") / "tls")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return certificates(tmp_path_factory.mktemp("theirs") / "tls")


async def code_of_a_call(server_tls: TlsFiles | None, client_tls: TlsFiles | None) -> grpc.StatusCode:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    server = grpc.aio.server(options=server_options(1 << 20))
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Say": handler}),))
    address = listen(server, "127.0.0.1", server_tls)
    await server.start()
    async with open_channel(address, channel_options(1 << 20), client_tls) as channel:
        code: grpc.StatusCode = await channel.unary_unary("/test.Echo/Say", bytes, bytes)(b"hello", timeout=5).code()
    await server.stop(None)
    return code


def test_members_with_certificates_of_one_authority_meet(ours: TlsFiles) -> None:
    assert asyncio.run(code_of_a_call(ours, ours)) is grpc.StatusCode.OK


@pytest.mark.parametrize("strangers", ["server", "client", "plain client"])
def test_strangers_do_not(ours: TlsFiles, theirs: TlsFiles, strangers: str) -> None:
    client_of = {"server": ours, "client": theirs, "plain client": None}
    # A client whose certificate is another authority's, but which trusts ours, is refused by the server alone.
    forged = TlsFiles(ca=ours.ca, certificate=theirs.certificate, key=theirs.key)
    client = forged if strangers == "client" else client_of[strangers]
    assert asyncio.run(code_of_a_call(theirs if strangers == "server" else ours, client)) in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def test_a_file_that_cannot_be_read_is_named(ours: TlsFiles) -> None:
    gone = TlsFiles(ca=ours.ca, certificate="/absent/host.pem", key=ours.key)
    with pytest.raises(ValueError, match=r"security.tls: cannot read /absent/host.pem: No such file"):
        open_channel("127.0.0.1:1", (), gone)
    with pytest.raises(PullError, match=r"cannot read /absent/host.pem"):
        PullStream(address="127.0.0.1:1", cluster_token="", tls=gone, max_message_bytes=1 << 20)


def test_the_authority_keeps_its_key_apart(ours: TlsFiles) -> None:
    folder = Path(ours.ca).parent
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "host.key", "host.pem"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_pulls_cross_tls(ours: TlsFiles) -> None:
    with running_peer(transport="tcp", tls=ours) as source, running_peer(transport="tcp", seed=1, tls=ours) as target:
        handle = source.offer()
        source.grant(handle, [1, 2])
        target.pull(source.process.address, handle, [3, 4])
        target.expect_done()
        assert [target.block(3), target.block(4)] == [source.block(1), source.block(2)]


def test_a_source_with_tls_serves_no_plain_pull(ours: TlsFiles) -> None:
    with running_peer(transport="tcp", tls=ours) as source, running_peer(transport="tcp", seed=1) as target:
        handle = source.offer()
        source.grant(handle, [1])
        target.pull(source.process.address, handle, [3], deadline_s=3)
        target.expect_done("connect")
