"""An attempt is its state: one choice of a request on its way across workers, and the classes of its states.

::

    Queued ----> Prefilling -- last chunk --> Parked -- token 0 and join --> Decoding ----> Ended
    |  ^  |      ^  |   |                        |                           ^     |
    |  |  v      |  |   `-- token 0, if the same worker decodes -------------'     |
    |  |  Held --'  |                            |                                 |
    |  `------------+----------------------------+---------------------------------'
    |               lost, refused or failed: the next number, with the tokens that the client has
    `--> Ended, from every state: the last token, a stop string, a client that left, or a failure

Each is left within a time that needs nobody else:

============ ======================================= ======================================== =======================
in           put there by                            taken from there by                      at the latest after
============ ======================================= ======================================== =======================
to be placed a loss, a last chunk, a new sibling     the next turns (`placer`)                its turns
Queued       all that returns to the router          turns; again at sweeps, when workers are without a worker 5 s, 60 s
                                                     up, at the end of a trial                if not new; where all are
                                                                                              full 5 s; 1.25 s after an
                                                                                              error, 1 s before a trial;
                                                                                              `max_silence_s` while
                                                                                              others are tried first
Held         the policy                              ends of answers, sweeps                  20 s for the first, 20 s
                                                                                              more for each behind it;
                                                                                              `max_silence_s`, also of
                                                                                              those without weight
Prefilling   a turn, `Dispatcher.start`              the last chunk, or token 0               `max_silence_s`
Parked       the last chunk                          token 0 and a decode worker's join       `max_silence_s`
Decoding     token 0, a join                         the last token                           `max_silence_s`
============ ======================================= ======================================== =======================

What belongs to one state lives in its object and ends with it; `Attempt` has what survives. States are never changed:
`pdserve.router.requests.attempt_table.AttemptTable.move` replaces one by the next. Pure; reads no clock.

Fence: a report counts only if it comes from a worker that the state names and carries the attempt's number, and a token
only with the next index, too. A decode worker's first tokens may overtake the prefill worker's, which use another
stream; its `Pull` keeps them until those arrive.

Losing a decode worker does not cost the attempt while the prefill worker still holds the parked prompt: another decode
worker pulls the same prompt. The attempt number stays, because the prefill worker's tokens and events carry it. The
released decode worker sends nothing more: its session broke, or it ended the attempt itself, and in both cases before
it joined and sent a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from pdserve.contracts.events import TokenEvent
from pdserve.contracts.request import GenerationRequest, KvSource
from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.journey import Journey
from pdserve.router.requests.placement import Arrival, PrefillChoice, PromptBlocks
from pdserve.router.requests.request import Request

MAX_PULLS = 2
"""Maximum decode workers that try to pull one parked prompt before it is prefilled again."""


class Decision(NamedTuple):
    """Where a prompt goes, and for what it was decided."""

    arrival: Arrival
    choice: PrefillChoice


@dataclass(frozen=True, slots=True)
class State:
    """State of an attempt. This base class is one without workers."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers that may still hold something of the attempt; only they are heard."""
        return ()

    def hears(self, worker: Worker) -> bool:
        """Whether ``worker`` is one of them."""
        return worker in self.workers

    @property
    def unreported(self) -> Worker | None:
        """Worker whose reported load does not include the attempt yet."""
        return None


class Loss(NamedTuple):
    """Why an attempt was given up."""

    reason: str
    """One of `pdserve.contracts.metrics.RETRY_REASONS`."""
    message: str
    num_tokens: int
    """To be computed again."""


@dataclass(frozen=True, slots=True)
class Queued(State):
    """Waits in the router to be placed."""

    since_s: float
    retry_at_s: float = 0.0
    """Not before then, after an error."""
    loss: Loss | None = None
    """Of the attempt before, until it is reported."""


@dataclass(frozen=True, slots=True)
class Held(State):
    """Waits in the router by a decision of the policy: others would lose by it. First attempts only."""

    since_s: float
    share: str


@dataclass(frozen=True, slots=True)
class Prefilling(State):
    """``worker`` has the prompt, to compute it and then park or decode it, as ``sent`` says."""

    worker: Worker
    sent: GenerationRequest
    decision: Decision
    started_s: float | None = None
    """When a first step computed part of it."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.worker,)

    @property
    def unreported(self) -> Worker | None:
        return self.worker if self.started_s is None else None


class PullStage(Enum):
    ASKED = "asked"
    """The decode worker was told."""
    RESERVED = "reserved"
    """It has blocks for the prompt, so it may join at any time."""
    JOINED = "joined"
    """It holds all of the prompt's KV."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Of a parked prompt, by the decode worker that it is bound to."""

    worker: Worker
    sent: GenerationRequest
    stage: PullStage = PullStage.ASKED
    overtook: list[TokenEvent] = field(default_factory=list)
    """Tokens that arrived before the prefill worker's."""


@dataclass(frozen=True, slots=True)
class Parked(State):
    """The prompt's last chunk is planned; token 0 is not out, or no decode worker has joined."""

    prefill: Worker
    sent: GenerationRequest
    source: KvSource
    """Where to pull from."""
    started_s: float | None
    first_token_s: float | None = None
    """When the attempt's first token arrived."""
    pull: Pull | None = None
    num_pulls: int = 0
    is_released: bool = False
    """The prefill worker holds nothing any more."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        prefill = () if self.is_released else (self.prefill,)
        return prefill if self.pull is None else (*prefill, self.pull.worker)

    @property
    def unreported(self) -> Worker | None:
        return self.pull.worker if self.pull is not None and self.pull.stage is PullStage.ASKED else None

    @property
    def is_pulling(self) -> bool:
        """Whether a decode worker is bound that does not hold the prompt's KV yet."""
        return self.pull is not None and self.pull.stage is not PullStage.JOINED

    @property
    def may_rebind(self) -> bool:
        """Whether another decode worker could pull the prompt instead."""
        return self.is_pulling and not self.is_released and self.num_pulls < MAX_PULLS

    def pulled(self, stage: PullStage) -> Parked:
        assert self.pull is not None
        return replace(self, pull=replace(self.pull, stage=stage))

    def settled(self, now_s: float) -> Parked | Decoding:
        """What follows from a token or join: it decodes once both are there."""
        if self.pull is None or self.is_pulling or self.first_token_s is None:
            return self
        return Decoding(self.pull.worker, now_s, self.prefill, self.is_released)


@dataclass(frozen=True, slots=True)
class Decoding(State):
    """Token 0 is out, and ``worker`` decodes the rest."""

    worker: Worker
    since_s: float
    prefill: Worker | None = None
    """Where the prompt was pulled from, if it was handed off."""
    is_released: bool = False
    """That worker holds nothing any more."""
    preempted_s: float | None = None
    """Since when it is preempted, if it is."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.worker,) if self.prefill is None or self.is_released else (self.prefill, self.worker)

    def hears(self, worker: Worker) -> bool:
        return worker is self.worker or (worker is self.prefill and not self.is_released)  # asked for each token


@dataclass(frozen=True, slots=True)
class Ended(State):
    """Over."""

    num_tokens: int = 0
    """Of a complete answer; 0 if it was given up."""
    finisher: Worker | None = None
    """Worker that sent the last token: it holds nothing any more, except a prompt that it parked."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One choice of a request, over all its tries on workers, which `number` counts (``attempt`` on the wire).

    `state` says where it is. What survives a try is here: the dispatcher writes `emitted` and `heard_s`, the placer
    `number` and `num_resumed`, `pdserve.router.requests.retries` errors and `failed_on`, fail-over the rest.
    """

    request: Request
    choice: int
    request_id: int
    """Id of the choice on workers and for policies; `RequestSpec.request_id` is the client's."""
    state: State
    """To be replaced by `pdserve.router.requests.attempt_table.AttemptTable` only."""
    number: int = -1
    """Number of the attempt on workers; -1 before the first."""
    emitted: list[int] = field(default_factory=list)
    """Tokens delivered to the client."""
    heard_s: float = field(init=False)
    """When the last token came; before token 0, when the wait for it began."""
    lost_s: float = 0.0
    """When the attempt before this was lost; 0 once this one has a token."""
    num_excused: int = 0
    """Attempts lost with their worker that do not count, because it was in a trial or they had got on."""
    num_failures: int = 0
    """Attempts that ended with a failed step."""
    failed_on: Worker | None = None
    """Worker of the last failed step."""
    num_errors: int = 0
    """Errors in a row, without a token between."""
    num_resumed: int = 0
    """Tokens that the client had before this attempt."""
    journey: Journey = field(init=False)
    known_blocks: PromptBlocks | None = None
    """What `blocks` returned, until the attempt is queued again."""

    def __post_init__(self) -> None:
        assert isinstance(self.state, Queued)
        self.journey = self.request.journeys[self.choice]
        self.heard_s = self.state.since_s if self.choice else self.request.spec.arrived_s

    @property
    def name(self) -> str:
        """For the log: the client's id, then that of the choice on workers."""
        return f"{self.request.spec.request_id or '-'} ({self.request_id:x})"

    @property
    def is_new(self) -> bool:
        """Whether no worker has had anything of the request: other choices start when choice 0 has its prompt."""
        return self.number < 0 and self.choice == 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens of this attempt."""
        return len(self.emitted) - self.num_resumed

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Whether this choice requests the prompt's log probabilities."""
        return self.choice == 0 and self.request.wants_prompt_logprobs

    def hears(self, worker: Worker, number: int) -> bool:
        """Whether a report of ``worker`` about attempt ``number`` counts."""
        return number == self.number and self.state.hears(worker)

    def blocks(self, block_size: int) -> PromptBlocks:
        """Tokens whose KV must exist before the attempt's first token can be sampled, as blocks for the policy."""
        if self.known_blocks is None or self.known_blocks.block_size != block_size:
            spec = self.request.spec
            self.known_blocks = PromptBlocks(
                (*spec.prompt_tokens, *self.emitted) if self.emitted else spec.prompt_tokens,
                block_size,
                spec.cache_salt,
                # Prompt log probabilities require computing every prompt token.
                may_use_cache=spec.uses_cache and not self.asks_prompt_logprobs,
                known_hashes=spec.block_hashes,
            )
        return self.known_blocks
