"""A generation request as every part of the cluster speaks of it: its parameters, its states and its outcomes.

Owns the vocabulary only. The router fills these in, the wire (`pdserve.proto`) mirrors them field by field, the
schedulers read them. Nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

MAX_STOP_TOKEN_IDS = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
"""Entries of a ``logit_bias``."""
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
"""Of the presence and the frequency penalty; minus it is their least."""
REPETITION_PENALTIES = (2.0**-6, 100.0)
"""Least and largest, the same in 32 bits: beyond them a logit could leave the range of its type."""
MAX_CHOICES = 128
"""Answers to one request; choices are numbered below it."""


class RequestState(Enum):
    """Where a request is. ``QUEUED -> PREFILLING -> HANDOFF -> DECODING (<-> PREEMPTED) -> outcome``.

    The loss of a worker returns the request to ``QUEUED`` with ``attempt + 1``.
    """

    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    DECODING = "decoding"
    PREEMPTED = "preempted"


class Outcome(Enum):
    """How a request ended, exactly one per request: accepted = the sum of these + in flight, always."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class FinishReason(IntEnum):
    """Why a choice stopped, as an engine reports it; ``NONE`` while it is running. Values are the wire's."""

    NONE = 0
    STOP = 1
    """An end-of-sequence or stop token was generated. It is in the token stream, and the router hides it."""
    LENGTH = 2
    """``max_tokens`` or the model's maximum length was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Defaults are greedy-free OpenAI defaults: temperature 1, no truncation."""

    temperature: float = 1.0
    """0 is greedy: the highest logit, ties to the lowest token id."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability mass, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Over 0. Logits of tokens in the prompt or the answer are divided by it if positive, else multiplied (CTRL)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that is in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it is in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    seed: int = 0
    """64-bit key of the random generator. The router mints one where the client gave none."""
    max_tokens: int = 16
    """Tokens to generate at most, over all attempts."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is generated before so many tokens are, over all attempts."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence tokens."""
    num_logprobs: int = -1
    """-1: none; 0: the sampled token's only; n: and the n most likely tokens' at each position."""
    num_prompt_logprobs: int = -1
    """The same of every prompt token but the first, given the tokens before it."""

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One attempt at a request, as the router sends it to a worker.

    Prompt, tokens the client already has, and the attempt are kept apart, so that limits, usage, stop rules and random
    positions survive a re-dispatch: generation resumes at index ``len(emitted_tokens)``.
    """

    request_id: int
    """Minted by the router, unique within its session; 64 bits. A client's own id never reaches a worker."""
    attempt: int = 0
    """Counts re-dispatches. Frames of an older attempt are dropped by the router."""
    prompt_tokens: tuple[int, ...]
    emitted_tokens: tuple[int, ...] = ()
    """Tokens of earlier attempts that the client was already sent."""
    choice: int = 0
    """Index of the first choice to generate: part of the random generator's counter."""
    num_choices: int = 1
    """Answers to generate to the one prompt, ``choice`` and those after it. One where ``emitted_tokens`` are given:
    after a loss each choice goes on alone."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: bytes = b""
    """Separates the prefix caches of tenants; part of every block hash."""
    deadline_s: float = 600.0
    """Seconds from the receipt of this message after which the work is worthless and is dropped."""
    ttft_slo_s: float = 0.0
    """Seconds from receipt by which token 0 is wanted, 0 for no objective. Orders the prefill queue."""
    block_hashes: tuple[bytes, ...] = ()
    """Of its leading full blocks, where the sender shares the worker's memory and has them: a simulated request. No
    wire carries them, because a wrong one would serve one prompt's KV to another."""
    handoff: bool = False
    """True: stop after the first new token and park the KV cache for another worker to pull. False: run to the end."""

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose KV must exist before the next one can be sampled."""
        return len(self.prompt_tokens) + len(self.emitted_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSource:
    """Where a prompt's KV blocks can be pulled from: a bearer grant on a worker's transfer process."""

    address: str
    """``host:port`` of the source's transfer process."""
    worker_epoch: int
    """Which incarnation of the worker; a restarted one refuses the handle."""
    handle: bytes
    """16 random bytes naming the parked prompt. Whoever holds it may pull."""
