"""The step loop: owns a worker's scheduler, the order of its steps, and the set of live requests.

Knows no clock, thread, socket or protobuf, so two drivers run the same class: the live driver
(`pdserve.engine.worker.live_loop`) with a thread and real time, the planner's simulator with virtual time. A driver
passes messages with `StepLoop.handle`, turns the loop with `StepLoop.turn`, and ends steps with
`StepLoop.step_ended`. Events leave as a `StepReport` through one `ReportSink`.

With an executor of pipeline depth 2, step N + 1 is planned and submitted before the result of step N is processed.

A row that cannot be computed fails its own request. A failed step fails only its own requests, plus those of the next
step if that was already submitted with rows of the same sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from math import log2
from typing import NamedTuple, Protocol

from pdserve.contracts.events import (
    ClientEvent,
    PromptLogprobsEvent,
    RefusalCode,
    RequestEvent,
    RequestEventKind,
    RequestKey,
    SchedulerLoad,
    TokenEvent,
)
from pdserve.contracts.request import GenerationRequest, Grammar, KvSource
from pdserve.contracts.step import Executor, StepBatch, StepHandle, StepOutput
from pdserve.engine.scheduling.interface import PullResult, TransferEvent
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import CacheEvents
from pdserve.model.cost.cost_model import CostModel, OnlineCorrection

MAX_LIVE_REQUESTS = 16384
"""Maximum number of live requests on a worker, waiting ones included; more are refused."""

MAX_FAILED_STEPS_IN_A_ROW = 16
"""After this many consecutive failures the executor is considered broken and the loop raises."""

_NO_LOAD = SchedulerLoad()
_NO_CACHE_EVENTS = CacheEvents([], [])


# Messages to the loop


class AddRequest(NamedTuple):
    """Prefill here."""

    key: RequestKey
    request: GenerationRequest
    received_s: float
    """On the driver's clock. Objectives count from here, not from when the loop handles the message."""


class PrepareRequest(NamedTuple):
    """Decode a request here whose prompt another worker prefills."""

    key: RequestKey
    request: GenerationRequest
    source: KvSource
    received_s: float


class CancelRequest(NamedTuple):
    key: RequestKey


class GrammarCompiled(NamedTuple):
    """Requests with this grammar no longer have to wait for it: it is compiled, or cannot be."""

    grammar: Grammar


class SessionEnded(NamedTuple):
    """A session has ended for good: cancel all its requests."""

    session: int


class LeaseChanged(NamedTuple):
    """A decode worker began to pull a parked prompt, or left without releasing it."""

    handle: bytes
    is_leased: bool


class PromptReleased(NamedTuple):
    """The puller has every block of a parked prompt, or a pull of lent blocks has ended."""

    handle: bytes


class LendPrefix(NamedTuple):
    """Another worker asks for cached blocks; a `GrantEvent` answers, and `PromptReleased` follows."""

    handle: bytes
    """Distinct from that of any other pull."""
    hashes: tuple[bytes, ...]
    """Of the blocks, in order."""


class BlocksRestored(NamedTuple):
    """The tier has ended a restore, with all blocks or fewer."""

    restore_id: int


class StartDrain(NamedTuple):
    """Refuse new work and finish running requests."""


Message = (
    AddRequest
    | PrepareRequest
    | CancelRequest
    | GrammarCompiled
    | SessionEnded
    | LeaseChanged
    | PromptReleased
    | LendPrefix
    | PullResult
    | BlocksRestored
    | StartDrain
)


# Step times


class Prediction(NamedTuple):
    has_prefill: bool
    predicted_s: float
    """Before correction."""
    is_typical: bool
    """The step only computes and samples its rows' tokens, so its duration predicts that of others."""
    num_rows: int


class _CorrectionByTokens:
    """Observed over predicted seconds of decode steps by their new tokens, guesses included. What products of a few
    rows take rises in steps, which the cost model smooths, and guesses are chosen by the differences."""

    _NEWEST_WEIGHT = 1 / 16
    _LIMIT = 2.0
    """A step counts as this many times as long as expected at most: it may have been stalled."""
    _LOWEST = 0.1
    """Least ratio: of a step in no time, too, which emulation may have."""

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}
        self._nearest: dict[int, int] = {}
        """Observed size nearest to each that was asked for."""

    def ratio(self, num_tokens: int) -> float:
        """That of steps of about as many tokens, as far as some were observed; 1 before any was."""
        if not self._ratios:
            return 1.0
        size = _size(num_tokens)
        nearest = self._nearest.get(size)
        if nearest is None:
            nearest = self._nearest[size] = min(self._ratios, key=lambda known: abs(known - size))
        return self._ratios[nearest]

    def observe(self, num_tokens: int, predicted_s: float, observed_s: float) -> None:
        size = _size(num_tokens)
        newest = min(max(observed_s / predicted_s, self._LOWEST), self._LIMIT * self.ratio(num_tokens))
        if size not in self._ratios:
            self._nearest.clear()
        last = self._ratios.get(size, newest)
        self._ratios[size] = last + self._NEWEST_WEIGHT * (newest - last)


def _size(num_tokens: int) -> int:
    """Numbers of tokens that count as one: each up to 8, then four for each doubling."""
    return num_tokens if num_tokens <= 8 else 8 + int(4 * log2(num_tokens / 8))


class StepTimes:
    """Predicted and observed step times, and the corrections between them. Steps with prefill rows and pure decode
    steps have different errors. A decode step is predicted from its total context, as the router does, so that the
    correction makes up for it. Decode steps with guesses are corrected apart, beside others of as many tokens."""

    def __init__(self, cost: CostModel, draft: CostModel | None = None) -> None:
        """
        Args:
            draft: of the model that guesses; ``None`` if none does.
        """
        self._cost = cost
        self._prefill = OnlineCorrection()
        self._decode = OnlineCorrection()
        self._by_tokens = _CorrectionByTokens()
        self._draft = draft
        self._drafting = _CorrectionByTokens()
        """Of `_draft_s`, by the rows of the step."""

    def predict(self, batch: StepBatch) -> Prediction:
        num_rows = len(batch.rows)
        is_typical = not (batch.swap_outs or batch.swap_ins or any(row.prompt_targets for row in batch.rows))
        if batch.num_new_tokens == num_rows:
            predicted_s = self._cost.decode_s(num_rows, sum([row.cached_length for row in batch.rows]))
            return Prediction(False, predicted_s, is_typical, num_rows)
        predicted_s = self._cost.step_s((row.num_new_tokens, row.cached_length) for row in batch.rows)
        return Prediction(True, predicted_s, is_typical, num_rows)

    def mixed_s(self, chunks: Iterable[tuple[int, int]], num_rows: int, num_context_tokens: int) -> float:
        """Expected duration of a step with prefill.

        Args:
            chunks: (new tokens, cached tokens) of each.
            num_rows: further rows, which decode.
            num_context_tokens: cached tokens of those.
        """
        return self._cost.step_s(chunks, num_rows, num_context_tokens) * self._prefill.factor

    def corrected_s(self, prediction: Prediction) -> float:
        """Expected duration of a step in seconds, given the durations observed so far."""
        return prediction.predicted_s * self._correction(prediction).factor

    def by_guesses(self, batch: StepBatch) -> Callable[[int, int], float]:
        """Return the expected duration of a decode step by the number of guesses in it, and of the row with most."""
        prediction, guesses_s, ratio = self.predict(batch), self._cost.guesses_s, self._by_tokens.ratio
        num_rows, predicted_s = prediction.num_rows, prediction.predicted_s
        draft_s = self._draft_s(prediction) * self._drafting.ratio(num_rows)

        def seconds(num_guesses: int, depth: int) -> float:
            step_s = predicted_s + guesses_s(num_rows, num_guesses)
            return step_s * ratio(num_rows + num_guesses) + depth * draft_s

        return seconds

    def observe(
        self, prediction: Prediction, duration_s: float, guesses: Collection[int] = (), guessing_s: float = 0.0
    ) -> None:
        """Correct later predictions by the duration of a typical step.

        Args:
            guesses: number of guesses of each row that had some.
            guessing_s: time that they took before the step.
        """
        num_guesses = sum(guesses)
        if not prediction.is_typical:
            return
        if num_guesses and guessing_s and self._draft is not None:
            self._drafting.observe(prediction.num_rows, self._draft_s(prediction) * max(guesses), guessing_s)
        if not prediction.has_prefill:
            predicted_s = self._with_guesses_s(prediction, num_guesses)
            self._by_tokens.observe(prediction.num_rows + num_guesses, predicted_s, duration_s)
        if not num_guesses:
            self._correction(prediction).observe(prediction.predicted_s, duration_s)

    def _draft_s(self, prediction: Prediction) -> float:
        """Predicted seconds of making a guess of each row, before correction."""
        return 0.0 if self._draft is None else self._draft.decode_s(prediction.num_rows, 0)

    def _with_guesses_s(self, prediction: Prediction, num_guesses: int) -> float:
        """Predicted seconds of a decode step with guesses, before correction."""
        return prediction.predicted_s + self._cost.guesses_s(prediction.num_rows, num_guesses)

    @property
    def prefill_correction(self) -> float:
        return self._prefill.factor

    @property
    def decode_correction(self) -> float:
        return self._decode.factor

    def _correction(self, prediction: Prediction) -> OnlineCorrection:
        return self._prefill if prediction.has_prefill else self._decode


# Reports of the loop


class Step(NamedTuple):
    """A submitted step."""

    step_id: int
    num_new_tokens: int
    prediction: Prediction | None
    handle: StepHandle


@dataclass(slots=True)
class StepReport:
    """Everything since the last report, in order within each list."""

    orders: list[TransferEvent] = field(default_factory=list)
    """To the transfer process."""
    events: list[ClientEvent] = field(default_factory=list)
    """To the routers."""
    pulls: list[PullResult] = field(default_factory=list)
    """Pulls that ended."""
    step: Step | None = None
    """Step that completed."""
    step_s: float = 0.0
    """Its duration in seconds."""

    # Added by the live driver, for the routers.
    load: SchedulerLoad = _NO_LOAD
    cache: CacheEvents = _NO_CACHE_EVENTS
    prefill_correction: float = 1.0
    decode_correction: float = 1.0
    is_draining: bool = False


class ReportSink(Protocol):
    """Receives reports on the driver's thread, which waits only while the sink is far behind."""

    def publish(self, report: StepReport) -> None: ...


class Busy(str):
    """Why a grammar was not compiled, though it may be later."""


class GrammarSource(Protocol):
    """Compiled grammars of the worker."""

    def find(self, grammar: Grammar) -> object | str | None:
        """Return the compiled grammar, why it cannot be compiled, or ``None`` while it is being compiled: a
        `GrammarCompiled` follows. Whoever keeps a compiled grammar keeps it from being dropped."""
        ...


class Wait(Enum):
    """Condition a driver waits for before the next turn."""

    NOTHING = "nothing"
    STEP = "step"
    """End of the oldest step in flight."""
    MESSAGE = "message"
    """A message, or the time `StepLoop.next_deadline_s`: the loop is idle."""


class StepLoop:
    """Runs one scheduler over one executor. Not thread-safe: one driver owns it."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        sink: ReportSink,
        grammars: GrammarSource | None = None,
        times: StepTimes | None = None,
    ) -> None:
        """
        Args:
            grammars: ``None`` if no request has one.
            times: predicts and corrects step times; ``None`` if the driver knows them, as a simulator does.
        """
        self.scheduler = scheduler
        self._executor = executor
        self._sink = sink
        self._times = times
        self._grammars = grammars
        self._live: dict[RequestKey, object] = {}
        """Live requests, each with its compiled grammar, if any."""
        self._awaiting_grammar: dict[RequestKey, AddRequest | PrepareRequest] = {}
        self._in_flight: deque[Step] = deque()
        self._report = StepReport()
        self._num_failed_in_a_row = 0
        self.is_draining = False
        self.expected_step_s = 0.0
        """Expected duration in seconds of the last submitted step; 0 without ``times``."""

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def oldest_step(self) -> Step:
        """The step that must end first. There must be one."""
        return self._in_flight[0]

    @property
    def is_drained(self) -> bool:
        """Whether a drain was requested and no work is left."""
        return self.is_draining and not self._in_flight and not self._live

    def next_deadline_s(self) -> float | None:
        """Time at which an idle loop must turn to expire something; ``None`` if never."""
        return self.scheduler.next_deadline_s()

    def handle(self, message: Message, now_s: float) -> None:
        """Handle a message. Its events leave with the next report."""
        scheduler = self.scheduler
        match message:
            case AddRequest() | PrepareRequest():
                if self._accept(message.key):
                    self._begin(message)
            case CancelRequest(key):
                self._cancel(key, now_s)
            case GrammarCompiled(grammar):
                for waiting in list(self._awaiting_grammar.values()):
                    if waiting.request.sampling.grammar == grammar:
                        self._begin(self._awaiting_grammar.pop(waiting.key))
            case SessionEnded(session):
                for key in sorted(key for key in self._live if key.session == session):
                    self._cancel(key, now_s)
            case LeaseChanged(handle, is_leased):
                scheduler.set_leased(handle, is_leased)
            case PromptReleased(handle):
                scheduler.released(handle)
            case LendPrefix(handle, hashes):
                scheduler.lend(handle, hashes)
            case PullResult():
                self._report.pulls.append(message)
                scheduler.pull_done(message, now_s)
            case BlocksRestored(restore_id):
                scheduler.restored(restore_id)
            case StartDrain():
                self.is_draining = True

    def _accept(self, key: RequestKey) -> bool:
        """Whether to pass the request to the scheduler. A refusal emits an event."""
        if self.is_draining:
            code, reason = RefusalCode.DRAINING, "draining"
        elif key in self._live:
            code, reason = RefusalCode.INVALID, "the worker already runs this attempt"
        elif len(self._live) >= MAX_LIVE_REQUESTS:
            code, reason = RefusalCode.OVERLOADED, f"the worker holds {MAX_LIVE_REQUESTS} requests already"
        else:
            self._live[key] = None
            return True
        self._report.events.append(RequestEvent(key, RequestEventKind.REJECTED, reason, refusal=code))
        return False

    def _begin(self, message: AddRequest | PrepareRequest) -> None:
        """Pass an accepted request to the scheduler, now or once its grammar is compiled."""
        key, grammar = message.key, message.request.sampling.grammar
        if grammar is not None:
            found = "this worker has no grammars" if self._grammars is None else self._grammars.find(grammar)
            if found is None:
                self._awaiting_grammar[key] = message
                return
            if isinstance(found, str):
                reason = f"the grammar of the request cannot be used: {found}"
                code = RefusalCode.OVERLOADED if isinstance(found, Busy) else RefusalCode.INVALID
                rejected = RequestEvent(key, RequestEventKind.REJECTED, reason, refusal=code)
                self._collect([rejected])
                return
            self._live[key] = found
        if isinstance(message, AddRequest):
            self.scheduler.add(key, message.request, message.received_s)
        else:
            self.scheduler.prepare(key, message.request, message.source, message.received_s)

    def _cancel(self, key: RequestKey, now_s: float) -> None:
        if self._awaiting_grammar.pop(key, None) is None:
            self.scheduler.cancel(key, now_s)
        else:
            self._collect([RequestEvent(key, RequestEventKind.CANCELLED)])

    def turn(self, now_s: float) -> Wait:
        """Plan and submit a step, if there is one. After `Wait.STEP` the driver must call `step_ended` or
        `step_failed`.

        Publishes the plan's events first, because a pull or a handoff must not wait for a computation. Publishes
        again unless the driver is to wait for a step, whose end publishes.
        """
        batch = self.scheduler.plan(now_s)
        self._collect(self.scheduler.take_events())
        if self._report.events or self._report.orders:
            self._publish()
        if batch is not None:
            self._submit(batch)
        if self._in_flight and (batch is None or len(self._in_flight) >= self._executor.pipeline_depth):
            return Wait.STEP
        self._publish()
        return Wait.NOTHING if self._in_flight else Wait.MESSAGE

    def step_ended(self, output: StepOutput, now_s: float) -> None:
        """Handle the results of the oldest step.

        Raises:
            RuntimeError: no row could be computed in each of the last `MAX_FAILED_STEPS_IN_A_ROW` steps.
        """
        step = self._in_flight.popleft()
        self.scheduler.complete(output, now_s)
        if self._times is not None and step.prediction is not None:
            guesses = output.num_guesses.values()
            self._times.observe(step.prediction, output.duration_s, guesses, output.guessing_s)
        self._report.step, self._report.step_s = step, output.duration_s + output.guessing_s
        self.flush()
        if output.failed and not any(output.sampled):
            self._count_failure(next(iter(output.failed.values())))
        else:
            self._num_failed_in_a_row = 0

    def step_failed(self, error: RuntimeError, now_s: float) -> None:
        """Handle ``error``, raised by the oldest step, which fails all of its requests.

        Raises:
            RuntimeError: each of the last `MAX_FAILED_STEPS_IN_A_ROW` steps failed.
        """
        step = self._in_flight.popleft()
        self.scheduler.fail_step(step.step_id, str(error), now_s)
        self.flush()
        self._count_failure(str(error))

    def _count_failure(self, message: str) -> None:
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
            raise RuntimeError(f"{self._num_failed_in_a_row} steps failed in a row, the last with: {message}")

    def flush(self) -> None:
        """Publish the scheduler's events after a driver called the scheduler directly."""
        self._collect(self.scheduler.take_events())
        self._publish()

    def _submit(self, batch: StepBatch) -> None:
        prediction = None
        if self._times is not None:
            prediction = self._times.predict(batch)
            self.expected_step_s = self._times.corrected_s(prediction)
        handle: StepHandle
        try:
            handle = self._executor.submit(batch)
        except RuntimeError as error:  # fails in step order
            handle = failed = Future[StepOutput]()
            failed.set_exception(error)
        self._in_flight.append(Step(batch.step_id, batch.num_new_tokens, prediction, handle))

    def _collect(self, events: Iterable[ClientEvent | TransferEvent]) -> None:
        report = self._report
        for event in events:
            if isinstance(event, TokenEvent):
                if event.finish:
                    self._live.pop(event.key, None)
            elif isinstance(event, RequestEvent):
                if event.kind.is_terminal:
                    self._live.pop(event.key, None)
            elif not isinstance(event, PromptLogprobsEvent):
                report.orders.append(event)
                continue
            report.events.append(event)

    def _publish(self) -> None:
        report, self._report = self._report, StepReport()
        self._sink.publish(report)
