"""The four figures of an engine on this machine's cores, each beside the cost model's prediction: throughput of a full
batch of equal requests, time to the first token, time per output token, and requests per second of a trace.

Run by `pdserve bench engine`. A worker's step loop, scheduler and executor compute in this process: nothing is sent,
and no Ray runs. Requests of a case are there at once, and their prompts share nothing unless a trace says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.step import Executor
from pdserve.engine.worker.loop import StepLoop, StepReport, Wait
from pdserve.engine.worker.messages import AddRequest
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.engine.worker.step_times import StepTimes
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.loadgen.load import PromptWriter
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import Hardware
from pdserve.model.cost.profiling import ProfiledModel, profiled_executor
from pdserve.planner import wording
from pdserve.planner.report.page import SERIES, Chart, Column, card, page, svg, table
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.planner.workload.workload import Workload

_DEADLINE_S = 86400.0
COLUMNS = ("figure", "requests", "prompt", "measured", "predicted", "ratio")
TTFT, TPOT, THROUGHPUT, TRACE = "TTFT", "TPOT", "throughput", "trace"

Progress = Callable[[float, str], None]
"""Receives the share of cases that are done and a line about the current one."""


class Question(NamedTuple):
    """What to measure."""

    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    output_tokens: int
    trace: Workload
    num_requests: int
    """Of the trace."""
    rounds: int
    budget_s: float
    """Cases that would exceed it are left out, the largest first."""


class Figure(NamedTuple):
    name: str
    batch: int
    """Requests at once."""
    prompt_tokens: int
    """Of each request; the mean of a trace."""
    measured: float
    """Seconds to the mean request's first token, or of the median step per output token; output tokens per second; or
    requests per second."""
    predicted: float

    def cells(self) -> tuple[str, ...]:
        unit = {THROUGHPUT: " tokens/s", TRACE: " requests/s"}.get(self.name)
        values = self.measured, self.predicted
        shown = [wording.number(each) + unit if unit else wording.seconds(each) for each in values]
        return (self.name, str(self.batch), str(self.prompt_tokens), *shown, f"{self.measured / self.predicted:.2f}")


class Answer(NamedTuple):
    figures: list[Figure]
    left_out: list[str]
    """Cases for which there was no memory or time."""


class _Case(NamedTuple):
    """Equal requests at once."""

    batch: int
    num_prompt_tokens: int
    num_output_tokens: int

    def __str__(self) -> str:
        return f"{self.batch} x ({self.num_prompt_tokens} + {self.num_output_tokens}) tokens"

    @property
    def length(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def num_blocks(self, block_size: int) -> int:
        return self.batch * -(-self.length // block_size)

    def about_s(self, cost: CostModel) -> float:
        decode_s = cost.decode_s(self.batch, self.batch * self.num_prompt_tokens)
        return self.batch * cost.prefill_s(self.num_prompt_tokens) + (self.num_output_tokens - 1) * decode_s

    def requests(self) -> list[SimulatedRequest]:
        of_each = SimulatedRequest(0.0, self.num_prompt_tokens, self.num_output_tokens)
        return [of_each] * self.batch


class _Run(NamedTuple):
    """Pairs are measured and predicted seconds."""

    total_s: tuple[float, float]
    num_tokens: int
    first_tokens_s: list[tuple[float, float]]
    decodes_s: list[tuple[float, float]]
    """Of each step that only decodes all requests, with the loop's turn."""


def measure_engine(model: ProfiledModel, hardware: Hardware, question: Question, progress: Progress) -> Answer:
    """Measure all cases that fit into the memory and the time.

    Raises:
        ValueError: unusable weights, too little memory, or hardware that does not have the model's dtypes.
    """
    limits, cost = model.limits(), CostModel(model.config.shape, hardware, model.precision)
    max_len = min(limits.max_model_len, limits.num_kv_blocks * limits.block_size)
    middle = sorted(question.prompt_tokens)[len(question.prompt_tokens) // 2]
    cases = [_Case(batch, length, 1) for batch in question.batches for length in question.prompt_tokens]
    cases += [_Case(batch, middle, question.output_tokens) for batch in question.batches]
    answer, fitting = Answer([], []), []
    for case in cases:
        does_fit = case.length <= max_len and case.num_blocks(limits.block_size) <= limits.num_kv_blocks
        fitting.append(case) if does_fit else answer.left_out.append(f"{case}: does not fit")
    fitting.sort(key=lambda case: case.about_s(cost))
    sample = question.trace.draw(question.num_requests, max_model_len=max_len)
    num_blocks = max([-(-max_len // limits.block_size), *(case.num_blocks(limits.block_size) for case in fitting)])
    progress(0.0, "loading the model")
    with profiled_executor(model, num_blocks) as (executor, layout):
        engine = _Engine(model, executor, layout, cost)
        engine.run(_Case(1, min(middle, max_len - 2), 2).requests())  # the first steps of a process take longer
        started_s, slowness = time.perf_counter(), 1.0
        for index, case in enumerate(fitting):
            progress(index / (len(fitting) + 1), str(case))
            expected_s = question.rounds * slowness * case.about_s(cost)
            if time.perf_counter() - started_s + expected_s > question.budget_s:
                answer.left_out.append(f"{case}: takes about {wording.seconds(expected_s)}, raise --budget")
                continue
            runs = [engine.run(case.requests()) for _ in range(question.rounds)]
            slowness = runs[-1].total_s[0] / runs[-1].total_s[1]
            answer.figures.extend(_figures(case, runs, is_full=case.batch == max(question.batches)))
        progress(len(fitting) / (len(fitting) + 1), f"{len(sample.conversations)} requests of {question.trace.name}")
        run = engine.run(sample.conversations)
        rate = [len(sample.conversations) / total_s for total_s in run.total_s]
        mean = round(sample.statistics().mean_prompt_tokens)
        answer.figures.append(Figure(TRACE, len(sample.conversations), mean, rate[0], rate[1]))
    names = (TTFT, TPOT, THROUGHPUT, TRACE)
    answer.figures.sort(key=lambda each: (names.index(each.name), each.batch, each.prompt_tokens))
    return answer


def _figures(case: _Case, runs: Sequence[_Run], *, is_full: bool) -> Iterator[Figure]:
    """Medians over the rounds."""

    def figure(name: str, pairs: Sequence[tuple[float, ...]]) -> Figure:
        measured, predicted = map(statistics.median, zip(*pairs, strict=True))
        return Figure(name, case.batch, case.num_prompt_tokens, measured, predicted)

    if case.num_output_tokens == 1:
        yield figure(TTFT, [tuple(map(statistics.fmean, zip(*run.first_tokens_s, strict=True))) for run in runs])
        return
    yield figure(TPOT, [pair for run in runs for pair in run.decodes_s])
    if is_full:
        yield figure(THROUGHPUT, [tuple(run.num_tokens / total_s for total_s in run.total_s) for run in runs])


class _Engine:
    """Runs requests through a step loop, in this thread."""

    def __init__(self, model: ProfiledModel, executor: Executor, layout: KvLayout, cost: CostModel) -> None:
        self._model, self._executor, self._layout, self._cost = model, executor, layout, cost
        self._limits = model.config.limits(model.max_model_len)
        self._writer = PromptWriter(self._limits.vocab_size, seed=0)

    def run(self, requests: Sequence[SimulatedRequest]) -> _Run:
        """Answer ``requests``, which arrive together, with an empty prefix cache.

        Raises:
            ValueError: one cannot be answered.
        """
        made = [self._request(number, request) for number, request in enumerate(requests)]
        times, recorder = StepTimes(self._cost), _Recorder(len(made))
        scheduler = Scheduler(
            BlockPool(self._layout.num_blocks, self._layout.block_size),
            self._limits,
            mint_handle=lambda: b"",  # nothing is handed off
            max_batch_tokens=self._model.max_batch_tokens,
            max_batch_size=self._model.max_batch_size,
        )
        loop = StepLoop(scheduler=scheduler, executor=self._executor, sink=recorder, times=times)
        for request in made:
            loop.handle(AddRequest(RequestKey(0, request.request_id, 0), request, recorder.now_s), recorder.now_s)
        while recorder.num_left:
            if loop.turn(recorder.now_s) is Wait.STEP:
                loop.step_ended(loop.in_flight[0].handle.result(), recorder.now_s)
        return recorder.run()

    def _request(self, number: int, request: SimulatedRequest) -> GenerationRequest:
        sampling = SamplingParams(seed=number, max_tokens=request.num_output_tokens, ignore_eos=True)
        tokens = tuple(self._writer.tokens(request))
        return GenerationRequest(request_id=number, prompt_tokens=tokens, sampling=sampling, deadline_s=_DEADLINE_S)


class _Recorder:
    """Sink of a step loop that keeps when tokens came, and when they should have."""

    def __init__(self, num_requests: int) -> None:
        self._started_s = time.perf_counter()
        self.num_left = self._num_requests = num_requests
        self._num_tokens = 0
        self._ended_s = (0.0, 0.0)
        """When the last step ended, measured and predicted."""
        self._first_tokens_s: list[tuple[float, float]] = []
        self._decodes_s: list[tuple[float, float]] = []

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._started_s

    def publish(self, report: StepReport) -> None:
        if report.step is not None and (prediction := report.step.prediction) is not None:
            last_s, self._ended_s = self._ended_s, (self.now_s, self._ended_s[1] + prediction.predicted_s)
            if not prediction.has_prefill and prediction.num_rows == self._num_requests:
                self._decodes_s.append((self._ended_s[0] - last_s[0], prediction.predicted_s))
        for event in report.events:
            if isinstance(event, RequestEvent) and event.kind in (RequestEventKind.REJECTED, RequestEventKind.FAILED):
                raise ValueError(f"a request was not answered: {event.message}")
            if isinstance(event, TokenEvent):
                self._num_tokens += 1
                if event.index == 0:
                    self._first_tokens_s.append(self._ended_s)
                self.num_left -= bool(event.finish)

    def run(self) -> _Run:
        return _Run(self._ended_s, self._num_tokens, self._first_tokens_s, self._decodes_s)


def engine_html(title: str, answer: Answer) -> str:
    """The figures as a page with charts."""
    ttft, tpot = ([each for each in answer.figures if each.name == name] for name in (TTFT, TPOT))
    by_batch = {
        batch: [each for each in ttft if each.batch == batch] for batch in sorted({each.batch for each in ttft})
    }
    lines = {f"{batch} at once": [(each.prompt_tokens, each) for each in some] for batch, some in by_batch.items()}
    note = "Measured, and dashed as the cost model predicts it."
    charts = [
        Chart("Time to the first token", _lines(lines, "prompt tokens"), note),
        Chart("Time per output token", _lines({TPOT: [(each.batch, each) for each in tpot]}, "requests at once"), note),
    ]
    columns = [Column(name, is_number=name != "figure") for name in COLUMNS]
    cells = table(columns, [each.cells() for each in answer.figures], marks_first=False)
    left_out = "".join(f"<p class=soft>Left out: {escape(each)}</p>" for each in answer.left_out)
    cards = "".join(map(card, charts))
    return page(title, f"<h1>{escape(title)}</h1><div class=cards>{cards}</div>{cells}{left_out}")


def _lines(lines: dict[str, list[tuple[int, Figure]]], label: str) -> str:
    def draw(axes: Any) -> None:
        for index, (name, points) in enumerate(lines.items()):
            color, at = SERIES[index % len(SERIES)], [place for place, _ in points]
            axes.plot(at, [1e3 * each.measured for _, each in points], "o-", color=color, label=name)
            axes.plot(at, [1e3 * each.predicted for _, each in points], "--", color=color)
        axes.set(xlabel=label, ylabel="ms", xscale="log", yscale="log")

    return svg(draw)
