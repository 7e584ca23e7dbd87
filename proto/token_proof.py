"""Both ends of a gRPC call prove that they know the cluster token, without sending it.

    client -> server   nonce, in the call's metadata
    server -> client   nonce and proof of the server, in the initial metadata
    client -> server   proof of the client, in the first message

A proof is an HMAC, keyed by the token, of the side, the server's address and both nonces, each with its length. The
server listens at that address and the client called it, so that a false server gets no proof that another one accepts.

Used by the router's sessions and by pulls. Data streams prove the same by `token_proof` (`pdserve.kv_transfer`).
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc

NONCE_BYTES = 32
PROOF_BYTES = 32
_NONCE_KEY = "pdserve-nonce-bin"
_PROOF_KEY = "pdserve-proof-bin"


def token_proof(token: str, side: bytes, subject: bytes, nonces: tuple[bytes, bytes]) -> bytes:
    """What only a member of the cluster can compute.

    Args:
        side: who proves it; differs between the two.
        subject: what the connection is for.
        nonces: nonce of the connecting side, then of the other; each is new.
    """
    # With lengths, so that no part of one field can be passed off as part of the next.
    fields = b"".join(len(field).to_bytes(4) + field for field in (side, subject, *nonces))
    return hmac.digest(token.encode(), fields, "sha256")


class ClientProof:
    """Client's end of one call."""

    def __init__(self, token: str, address: str) -> None:
        """
        Args:
            token: cluster token; an empty one neither checks nor proves anything.
            address: the server's, as it is called.
        """
        self._token = token
        self._address = address.encode()
        self._nonce = os.urandom(NONCE_BYTES)

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Metadata of the call."""
        return ((_NONCE_KEY, self._nonce),)

    async def answer(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> bytes:
        """Wait for the server's proof; returns that of the client.

        Raises:
            grpc.aio.AioRpcError: the call failed.
            PermissionError: the server does not know the token.
        """
        received = dict(await call.initial_metadata() or ())
        if _PROOF_KEY not in received:
            await call.read()  # raises the status of a call that has failed
        return self.check(received)

    def check(self, received: Mapping[str, str | bytes]) -> bytes:
        """Check the server's initial metadata; returns the client's proof.

        Raises:
            PermissionError: the server does not know the token.
        """
        if not self._token:
            return b""
        nonces = self._nonce, _bytes(received, _NONCE_KEY)
        expected = token_proof(self._token, b"server", self._address, nonces)
        is_proven = hmac.compare_digest(_bytes(received, _PROOF_KEY), expected)
        if len(nonces[1]) != NONCE_BYTES or not is_proven:
            raise PermissionError(f"{self._address.decode()} does not know the cluster token")
        return token_proof(self._token, b"client", self._address, nonces)


class ServerProof:
    """Server's end of one call."""

    def __init__(self, token: str, address: str, received: Mapping[str, str | bytes]) -> None:
        """
        Args:
            token: cluster token; an empty one accepts every client.
            address: where the server listens.
            received: the call's metadata.
        """
        self._token = token
        self._address = address.encode()
        self._nonce = os.urandom(NONCE_BYTES)
        self._nonces = _bytes(received, _NONCE_KEY), self._nonce

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Initial metadata for the client."""
        proof = token_proof(self._token, b"server", self._address, self._nonces)
        return ((_NONCE_KEY, self._nonce), (_PROOF_KEY, proof))

    def is_proven(self, proof: bytes) -> bool:
        """Whether ``proof``, in the client's first message, shows that it knows the token."""
        expected = token_proof(self._token, b"client", self._address, self._nonces)
        is_proven = len(self._nonces[0]) == NONCE_BYTES and hmac.compare_digest(proof, expected)
        return not self._token or is_proven


class UnprovenError(Exception):
    """A client did not prove in time that it knows the token."""


class UnprovenCalls:
    """Calls of one server whose clients have not proved yet that they know the token, bounded in time and number."""

    def __init__(self, max_calls: int, timeout_s: float) -> None:
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._deadlines: dict[asyncio.Timeout, None] = {}
        """Oldest first."""

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Bound the body, which waits for the proof. If there are too many calls, the oldest ends: a member proves
        what it knows within a round trip, so that others cannot keep it out by waiting.

        Raises:
            UnprovenError: the time is over, or newer calls took the place.
        """
        if len(self._deadlines) >= self._max_calls:
            oldest = next(iter(self._deadlines))
            del self._deadlines[oldest]
            if not oldest.expired():
                oldest.reschedule(0.0)
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                self._deadlines[deadline] = None
                yield
        except TimeoutError:
            is_late = deadline in self._deadlines
            reason = f"within {self._timeout_s:g} s" if is_late else "before newer calls took its place"
            raise UnprovenError(f"no proof of the cluster token came {reason}") from None
        finally:
            self._deadlines.pop(deadline, None)


def _bytes(metadata: Mapping[str, str | bytes], key: str) -> bytes:
    value = metadata.get(key, b"")
    return value if isinstance(value, bytes) else value.encode()
