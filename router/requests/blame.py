"""Which requests may have ended workers, and when those are tried again. Pure.

`pdserve.router.requests.failover` tells it of losses and tokens, and `pdserve.router.requests.placer` asks whether an
attempt has to wait.

A worker's end has no cause that the router could know, so blame goes by what was there when it happened: group testing
by binary splitting (Hwang, A method for detecting all defective members in a population by group testing, 1972)::

    free --- loss, the second or later, few tokens since the last ---> waits <----- loss, in a half -----.
     ^                                   1 s after its last loss, when  |                                |
     |                                   the groups before are through  v                                |
     `------------------------ 4 or 16 new tokens ---------------- on trial -----------------------------'
                                                                        |
                     loss alone, or the second as the only suspect      `---> fails

1. Each request counts the workers that ended while they computed it. One is an ordinary fail-over; with `MAX_LOSSES`
   the request is a *suspect*.
2. All suspects are a group, which is *on trial*: each begins `TRIAL_WAIT_S` after its last loss, on any worker, beside
   requests that are no suspects. If all are innocent, that is all. Of the choices of one client's request the first
   suspect stands for all: the others wait until it has passed.
3. A suspect passes with 4 new tokens after two losses, 16 after more, and is no suspect until its next loss. It has
   passed already with as many between two losses. Tokens may only repeat what a lost worker had computed and the router
   had not read; a request that ends its workers repeats no more than that in all, so it soon passes no more.
4. If a worker ends in the trial, the suspects that it computed are dealt to two halves. When the others have passed,
   the halves are tried one after the other, and halved in turn; then new suspects.
5. If the worker computed one suspect, and nothing else or for the second time (`MAX_TRIALS`) since that one passed, it
   is at fault and fails; later by one worker, two at most, for each that ended meanwhile and computed no suspect.
6. Others that lost their first worker in a trial, with as few tokens, are *bystanders*: they wait until all halves are
   tried, so that the next worker which one of them ends computes nothing that has ended one before.

A request that ends its workers thus ends three if it is alone, four beside others, and at most ceil(log2(k)) more if k
suspects are tried together, and two if other workers end, too; further ones only if it passes trials, and those that
compute other choices of it before they are suspects. An innocent suspect loses no more, and fails only if workers end
by other causes as often while they compute no suspect beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.attempt import Attempt, Decoding, Parked, Prefilling, State

MAX_LOSSES = 2
"""Lost workers after which a request that they computed is a suspect."""
MAX_TRIALS = 2
"""Workers that end while they compute a request as the only suspect until it fails, and the most excuses for that."""
MIN_TRIAL_TOKENS, MAX_TRIAL_TOKENS = 4, 16
"""New tokens with which a suspect passes after `MAX_LOSSES`, and after more."""
TRIAL_WAIT_S = 1.0
"""Seconds from a loss to a trial: by then, what ended together with the worker is known to be lost."""


@dataclass(slots=True)
class _Losses:
    """Of one request."""

    owner: object
    """The client's request: it has several if it asks for several choices."""
    num: int = 0
    num_trials: int = 0
    """Workers that ended while they computed it as the only suspect, since it last passed."""
    process: object = None
    """The last worker that ended while it computed this: its id and epoch."""
    try_at_s: float = 0.0
    num_apart: int = 0
    """`Blame._num_apart` when it became a suspect."""

    @property
    def num_trial_tokens(self) -> int:
        """New tokens with which a trial is passed."""
        return MIN_TRIAL_TOKENS if self.num <= MAX_LOSSES else MAX_TRIAL_TOKENS


class Blame:
    """Losses of the requests in flight, each choice with an id of its own."""

    def __init__(self) -> None:
        self._losses: dict[int, _Losses] = {}
        self._groups: list[dict[int, None]] = [{}]
        """Suspects. The first group is on trial, new suspects join the last."""
        self._halves: list[dict[int, None]] = []
        """Of the group on trial, which follow it, if it has lost a worker."""
        self._first: dict[object, int] = {}
        """Of each owner with suspects, the one that is tried before its others."""
        self._siblings: dict[int, None] = {}
        """The others: they join the last group when that one has passed or is over."""
        self._bystanders: set[int] = set()
        self._num_apart = 0
        """Workers that ended and computed no suspect."""
        self._process: object = None
        """Of the last worker that ended in a trial."""

    @property
    def on_trial(self) -> KeysView[int]:
        return self._groups[0].keys()

    def worker_lost(
        self,
        process: object,
        computed: Mapping[int, int],
        now_s: float,
        *,
        owners: Mapping[int, object] = MappingProxyType({}),
        is_part: bool = False,
    ) -> int | None:
        """Count the end of a worker for the requests that it computed; return the one whose fault it is, if known.

        Args:
            process: that of the worker. Its micro-batches are lost one after the other, and with each what the one
                before it held: they count once.
            computed: requests, and the new tokens of each since it was placed there.
            owners: the client's request of each, unless it has no other.
            is_part: the process had other micro-batches, which may have computed something, too.
        """
        known = {each: self._losses.setdefault(each, _Losses(owners.get(each, each))) for each in computed}
        losses = {request_id: each for request_id, each in known.items() if each.process != process}
        tried = dict.fromkeys(request_id for request_id in losses if request_id in self.on_trial)
        # Other suspects may have been in the micro-batches beside this one.
        may_be_more = is_part and (len(self.on_trial) > 1 or process == self._process)
        is_only = not may_be_more and len({losses[each].owner for each in tried}) == 1
        self._process = process if tried else self._process
        self._halve(tried)
        lost_owners = {each.owner for each in losses.values()}
        self._num_apart += not tried and not is_part and self._first.keys().isdisjoint(lost_owners)
        for request_id, each in losses.items():
            each.num += 1
            each.process = process
            each.try_at_s = now_s + TRIAL_WAIT_S
            if request_id in tried:
                each.num_trials += is_only
            elif each.num >= MAX_LOSSES and computed[request_id] < each.num_trial_tokens:
                is_first = self._first.setdefault(each.owner, request_id) == request_id
                (self._groups[-1] if is_first else self._siblings)[request_id] = None
                each.num_apart = self._num_apart
                self._bystanders.discard(request_id)
            elif process == self._process and len(self._groups) > 1 and computed[request_id] < each.num_trial_tokens:
                self._bystanders.add(request_id)
        least = MAX_TRIALS - (len(lost_owners) == 1 and not is_part)
        excuses = {each: min(MAX_TRIALS, self._num_apart - losses[each].num_apart) for each in tried}
        return next((each for each in tried if losses[each].num_trials >= least + excuses[each]), None)

    def _halve(self, tried: Iterable[int]) -> None:
        """Deal suspects on trial, which have lost a worker, to the two groups that are tried next."""
        for suspect in tried:
            if not self._halves:
                self._halves = [{}, {}]
                self._groups[1:1] = self._halves if len(self._groups) > 1 else [*self._halves, {}]
            del self._groups[0][suspect]
            min(self._halves, key=len)[suspect] = None
        self._next_trial()

    def _next_trial(self) -> list[int]:
        """Begin the next trial if the last one is over; return the requests that waited for that."""
        released: list[int] = []
        while len(self._groups) > 1 and not self._groups[0]:
            self._halves = []
            del self._groups[0]
            released = list(self._groups[0])
        if len(self._groups) == 1:
            released += self._bystanders
            self._bystanders.clear()
        return released

    def num_losses(self, request_id: int) -> int:
        """Workers that ended while they computed the request."""
        return self._losses[request_id].num

    def is_held(self, request_id: int) -> bool:
        """Whether the request is a suspect or a bystander."""
        return any(request_id in held for held in (self._bystanders, self._siblings, *self._groups))

    def has_to_wait(self, request_id: int, now_s: float) -> bool:
        """Whether the request has to wait for a trial: its own, or those of others."""
        if request_id in self.on_trial:
            return now_s < self._losses[request_id].try_at_s
        return self.is_held(request_id)

    def token_received(self, request_id: int, num_new_tokens: int) -> list[int]:
        """A request has ``num_new_tokens`` since it was placed. If that ends the trial, return what waited for it."""
        if request_id not in self.on_trial or num_new_tokens < self._losses[request_id].num_trial_tokens:
            return []
        self._losses[request_id].num_trials = 0
        return self._acquit(request_id)

    def forget(self, request_id: int) -> list[int]:
        """The request is over. If that ends the trial, return what waited for it."""
        self._bystanders.discard(request_id)
        released = self._acquit(request_id)
        self._losses.pop(request_id, None)
        return released

    def _acquit(self, request_id: int) -> list[int]:
        """It is no suspect any more: its siblings are to be tried."""
        for waiting in (self._siblings, *self._groups):
            waiting.pop(request_id, None)
        released: list[int] = []
        owner = self._losses[request_id].owner if request_id in self._losses else None
        if self._first.get(owner) == request_id:
            del self._first[owner]
            released = [each for each in self._siblings if self._losses[each].owner == owner]
            for each in released:
                del self._siblings[each]
                self._groups[-1][each] = None
        return released + self._next_trial()


def computed_by(worker: Worker, held: Sequence[Attempt]) -> list[Attempt]:
    """Of the attempts that ``worker`` holds, those which its last steps may have had rows of: what it said to have
    started or reserved, and, because it may have ended before that was heard, the earliest others: answers that its
    batch holds, and prompts that two steps hold."""
    computed = {attempt for attempt in held if _is_computed_by(worker, attempt.state)}
    unheard = [attempt for attempt in held if attempt.state.unreported is worker]
    bound = [attempt for attempt in unheard if isinstance(attempt.state, Parked)]
    computed.update(bound[: worker.max_batch_size])
    prompts = [attempt for attempt in unheard if isinstance(attempt.state, Prefilling)]
    num_tokens = 0
    for attempt in sorted(prompts, key=lambda attempt: attempt.request.spec.arrived_s):
        if num_tokens >= 2 * worker.max_batch_tokens:
            break
        num_tokens += attempt.blocks(worker.block_size).num_tokens
        computed.add(attempt)
    return [attempt for attempt in held if attempt in computed]


def _is_computed_by(worker: Worker, state: State) -> bool:
    """Whether steps of ``worker``, which holds the attempt, may have rows of it, as far as it has said."""
    match state:
        case Prefilling():
            return state.started_s is not None
        case Parked() if worker is state.prefill:
            return state.started_s is not None and state.first_token_s is None
        case Parked():
            return state.unreported is None
    return isinstance(state, Decoding) and worker is state.worker
