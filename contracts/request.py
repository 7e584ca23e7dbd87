"""Generation requests: parameters, states and outcomes, shared by all parts of the cluster.

Types only, without logic. The router creates requests, the wire (`pdserve.proto`) mirrors them field by field, and
schedulers read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

HANDLE_BYTES = 16
"""Length of a parked prompt's handle."""

MAX_STOP_TOKEN_IDS = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
"""Entries of a ``logit_bias``."""
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
"""Bound on the absolute value of presence and frequency penalties."""
REPETITION_PENALTIES = (2.0**-6, 100.0)
"""Range of the repetition penalty, exact in 32 bits; beyond it a logit could overflow its type."""
MAX_GRAMMAR_BYTES = 65536
MAX_CHOICES = 128
"""Upper limit of answers to one request; choices are numbered from 0."""


class Outcome(Enum):
    """Outcome of a request, exactly one each: accepted = sum of outcomes + in flight, always."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class FinishReason(IntEnum):
    """Reason that the engine reports for the end of a choice; ``NONE`` while it runs. Values are the wire's."""

    NONE = 0
    STOP = 1
    """The engine generated an end-of-sequence or stop token. The stream contains it; the router hides it."""
    LENGTH = 2
    """The choice reached ``max_tokens`` or the model's maximum length."""


class GrammarKind(IntEnum):
    """Language of a `Grammar`'s text. Values are the wire's."""

    JSON_SCHEMA = 1
    REGEX = 2
    EBNF = 3
    """GBNF, whose first rule is ``root``."""
    STRUCTURAL_TAG = 4
    """xgrammar's JSON: free text, and formats that begin where a tag opens."""


MAX_OWNER_CHARS = 64


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that an answer follows. Workers compile it; what it has matched is never sent."""

    kind: GrammarKind
    text: str
    """At most `MAX_GRAMMAR_BYTES` in UTF-8."""
    owner: str = ""
    """Tells tenants apart on workers, which compile and keep a grammar for each of them; at most
    `MAX_OWNER_CHARS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Defaults are OpenAI's: temperature 1, no truncation."""

    temperature: float = 1.0
    """0 is greedy: the highest logit, ties to the lowest token id."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability mass, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Above 0. Divides positive logits of tokens in the prompt or the answer, multiplies negative ones (CTRL)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias added to its logit), each id once."""
    seed: int = 0
    """64-bit key of the random generator. The router generates one if the client sends none."""
    max_tokens: int = 16
    """Upper limit of generated tokens, over all attempts."""
    min_tokens: int = 0
    """Generated tokens, over all attempts, before which end-of-sequence and stop tokens are banned."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence tokens."""
    num_logprobs: int = -1
    """-1: none; 0: the sampled token only; n: also the n most likely tokens at each position."""
    num_prompt_logprobs: int = -1
    """As ``num_logprobs``, for every prompt token but the first."""
    grammar: Grammar | None = None
    """Tokens that would break it are impossible; end-of-sequence tokens are possible only where it is complete."""

    @property
    def reads_history(self) -> bool:
        """True if a draw depends on earlier tokens."""
        return self.has_penalties or self.grammar is not None

    @property
    def has_penalties(self) -> bool:
        """True if logits are penalised for earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


MAX_PREFIX_BLOCKS = 8192
"""Blocks that one pull of a prefix asks for: their hashes fit the first message of its stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """Another worker that caches leading blocks of a prompt: the worker that computes the prompt pulls what it lacks of
    them, and computes what does not come."""

    address: str
    """``host:port`` of the source's transfer process."""
    worker_epoch: int
    num_tokens: int
    """Leading tokens of the prompt that the source caches, as far as its reports have it."""
    min_tokens: int
    """Tokens that must be lacking, for a pull to take less time than they do."""
    max_s: float
    """Seconds after which the pull is given up: what its tokens take to compute, as predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One attempt at a request, as the router sends it to a worker.

    Prompt, already emitted tokens and attempt are separate fields, so that limits, usage, stop rules and random
    positions survive a re-dispatch: generation resumes at index ``len(emitted_tokens)``.
    """

    request_id: int
    """64-bit id that the router assigns, unique within its session. A client's id never reaches a worker."""
    attempt: int = 0
    """Number of re-dispatches. The router drops frames of older attempts."""
    prompt_tokens: tuple[int, ...]
    emitted_tokens: tuple[int, ...] = ()
    """Tokens of earlier attempts that the client has received."""
    choice: int = 0
    """Index of the answer among the prompt's answers; part of the random generator's counter."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: bytes = b""
    """Separates the prefix caches of tenants; part of every block hash."""
    deadline_s: float = 600.0
    """Seconds from receipt of this message after which the worker drops the request, unless it answers by then."""
    ttft_slo_s: float = 0.0
    """Seconds from receipt until token 0 is due by the router's policy, 0 for none. Orders the prefill queue."""
    patience_s: float = 0.0
    """Seconds from receipt for which the prompt gives way: it shares no step with prompts that do not, and no step of
    its own is planned ahead."""
    stall_slo_s: float = 0.0
    """Seconds from receipt that an answer of expected length may wait before token 1 and meet its TPOT objective; 0 if
    there is none, or nothing left to lose. Orders the reservations of a decode worker."""
    max_gap_s: float = 0.0
    """Longest gap between two tokens of the answer, 0 for none. Bounds the steps that prefill beside it."""
    block_hashes: tuple[bytes, ...] = ()
    """Hashes of the leading full blocks, set only by a sender in the worker's memory, such as the simulator. Never on
    the wire, because a wrong hash would serve one prompt's KV to another."""
    handoff: bool = False
    """True: stop after the first new token and park the KV cache for another worker to pull. False: run to the end."""
    prefix_source: PrefixSource | None = None
    """Where to pull a prefix of the prompt from, rather than compute it."""

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose KV the next sampled token requires."""
        return len(self.prompt_tokens) + len(self.emitted_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSource:
    """Source to pull a prompt's KV blocks from: a bearer grant on a worker's transfer process."""

    address: str
    """``host:port`` of the source's transfer process."""
    worker_epoch: int
    """Epoch of the worker; a restarted worker refuses the handle."""
    handle: bytes
    """16 random bytes that name the parked prompt. Any holder may pull."""
