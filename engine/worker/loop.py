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
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
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
from pdserve.contracts.request import Grammar
from pdserve.contracts.step import Executor, StepBatch, StepHandle, StepOutput
from pdserve.engine.scheduling.interface import PullResult, TransferEvent
from pdserve.engine.worker.messages import (
    AddRequest,
    BlocksRestored,
    CancelRequest,
    GrammarCompiled,
    LeaseChanged,
    LendPrefix,
    Message,
    PromptReleased,
    SessionEnded,
    StartDrain,
)
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.engine.worker.step_times import Prediction, StepTimes
from pdserve.kv_transfer.block_pool import CacheEvents

MAX_LIVE_REQUESTS = 16384
"""Maximum number of live requests on a worker, waiting ones included; more are refused."""

MAX_FAILED_STEPS_IN_A_ROW = 16
"""After this many consecutive failures the executor is considered broken and the loop raises."""

_NO_LOAD = SchedulerLoad()
_NO_CACHE_EVENTS = CacheEvents([], [])


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


class Wait(Enum):
    """Condition a driver waits for before the next turn."""

    NOTHING = "nothing"
    STEP = "step"
    """End of the oldest step in flight."""
    MESSAGE = "message"
    """A message, or the time `Scheduler.next_deadline_s`: the loop is idle."""


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
        self._awaiting_grammar: dict[RequestKey, AddRequest] = {}
        self.in_flight: deque[Step] = deque()
        """Submitted steps in order; callers must not modify it."""
        self._report = StepReport()
        self._num_failed_in_a_row = 0
        self.is_draining = False
        self.expected_step_s = 0.0
        """Expected duration in seconds of the last submitted step; 0 without ``times``."""

    @property
    def is_drained(self) -> bool:
        """Whether a drain was requested and no work is left."""
        return self.is_draining and not self.in_flight and not self._live

    def handle(self, message: Message, now_s: float) -> None:
        """Handle a message. Its events leave with the next report."""
        scheduler = self.scheduler
        match message:
            case AddRequest():
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

    def _begin(self, message: AddRequest) -> None:
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
        if message.source is None:
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
        if self.in_flight and (batch is None or len(self.in_flight) >= self._executor.pipeline_depth):
            return Wait.STEP
        self._publish()
        return Wait.NOTHING if self.in_flight else Wait.MESSAGE

    def step_ended(self, output: StepOutput, now_s: float) -> None:
        """Handle the results of the oldest step.

        Raises:
            RuntimeError: no row could be computed in each of the last `MAX_FAILED_STEPS_IN_A_ROW` steps.
        """
        step = self.in_flight.popleft()
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
        step = self.in_flight.popleft()
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
        self.in_flight.append(Step(batch.step_id, batch.num_new_tokens, prediction, handle))

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
