"""Request, its specification and single outcome, and an `Attempt` for each choice.

`pdserve.router.requests.dispatch` advances both; readers of the answer subclass `Request` and override its hooks. Never
waits and reads no clock.

Fence: a token counts only if it comes from a worker of the attempt and carries the attempt's number and the next index.
A decode worker's first tokens may overtake the prefill worker's, which use another stream; they are held until those
arrive.

Losing a decode worker does not cost the attempt while the prefill worker still holds the parked prompt: another decode
worker pulls the same prompt. The attempt number stays, because the prefill worker's tokens and events carry it. The
released decode worker sends nothing more: its session broke, or it ended the attempt itself, and in both cases before
it joined and sent a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import GenerationRequest, KvSource, Outcome, RequestState, SamplingParams
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.journey import Journey
from pdserve.router.requests.policy import PromptBlocks

MAX_BINDINGS = 2
"""Maximum decode workers that try to pull one parked prompt before it is prefilled again."""
MIN_DURATION_S = 1e-3
"""Duration sent for an instant that has passed: 0 would mean none."""


class GenerationError(Exception):
    """A generation that cannot continue. The HTTP edge turns it into an OpenAI error object."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status: 400 cannot run here, 429 overloaded, 503 no worker, 504 deadline, 500 other."""
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """Parameters shared by every choice and every attempt."""

    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    arrived_s: float
    """Arrival by the dispatcher's clock; TTFT and the wait for token 0 count from here."""
    num_choices: int = 1
    """Answers to generate."""
    cache_salt: bytes = b""
    uses_cache: bool = True
    """False: no other prompt shares a prefix, so prefix caches are not consulted."""
    block_hashes: tuple[bytes, ...] = ()
    """Hashes of the leading full blocks, if known: for simulated requests."""
    tenant: str = ""
    """Whose request it is; empty if keys are not asked for."""
    tier: str = DEFAULT_TIER
    """Name of its objectives in the deployment's ``slo``."""
    request_id: str = ""
    """The client's ``X-Request-Id``, or one that the edge made; for the log."""
    is_probe: bool = False
    """Health probe of both phases: never prefilled on a decode worker while a prefill worker is up."""


class Request:
    """A client's request, with one or more choices."""

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.attempts: dict[int, Attempt] = {}
        """Open choices that have left the router or are queued in it, by index."""
        self.waiting_choices = list(range(1, spec.num_choices))
        """Choices that leave the router when token 0 of choice 0 is out: their prompt is then in a prefix cache."""
        self.outcome: Outcome | None = None
        self.error: GenerationError | None = None
        self.is_started = False
        """A worker has begun to compute the prompt."""
        self.num_cached_tokens = 0
        """Prompt tokens that choice 0 found in a prefix cache; meaningful once token 0 is out."""
        self.journey = Journey()
        """Of choice 0."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Log probabilities of every prompt token but the first, if requested; complete once token 0 is out."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log probabilities were requested and are incomplete."""
        spec = self.spec
        return spec.sampling.num_prompt_logprobs >= 0 and len(self.prompt_logprobs) < len(spec.prompt_tokens) - 1

    def take_prompt_logprobs(self, first_position: int, entries: Sequence[TokenLogprobs]) -> bool:
        """Add log probabilities of consecutive prompt tokens; return ``False`` if earlier ones are missing."""
        num_known = len(self.prompt_logprobs) + 1  # the first token has none
        if first_position > num_known:
            return False
        num_missing = len(self.spec.prompt_tokens) - num_known
        self.prompt_logprobs += entries[num_known - first_position :][:num_missing]
        return True

    # Hooks, called by the dispatcher

    def prompt_started(self, num_cached_tokens: int) -> None:
        """A worker began to compute the prompt of choice 0, in its first attempt."""

    def token_received(self, token: TokenEvent) -> None:
        """Receive the next token of its choice, for the client."""

    def ended(self) -> None:
        """`outcome` is set, and `error` if the request failed."""


@dataclass(slots=True, eq=False)
class Attempt:
    """State machine and fence of one choice across workers. Survives re-dispatch.

    ``QUEUED -> PREFILLING -> HANDOFF -> DECODING (<-> PREEMPTED) -> over``. A lost attempt returns to QUEUED with the
    next attempt number and the tokens already delivered. Holds state and sends commands; the dispatcher decides.
    """

    request: Request
    choice: int
    request_id: int
    """Id of the choice on workers."""
    queued_s: float
    """When it began to wait for a worker."""
    emitted: list[int] = field(default_factory=list)
    """Tokens delivered to the client."""
    began_s: float = 0.0
    """When token 0 arrived."""
    heard_s: float = field(init=False)
    """When the last token came; before token 0, when the wait for it began."""
    number: int = -1
    """Number of the attempt on workers; -1 before the first."""
    num_failures: int = 0
    """Attempts that ended with a failed step."""
    failed_on: Worker | None = None
    """Worker of the last failed step."""
    num_errors: int = 0
    """Errors in a row, without a token between."""
    retry_at_s: float = 0.0
    """When the attempt after an error may begin."""
    state: RequestState = RequestState.QUEUED

    # On workers: meaningful while `prefill` is set
    prefill: Worker | None = None
    decode: Worker | None = None
    handoff: bool = False
    source: KvSource | None = None
    """Where to pull the parked prompt from."""
    num_bindings: int = 0
    """Decode workers bound so far."""
    is_prefill_over: bool = False
    """The prefill worker holds nothing of the request any more."""
    awaits_first: bool = True
    """The attempt's first token has not arrived."""
    has_reserved: bool = False
    """The decode worker has blocks for it, so it may join at any time."""
    has_joined: bool = False
    """The decode worker holds all of the prompt's KV."""
    started_s: float = 0.0
    first_token_s: float = 0.0
    joined_s: float = 0.0
    paused_s: float = 0.0
    """When it was preempted, or lost after it had tokens; 0 while it goes on."""
    overtook: list[TokenEvent] = field(default_factory=list)
    """Tokens of the decode worker that arrived before the prefill worker's."""
    _sent: GenerationRequest | None = None
    _blocks: PromptBlocks | None = None
    journey: Journey = field(init=False)

    def __post_init__(self) -> None:
        self.journey = Journey() if self.choice else self.request.journey
        self.heard_s = self.queued_s if self.choice else self.request.spec.arrived_s

    @property
    def name(self) -> str:
        """For the log: the client's id, then that of the choice on workers."""
        return f"{self.request.spec.request_id or '-'} ({self.request_id:x})"

    @property
    def needs_prefill(self) -> bool:
        """Whether the prefill worker still owes token 0 or KV."""
        return self.awaits_first or not self.has_joined

    @property
    def num_new_tokens(self) -> int:
        """Tokens delivered to the client by this attempt."""
        return len(self.emitted) - (len(self._sent.emitted_tokens) if self._sent else 0)

    def is_computed_by(self, worker: Worker) -> bool:
        """Whether steps of ``worker`` may have rows of it, as far as ``worker`` has said."""
        if worker is self.decode:
            return self.has_reserved
        return worker is self.prefill and self.started_s > 0 and (self.awaits_first or not self.handoff)

    @property
    def may_rebind(self) -> bool:
        """Whether another decode worker could pull the prompt."""
        is_parked = self.source is not None and not self.is_prefill_over
        return is_parked and not self.has_joined and self.num_bindings < MAX_BINDINGS

    @property
    def is_pulling(self) -> bool:
        """Whether a decode worker is bound that does not hold the prompt's KV yet."""
        return self.decode is not None and not self.has_joined

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Whether this choice requests the prompt's log probabilities."""
        return self.choice == 0 and self.request.wants_prompt_logprobs

    def accepts(self, worker: Worker, number: int) -> bool:
        """Whether a report of ``worker`` about attempt ``number`` counts."""
        return number == self.number and (worker is self.decode or worker is self.prefill)

    @property
    def workers(self) -> list[Worker]:
        """Workers that may still hold something of the attempt."""
        prefill = [] if self.prefill is None or self.is_prefill_over else [self.prefill]
        return prefill if self.decode is None else [*prefill, self.decode]

    def blocks(self, block_size: int) -> PromptBlocks:
        """Tokens whose KV must exist before the attempt's first token can be sampled, as blocks for the policy."""
        if self._blocks is None or self._blocks.block_size != block_size:
            spec = self.request.spec
            emitted = self.emitted if self._sent is None else self._sent.emitted_tokens
            self._blocks = PromptBlocks(
                (*spec.prompt_tokens, *emitted) if emitted else spec.prompt_tokens,
                block_size,
                spec.cache_salt,
                # Prompt log probabilities require computing every prompt token.
                may_use_cache=spec.uses_cache and not self.asks_prompt_logprobs,
                known_hashes=spec.block_hashes,
            )
        return self._blocks

    # Commands

    def submit(
        self,
        worker: Worker,
        *,
        handoff: bool,
        num_cached_tokens: int,
        num_blocks: int,
        deadline_s: float,
        ttft_slo_s: float,
        patience_s: float,
        max_gap_s: float,
    ) -> None:
        """Begin the next attempt, of ``num_blocks`` blocks, on ``worker``, which is expected to find
        ``num_cached_tokens`` in its prefix cache. Times are seconds from now."""
        assert self.prefill is None
        spec = self.request.spec
        sampling = spec.sampling
        if sampling.num_prompt_logprobs >= 0 and not self.asks_prompt_logprobs:
            sampling = replace(sampling, num_prompt_logprobs=-1)
        self.number += 1
        self.state = RequestState.PREFILLING
        self.prefill, self.handoff = worker, handoff
        self.request.journey.workers.append(worker.worker_id)
        self._sent = request = GenerationRequest(
            request_id=self.request_id,
            attempt=self.number,
            prompt_tokens=spec.prompt_tokens,
            emitted_tokens=tuple(self.emitted),
            choice=self.choice,
            sampling=sampling,
            cache_salt=spec.cache_salt,
            deadline_s=max(deadline_s, MIN_DURATION_S),
            ttft_slo_s=ttft_slo_s,
            patience_s=patience_s,
            max_gap_s=max_gap_s,
            block_hashes=spec.block_hashes,
            handoff=handoff,
        )
        worker.in_flight.add_prefill(self.request_id, request.num_known_tokens - num_cached_tokens)
        if not handoff:
            worker.in_flight.add_decode(self.request_id, request.num_known_tokens, num_blocks)
        worker.submit(request)

    def bind(self, worker: Worker, *, num_blocks: int, deadline_s: float, stall_slo_s: float) -> None:
        """Bind ``worker`` to pull the parked prompt, of ``num_blocks`` blocks, and decode. Token 0 may be out already:
        the parked blocks do not contain its KV."""
        assert self.source is not None
        assert self._sent is not None
        self.decode = worker
        self.request.journey.workers.append(worker.worker_id)
        self.num_bindings += 1
        worker.in_flight.add_decode(self.request_id, self._sent.num_known_tokens, num_blocks)
        request = replace(self._sent, deadline_s=max(deadline_s, MIN_DURATION_S), stall_slo_s=stall_slo_s)
        worker.prepare(request, self.source)

    def unbind(self) -> None:
        """Release the decode worker so that another may pull the prompt."""
        assert self.decode is not None
        self.decode.in_flight.remove(self.request_id)
        self.decode = None
        self.has_reserved = False

    def abandon(self, finisher: Worker | None = None) -> None:
        """Free what workers hold and return to QUEUED. A ``finisher`` sent the last token and holds nothing unless it
        parked the prompt."""
        for worker in self.workers:
            worker.in_flight.remove(self.request_id)
            has_parked = worker is self.prefill and self.handoff
            if worker.is_up and (worker is not finisher or has_parked):
                worker.cancel(self.request_id, self.number)
        self.state = RequestState.QUEUED
        self.prefill = self.decode = self.source = self._sent = self._blocks = None
        self.num_bindings = 0
        self.is_prefill_over = self.has_reserved = self.has_joined = False
        self.awaits_first = True
        self.started_s = self.first_token_s = self.joined_s = 0.0
        self.overtook = []
