"""API keys: a file of salted hashes with one key per line, in JSON, and the limits of each.

A key is ``pd-ID-SECRET``. The file has the ID, which is not secret, and a salted hash of the SECRET; its 256 random
bits need no slow hash. `pdserve key` adds a key, and removing its line revokes it. `pdserve.router.http.asgi` asks for
the caller of each request. Never logs or shows a key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pdserve.contracts.codec import between, from_json, to_json
from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.contracts.errors import ConfigError
from pdserve.contracts.request import Grammar
from pdserve.router.http.errors import ApiError
from pdserve.router.replicas import Replicas

if TYPE_CHECKING:
    from pdserve.router.http.schema import GenerationBody

logger = logging.getLogger(__name__)

SHARED_LIMITS = ("max_in_flight", "requests_per_minute", "tokens_per_minute", "grammars_per_minute")
"""Limits of a key of which each router enforces its share."""

_Limit = Annotated[int, between(0, 2**31 - 1)]
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ID, _SALT, _HASH = (re.compile(f"[0-9a-f]{{{2 * num_bytes}}}") for num_bytes in (6, 16, 32))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A line of the file. A limit of 0 is none."""

    tenant: str
    """Keys of one tenant share prefix-cache blocks; tenants share none."""
    id: str
    salt: str
    hash: str
    max_in_flight: _Limit = 0
    """Answers requested and not finished; a request for n counts n times."""
    max_n: _Limit = 0
    max_tokens: _Limit = 0
    """Tokens of one answer; also the default of requests that set none."""
    requests_per_minute: _Limit = 0
    tokens_per_minute: _Limit = 0
    """Of prompts and answers. What a request takes is known at its end, so a minute may be overspent; as much again, at
    most, is then held back."""
    grammars_per_minute: _Limit = 0
    """Structures that the key has not requested lately; each takes a worker up to a second to compile."""
    tiers: tuple[str, ...] = ()
    """Tiers of ``slo.tiers`` that its requests may name; the first is that of requests which name none. Empty is the
    default tier alone."""

    def __post_init__(self) -> None:
        # Messages have no values: somebody may have written a key in the wrong place.
        if not _TENANT.fullmatch(self.tenant):
            raise ValueError("tenant must be 1 to 64 letters, digits, dots, dashes and underscores")
        if not (_ID.fullmatch(self.id) and _SALT.fullmatch(self.salt) and _HASH.fullmatch(self.hash)):
            raise ValueError("id, salt and hash must be as pdserve key wrote them")

    def matches(self, secret: str) -> bool:
        """True for this key's secret. Takes the same time for all others of one length."""
        return hmac.compare_digest(_hash(secret, self.salt).encode(), self.hash.encode())


def make_key(tenant: str, *, tiers: tuple[str, ...] = (), **limits: int) -> tuple[str, ApiKey]:
    """A new key, and its line without it.

    Raises:
        ValueError: ``tenant`` is not a name.
    """
    secret, key_id, salt = secrets.token_urlsafe(32), secrets.token_hex(6), secrets.token_hex(16)
    key = ApiKey(tenant=tenant, id=key_id, salt=salt, hash=_hash(secret, salt), tiers=tiers, **limits)
    return f"pd-{key_id}-{secret}", key


def add_key(path: Path, tenant: str, *, tiers: tuple[str, ...] = (), **limits: int) -> str:
    """Add a new key to the file, which is made if absent; returns the key.

    Raises:
        ValueError: ``tenant`` is not a name, or the file cannot be read or written, or is no file of keys.
    """
    if path.exists():
        read_keys(path)
    text, key = make_key(tenant, tiers=tiers, **limits)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "r+b", buffering=0) as file:
            size = os.fstat(descriptor).st_size
            is_line_open = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            file.write(b"\n" * is_line_open + to_json(key).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error
    return text


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Keys of a file, by id.

    Raises:
        ConfigError: the file cannot be read, or a line is not a key's.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the API keys in {path}: {reason}; make one with pdserve key") from None
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            key = from_json(ApiKey, line, f"{path} line {number}")
            if key.id in keys:
                raise ConfigError(f"{path} line {number} has the id of an earlier line; remove one of them")
            keys[key.id] = key
    return keys


MAX_KNOWN_GRAMMARS = 256
"""Grammars remembered for a key: about as many as a worker keeps."""

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class Budget:
    """What a key may spend in a minute: a bucket that starts full and refills steadily. It may be overdrawn by a
    minute's."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._filled_s = now_s

    def left(self, now_s: float) -> float:
        self._left = min(self._left + (now_s - self._filled_s) * self.per_minute / 60, self.per_minute)
        self._filled_s = now_s
        return self._left

    def seconds_until(self, amount: float, now_s: float) -> float:
        """Seconds until ``amount`` is left; 0 if it is."""
        return max(amount - self.left(now_s), 0.0) * 60 / self.per_minute

    def spend(self, amount: float, now_s: float) -> float:
        """Take ``amount``, or what may be taken of it; return what was taken."""
        left = self.left(now_s)
        self._left = max(left - amount, -self.per_minute)
        return left - self._left


class KeyFile:
    """Keys of a file, read again when it changes. A file that becomes unreadable changes nothing, and is logged."""

    def __init__(
        self,
        path: Path,
        cache_secret: bytes,
        tiers: Collection[str] = (DEFAULT_TIER,),
        replicas: Replicas | None = None,
    ) -> None:
        """Read the file.

        Args:
            cache_secret: without it nobody can compute block hashes of a tenant.
            tiers: names that keys may have.
            replicas: routers that share the limits.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._path = path
        self._stamp = _stamp(path)
        self._tiers = tiers
        self._replicas = replicas or Replicas()
        self._keys = self._read()
        self._turn = asyncio.Lock()
        self._cache_secret = cache_secret
        self._in_flight: Counter[str] = Counter()
        self._budgets: dict[tuple[str, str], Budget] = {}
        """By id of key, and what of."""
        self._grammars: dict[str, OrderedDict[Grammar, None]] = {}
        """Requested lately, by id of key."""
        _, self._nobody = make_key("nobody")

    def caller(self, text: str) -> Caller | None:
        """The caller who sent the key ``text``; None if the file did not have it at the last `refresh`."""
        _, _, rest = text.partition("-")
        key_id, _, secret = rest.partition("-")
        key = self._keys.get(key_id, self._nobody)
        if not key.matches(secret):
            return None
        max_answers, key = key.max_in_flight, self._limited(key)
        budgets = {of: budget for of in ("requests", "tokens") if (budget := self._budget(key, of))}
        known = self._grammars.setdefault(key.id, OrderedDict())
        of_grammars = self._budget(key, "grammars")
        return Caller(key, max_answers, self._cache_secret, self._in_flight, budgets, of_grammars, known)

    def _limited(self, key: ApiKey) -> ApiKey:
        """``key`` with this router's share of its limits."""
        if self._replicas.num == 1:
            return key
        shares: dict[str, Any] = {name: self._replicas.share(getattr(key, name)) for name in SHARED_LIMITS}
        return replace(key, **shares)

    def _budget(self, key: ApiKey, of: str) -> Budget | None:
        """What the key may spend of something; None without a limit."""
        if not (per_minute := getattr(key, f"{of}_per_minute")):
            return None
        budget = self._budgets.setdefault((key.id, of), Budget(per_minute, time.monotonic()))
        budget.per_minute = per_minute
        return budget

    def _read(self) -> dict[str, ApiKey]:
        keys = read_keys(self._path)
        for key in keys.values():
            for tier in key.tiers:
                if tier not in self._tiers:
                    tiers = ", ".join(self._tiers)
                    raise ConfigError(
                        f"{self._path}: the key {key.id} of {key.tenant} has the tier {tier!r}; slo has only {tiers}"
                    )
        return keys

    async def refresh(self) -> None:
        """Read the file, in a thread, if it has changed."""
        async with self._turn:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            try:
                self._keys = await asyncio.to_thread(self._read)
            except ConfigError as error:
                logger.error("%s. The API keys read before stay valid.", error)
            self._stamp = stamp


@dataclass(slots=True)
class Caller:
    """Sender of one request. `close` ends its use of the key."""

    key: ApiKey
    max_answers: int
    """`ApiKey.max_in_flight` of all routers together: one request may have as many, if it is alone at this one."""
    cache_secret: bytes
    in_flight: Counter[str]
    """Answers by id of key."""
    budgets: Mapping[str, Budget]
    """Of ``requests`` and ``tokens``, as far as they are limited."""
    of_grammars: Budget | None
    known_grammars: OrderedDict[Grammar, None]
    """Requested lately."""
    num_answers: int = 0
    prompt_tokens: float = 0.0
    """Taken for prompts."""

    def admit(self, body: GenerationBody) -> None:
        """Check the limits of the key and count the answers of a request.

        Raises:
            ApiError: it exceeds one of them.
        """
        key = self.key
        if key.max_n and body.num_choices > key.max_n:
            raise ApiError(400, f"this API key allows n up to {key.max_n}; lower n", param="n")
        if key.max_tokens and (body.token_limit or 0) > key.max_tokens:
            message = f"this API key allows answers of {key.max_tokens} tokens; lower {body.limit_field}"
            raise ApiError(400, message, param=body.limit_field)
        if self.max_answers and body.num_answers > self.max_answers:
            raise ApiError(400, f"this API key allows {self.max_answers} answers at once; ask for fewer")
        self.check_left(body.num_answers)
        self.begin(body.num_answers)

    def check_left(self, num_answers: int = 1) -> None:
        """Check that the key has enough left for a request that wants so many answers.

        Raises:
            ApiError: nothing is left of its minute, or too many answers are in flight.
        """
        now_s = time.monotonic()
        for of, budget in self.budgets.items():
            if wait_s := budget.seconds_until(1, now_s):
                message = f"this API key has spent its {of} of this minute; wait {wait_s:.1f} s"
                raise ApiError(429, message, headers={"Retry-After": str(ceil(wait_s))})
        limit = max(self.key.max_in_flight, num_answers)
        if self.key.max_in_flight and self.in_flight[self.key.id] + num_answers > limit:
            message = f"this API key has {limit} answers in flight at most; wait for the end of one"
            raise ApiError(429, message, headers={"Retry-After": "1"})

    def spend(self, of: str, amount: float) -> float:
        """Take ``amount`` of a budget, or what may be taken of it; return what was taken, 0 without a limit."""
        return self.budgets[of].spend(amount, time.monotonic()) if of in self.budgets else 0.0

    def spend_prompt(self, num_tokens: int) -> None:
        """Take a prompt's tokens, until `close` says that the request was refused."""
        self.prompt_tokens += self.spend("tokens", num_tokens)

    def spend_grammar(self, grammar: Grammar) -> None:
        """Count a request for ``grammar``.

        Raises:
            ApiError: it is a new one, and nothing is left for those.
        """
        if self.of_grammars is None:
            return
        now_s, known = time.monotonic(), self.known_grammars
        if grammar in known:
            known.move_to_end(grammar)
            return
        if wait_s := self.of_grammars.seconds_until(1, now_s):
            limit = self.key.grammars_per_minute
            message = f"this API key may request {limit} new structures a minute; wait {wait_s:.1f} s"
            raise ApiError(429, message, headers={"Retry-After": str(ceil(wait_s))})
        self.of_grammars.spend(1, now_s)
        known[grammar] = None
        if len(known) > MAX_KNOWN_GRAMMARS:
            known.popitem(last=False)

    def rate_headers(self) -> dict[str, str]:
        """Headers about what is left, with OpenAI's names."""
        now_s = time.monotonic()
        headers = {}
        for of, budget in self.budgets.items():
            headers[f"x-ratelimit-limit-{of}"] = str(budget.per_minute)
            headers[f"x-ratelimit-remaining-{of}"] = str(max(int(budget.left(now_s)), 0))
            headers[f"x-ratelimit-reset-{of}"] = f"{budget.seconds_until(budget.per_minute, now_s):.3f}s"
        return headers

    def begin(self, num_answers: int) -> None:
        """Count a request, and its answers until `close`."""
        self.num_answers += num_answers
        self.in_flight[self.key.id] += num_answers
        self.spend("requests", 1)

    def close(self, num_answered_tokens: int = 0, *, is_refused: bool = False) -> None:
        """Take the tokens of the request's answers; give back those of its prompt if it was refused."""
        is_given_back = is_refused and not num_answered_tokens
        self.spend("tokens", -self.prompt_tokens if is_given_back else num_answered_tokens)
        self.in_flight[self.key.id] -= self.num_answers
        self.num_answers = 0
        if not self.in_flight[self.key.id]:
            del self.in_flight[self.key.id]

    def owned(self, grammar: Grammar) -> Grammar:
        """``grammar`` as the tenant's own, under a name that tells workers nothing."""
        return replace(grammar, owner=hmac.digest(self.cache_salt(""), b"grammars", "sha256").hex())

    def cache_salt(self, client_salt: str) -> bytes:
        """Salt of the tenant's block hashes, 32 bytes. ``client_salt`` divides the tenant's blocks, and reaches no
        other's."""
        salt = hmac.digest(self.cache_secret, self.key.tenant.encode(), "sha256")
        return hmac.digest(salt, client_salt.encode(), "sha256") if client_salt else salt


def _hash(secret: str, salt: str) -> str:
    digest = blake2b(secret.encode(), digest_size=32, salt=bytes.fromhex(salt), person=b"pdserve-key")
    return digest.hexdigest()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Value that changes with the file; None without one."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ctime_ns, status.st_ino, status.st_size
