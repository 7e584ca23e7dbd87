"""HTTP edge under a real uvicorn on a loopback port, over a generator that a test scripts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from fastapi import FastAPI

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, RouterConfig, SloConfig, Tier
from pdserve.contracts.events import RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, Outcome
from pdserve.contracts.step import TokenLogprobs
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.http.app import create_app
from pdserve.router.http.keys import KeyFile
from pdserve.router.http.protocol import BoundedHttpProtocol
from pdserve.router.metrics import RouterMetrics
from pdserve.router.plain_histogram import PlainSeries
from pdserve.router.record import RecordSink, RequestRecord
from pdserve.router.requests.request import GenerationError, Request
from pdserve.router.text.tokenizer import ChatTokenizer
from tests.router.small_tokenizers import CHAT_TEMPLATE, EOS_ID, write_tokenizer

MODEL = "small"
MAX_MODEL_LEN = 512

Script = Callable[["ScriptedGeneration"], AsyncIterator[TokenEvent]]


@dataclass(eq=False)
class ScriptedGeneration:
    """One generation; records the calls of the edge."""

    request: Request
    script: Script
    cancels: list[bool] = field(default_factory=list)
    """One entry for each `finish` (true) and `cancel` (false) before the end."""
    finished: list[int] = field(default_factory=list)
    """Choices that the edge finished."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    ready: list[TokenEvent] = field(default_factory=list)
    """Tokens that arrive together with the last one yielded by the script."""

    def __post_init__(self) -> None:
        spec = self.request.spec
        self.prompt_tokens, self.sampling, self.cache_salt = list(spec.prompt_tokens), spec.sampling, spec.cache_salt
        self.num_choices, self.tier = spec.num_choices, spec.tier
        self.running = set(range(spec.num_choices))
        # Each log probability of the prompt encodes the token's id and has two other tokens as alternatives.
        num_top = self.sampling.num_prompt_logprobs
        top = ((50, -0.25), (51, -0.5))
        self.request.prompt_logprobs = [
            TokenLogprobs(-float(token), top[:num_top]) for token in self.prompt_tokens[1:] if num_top >= 0
        ]
        journey = self.request.journeys[0]
        self.request.workers += ["prefill-0", "decode-1"]
        journey.spent("queue", 0.001, time.monotonic())
        journey.spent("prefill", 0.002, time.monotonic())
        self.playing = asyncio.ensure_future(self._play())

    async def _play(self) -> None:
        try:
            async for first in self.script(self):
                together, self.ready = [first, *self.ready], []
                for token in together:
                    if token.choice in self.running:
                        self._give(token)
                if not self.running:
                    break
                await asyncio.sleep(0)  # the reader's turn
        except Exception as error:  # the script's
            self.request.error = error  # type: ignore[assignment]
        if self.request.outcome is None:
            self._end(Outcome.FINISHED if self.request.error is None else Outcome.FAILED)

    def _give(self, token: TokenEvent) -> None:
        self.request.token_received(token)
        if token.finish:
            self.running.discard(token.choice)

    def _end(self, outcome: Outcome) -> None:
        self.request.outcome = outcome
        self.request.ended()

    def finish(self, choice: int) -> None:
        if self.request.outcome is None and choice in self.running:
            self.running.remove(choice)
            self.cancels.append(True)
            self.finished.append(choice)
            self.cancelled.set()
            if not self.running:
                self._end(Outcome.FINISHED)

    def cancel(self) -> None:
        if self.request.outcome is None:
            self.cancels.append(False)
            self.cancelled.set()
            self._end(Outcome.CANCELLED)
        self.playing.cancel()


class ScriptedGenerator(Cluster):
    """Cluster and dispatcher that run the script which is set when a request arrives."""

    is_ready = True
    max_model_len: int | None = MAX_MODEL_LEN
    tiers = ("default", "fast", "bulk")

    def __init__(self) -> None:
        self.metrics: RecordingMetrics = RecordingMetrics()
        self.script: Script = saying([], FinishReason.STOP)
        self.refusal: GenerationError | None = None
        self.start_refusal: GenerationError | None = None
        """Of requests that were not refused before."""
        self.generations: list[ScriptedGeneration] = []
        self.started = threading.Event()
        self.dispatcher: Any = self
        self.admission = self
        self._by_request: dict[Request, ScriptedGeneration] = {}

    def check_room(self, num_choices: int, *, tenant: str, tier: str, arrived_s: float) -> None:
        if self.refusal is not None:
            raise self.refusal

    def check(self, num_choices: int, *, tenant: str, tier: str) -> None:
        """As `Admission.check`."""
        if self.refusal or self.start_refusal:
            raise self.refusal or self.start_refusal  # type: ignore[misc]

    def start(self, request: Request, *, is_further: bool) -> None:
        """As `Dispatcher.start`, like the next two."""
        assert request.spec.arrived_s > 0
        generation = self._by_request[request] = ScriptedGeneration(request, self.script)
        self.generations.append(generation)
        self.started.set()

    def finish(self, request: Request, choice: int) -> None:
        self._by_request[request].finish(choice)

    def cancel(self, request: Request) -> None:
        self._by_request[request].cancel()

    @property
    def last(self) -> ScriptedGeneration:
        return self.generations[-1]


def token_event(
    choice: int, index: int, token: int, logprobs: TokenLogprobs | None, finish: FinishReason
) -> TokenEvent:
    return TokenEvent(RequestKey(0, 1, 0), choice, index, token, logprobs, finish)


def saying(
    tokens: Sequence[int], finish: FinishReason = FinishReason.LENGTH, logprobs: TokenLogprobs | None = None
) -> Script:
    """Script that yields ``tokens`` in each choice, as many as the request allows, the last with ``finish``."""

    async def script(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        said = tokens[: generation.sampling.max_tokens]
        generation.request.num_cached_tokens = 3
        for index, token in enumerate(said):
            end = finish if index == len(tokens) - 1 else FinishReason.NONE
            if index == len(said) - 1 < len(tokens) - 1:
                end = FinishReason.LENGTH
            for choice in range(generation.num_choices):
                yield token_event(choice, index, token, logprobs, end)

    return script


def at_once(tokens: Sequence[int]) -> Script:
    """Script whose tokens all arrive at once."""

    async def script(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        last = len(tokens) - 1
        first, *generation.ready = [
            token_event(choice, index, token, None, FinishReason.LENGTH if index == last else FinishReason.NONE)
            for index, token in enumerate(tokens)
            for choice in range(generation.num_choices)
        ]
        yield first

    return script


def failing_after(tokens: Sequence[int], error: Exception) -> Script:
    """Script that yields ``tokens`` and then raises."""

    async def script(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        for index, token in enumerate(tokens):
            yield token_event(0, index, token, None, FinishReason.NONE)
        raise error

    return script


def waiting_first(script: Script) -> Script:
    """Script that yields nothing for 0.3 s."""

    async def wait_first(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        await asyncio.sleep(0.3)
        async for token in script(generation):
            yield token

    return wait_first


def stuck_after(tokens: Sequence[int]) -> Script:
    """Script that yields ``tokens`` and then blocks for ever."""

    async def script(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        for index, token in enumerate(tokens):
            yield token_event(0, index, token, None, FinishReason.NONE)
        await asyncio.Event().wait()

    return script


def endless(token: int) -> Script:
    """Script that yields ``token`` as fast as it is read."""

    async def script(generation: ScriptedGeneration) -> AsyncIterator[TokenEvent]:
        index = 0
        while True:
            yield token_event(0, index, token, None, FinishReason.NONE)
            index += 1
            await asyncio.sleep(0)

    return script


class RecordingSeries(PlainSeries):
    def __init__(self, values: list[float]) -> None:
        super().__init__(())
        self._values = values

    def observe(self, value: float, request_id: str = "") -> None:
        self._values.append(value)


class RecordingMetrics(RouterMetrics):
    """Metrics that also record the events of the edge."""

    def __init__(self) -> None:
        slow = Tier(ttft_seconds=60.0, tpot_seconds=60.0)
        super().__init__(SloConfig(ttft_seconds=60.0, tpot_seconds=60.0, tiers={"fast": slow, "bulk": slow}))
        self.responses: list[tuple[str, int]] = []
        self.first_tokens_s: list[float] = []
        self.gaps_s: list[float] = []
        self.itl_seconds = RecordingSeries(self.gaps_s)
        self.answers: list[RequestRecord] = []
        """Those that were complete."""

    def responded(self, route: str, code: int) -> None:
        self.responses.append((route, code))

    def token(self, record: RequestRecord, choice: int) -> None:
        super().token(record, choice)
        journey = record.journeys[choice]
        if not journey.num_gaps:
            self.first_tokens_s.append(journey.first_s - record.arrived_s)

    def answered(self, record: RequestRecord) -> None:
        super().answered(record)
        self.answers.append(record)


@dataclass
class EdgeServer:
    url: str
    generator: ScriptedGenerator
    metrics: RecordingMetrics
    tokenizer: ChatTokenizer
    loop_thread: int
    """Identity of the thread that runs its event loop."""
    app: FastAPI

    def say(self, text: str, finish: FinishReason = FinishReason.STOP, logprobs: TokenLogprobs | None = None) -> int:
        """Answer every later request with ``text``, and EOS after it if ``finish`` is STOP; return the token count."""
        tokens = asyncio.run(self.tokenizer.encode(text))[1:]
        tokens += [EOS_ID] if finish is FinishReason.STOP else []
        self.generator.script = saying(tokens, finish, logprobs)
        return len(tokens)


def deployment_of(**router: Any) -> DeploymentConfig:
    """What a router of the model `MODEL` is told; ``router`` has settings of its section."""
    return DeploymentConfig(model=ModelConfig(served_name=MODEL), router=RouterConfig(**router))


@contextmanager
def running_edge(
    keys: KeyFile | None = None,
    template: str = CHAT_TEMPLATE,
    sinks: Sequence[RecordSink] = (),
    defaults: Mapping[str, float] | None = None,
    special: Sequence[str] = (),
    **router: Any,
) -> Iterator[EdgeServer]:
    """Serve a small tokenizer on a free loopback port until the block exits; ``router`` is of the deployment."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), template, special)
        tokenizer = ChatTokenizer.from_folder(Path(folder))
    generator = ScriptedGenerator()
    app = create_app(generator, tokenizer, deployment_of(**router), defaults=defaults, keys=keys, sinks=sinks)
    config = uvicorn.Config(app, http=BoundedHttpProtocol, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert thread.ident is not None
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield EdgeServer(f"http://127.0.0.1:{port}", generator, generator.metrics, tokenizer, thread.ident, app)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        for sink in sinks:
            sink.close()
