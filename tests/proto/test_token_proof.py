"""Both ends prove that they know the cluster token, and a false one learns nothing that is worth anything elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.proto.token_proof import NONCE_BYTES, ClientProof, ServerProof, UnprovenCalls, UnprovenError

HERE = "10.0.0.1:5000"


def _server(client: ClientProof, token: str, address: str = HERE) -> ServerProof:
    return ServerProof(token, address, dict(client.metadata))


def test_members_accept_each_other_without_sending_the_token() -> None:
    client = ClientProof("secret", HERE)
    server = _server(client, "secret")
    proof = client.check(dict(server.metadata))
    assert server.is_proven(proof)
    assert b"secret" not in b"".join([proof, *dict(client.metadata).values(), *dict(server.metadata).values()])


@pytest.mark.parametrize("token", ["", "guess"])
def test_a_server_without_the_token_gets_no_proof(token: str) -> None:
    client = ClientProof("secret", HERE)
    with pytest.raises(PermissionError, match=f"{HERE} does not know the cluster token"):
        client.check(dict(_server(client, token).metadata))
    with pytest.raises(PermissionError):
        client.check({})


@pytest.mark.parametrize("token", ["", "guess"])
def test_a_client_without_the_token_is_refused(token: str) -> None:
    client = ClientProof(token, HERE)
    server = _server(client, "secret")
    assert not server.is_proven(ClientProof("", HERE).check({}))
    if token:
        with pytest.raises(PermissionError):
            client.check(dict(server.metadata))


def test_a_false_server_cannot_pass_on_what_it_is_asked() -> None:
    client = ClientProof("secret", "10.0.0.66:5000")
    true_server = _server(client, "secret")
    with pytest.raises(PermissionError):
        client.check(dict(true_server.metadata))


def test_a_false_server_cannot_pass_on_to_a_port_that_begins_with_its_own() -> None:
    client = ClientProof("secret", HERE)
    client._nonce = b"7" + client._nonce[1:]
    ((key, nonce),) = client.metadata
    true_server = ServerProof("secret", HERE + "7", {key: nonce[1:]})
    with pytest.raises(PermissionError):
        client.check(dict(true_server.metadata))


@pytest.mark.parametrize("num_bytes", [0, NONCE_BYTES - 1, NONCE_BYTES + 1])
def test_nonces_have_one_length(num_bytes: int) -> None:
    client = ClientProof("secret", HERE)
    client._nonce = bytes(num_bytes)
    server = _server(client, "secret")
    assert not server.is_proven(client.check(dict(server.metadata)))
    client, server = ClientProof("secret", HERE), ServerProof("secret", HERE, {})
    server._nonce = bytes(num_bytes)
    server._nonces = client._nonce, server._nonce
    with pytest.raises(PermissionError):
        client.check(dict(server.metadata))


def test_a_proof_that_was_overheard_opens_no_other_call() -> None:
    client = ClientProof("secret", HERE)
    proof = client.check(dict(_server(client, "secret").metadata))
    assert not _server(client, "secret").is_proven(proof)


def test_the_proof_of_a_server_is_not_one_of_a_client() -> None:
    server = _server(ClientProof("secret", HERE), "secret")
    assert not any(server.is_proven(value) for value in dict(server.metadata).values())


def test_an_empty_token_neither_checks_nor_proves() -> None:
    client = ClientProof("", HERE)
    assert _server(client, "").is_proven(client.check({}))


def test_the_oldest_of_too_many_unproven_calls_ends() -> None:
    calls = UnprovenCalls(2, timeout_s=600.0)

    async def call(proof: asyncio.Event) -> str:
        try:
            async with calls.wait():
                await proof.wait()
        except UnprovenError as error:
            return str(error)
        return "proven"

    async def run() -> None:
        never, member = asyncio.Event(), asyncio.Event()
        strangers = [asyncio.create_task(call(never)) for _ in range(2)]
        proven = asyncio.create_task(call(member))
        assert await strangers[0] == "no proof of the cluster token came before newer calls took its place"
        member.set()
        assert await proven == "proven"
        assert await call(member) == "proven"
        assert not strangers[1].done()
        strangers[1].cancel()

    asyncio.run(run())


def test_an_unproven_call_ends_in_time() -> None:
    async def run() -> None:
        with pytest.raises(UnprovenError, match=r"within 0\.01 s"):
            async with UnprovenCalls(2, timeout_s=0.01).wait():
                await asyncio.Event().wait()

    asyncio.run(run())
