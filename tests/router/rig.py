"""Dispatcher over scripted workers in this process; checks the conservation law at every outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.events import RequestEventKind
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.proto.v1 import worker_pb2
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.metrics import RouterMetrics
from pdserve.router.requests.attempt import Attempt, Decoding, Parked
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.request import RequestSpec
from pdserve.router.requests.settings import DispatchSettings
from pdserve.router.token_stream import TokenStream
from tests.patience import HANG_S
from tests.router.scripted_worker import ScriptedWorker, until
from tests.scrape import scrape


def sample(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    """One sample of the text that Prometheus reads; None if the series does not exist."""
    families = text_string_to_metric_families(scrape(metrics))
    samples = [each for family in families for each in family.samples]
    return next((each.value for each in samples if (each.name, each.labels) == (name, labels)), None)


SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=512,
)
COST = CostModel(SHAPE, hardware("cpu"), Precision(dtype="float32"))
STALL_TIMEOUT_S = 1.2


@dataclass
class Rig:
    """Router without its HTTP edge."""

    cluster: Cluster
    dispatcher: Dispatcher
    metrics: RouterMetrics

    def start(
        self,
        prompt: Iterable[int] = (1, 2, 3, 4, 5),
        max_tokens: int = 4,
        *,
        num_choices: int = 1,
        num_prompt_logprobs: int = -1,
        cache_salt: bytes = b"",
        seed: int | None = None,
    ) -> TokenStream:
        """Start a request; greedy without a ``seed``."""
        sampling = SamplingParams(
            temperature=0.0 if seed is None else 1.0,
            seed=seed or 0,
            max_tokens=max_tokens,
            ignore_eos=True,
            num_prompt_logprobs=num_prompt_logprobs,
        )
        return self.start_spec(
            RequestSpec(
                prompt_tokens=tuple(prompt),
                sampling=sampling,
                arrived_s=time.monotonic(),
                num_choices=num_choices,
                cache_salt=cache_salt,
            )
        )

    def start_spec(self, spec: RequestSpec) -> TokenStream:
        stream = TokenStream(self.dispatcher, spec)
        self.dispatcher.start(stream)
        return stream

    async def up(self, *workers: ScriptedWorker) -> None:
        """Make these the targets and wait for their sessions."""
        await self.cluster.set_targets([worker.endpoint for worker in workers])
        await until(lambda: all(worker.takes_work for worker in self.cluster.workers.values()))

    def check_conservation(self) -> None:
        """accepted = sum of outcomes + in flight."""
        ended = sum(self.dispatcher.outcomes.values())
        assert self.dispatcher.num_accepted == ended + self.dispatcher.num_in_flight

    def sample(self, name: str, **labels: str) -> float:
        """One sample; 0 if the series does not exist yet."""
        return sample(self.metrics, name, **labels) or 0.0


@asynccontextmanager
async def running_rig(
    *, stall_timeout_s: float = STALL_TIMEOUT_S, cluster_token: str = "", **settings: float | str | SloConfig
) -> AsyncIterator[Rig]:
    """Run a dispatcher with its sweep; every request must have an outcome when the test exits."""
    metrics = RouterMetrics()
    costs = dict.fromkeys(WorkerRole, COST)
    dispatcher = Dispatcher(
        costs,
        DispatchSettings(**settings),  # type: ignore[arg-type]
        time.monotonic,
        metrics,
        call_soon=asyncio.get_running_loop().call_soon,
    )
    metrics.track(dispatcher)
    cluster = Cluster(dispatcher, metrics, cluster_token=cluster_token, stall_timeout_s=stall_timeout_s)
    sweep = asyncio.create_task(cluster.sweep_forever())
    rig = Rig(cluster, dispatcher, metrics)
    try:
        yield rig
        rig.check_conservation()
        assert dispatcher.num_in_flight == 0
        assert dispatcher.num_queued == 0
    finally:
        sweep.cancel()
        await cluster.close()


def with_workers(*names: str) -> Callable[[Callable[..., Awaitable[None]]], Callable[[], None]]:
    """Run an async test with scripted workers; a name begins with its role, as in ``prefill-0``."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            workers = [await ScriptedWorker(name, WorkerRole(name.split("-")[0])).start() for name in names]
            try:
                await test(*workers)
            finally:
                for worker in workers:
                    await worker.stop()

        def wrapper() -> None:
            asyncio.run(run())

        return wrapper

    return decorate


def attempt_of(request: TokenStream) -> Attempt:
    """The only open choice of a request."""
    (attempt,) = request.attempts.values()
    return attempt


def is_unbound(attempt: Attempt) -> bool:
    """Whether its prompt can be pulled and no decode worker is bound."""
    return isinstance(attempt.state, Parked) and attempt.state.pull is None


def is_released(attempt: Attempt) -> bool:
    """Whether its prefill worker holds nothing of it any more."""
    return isinstance(attempt.state, Parked | Decoding) and attempt.state.is_released


async def read_some(request: TokenStream, count: int) -> list[int]:
    """Read the next ``count`` tokens of an answer."""
    async with asyncio.timeout(HANG_S):
        return [(await anext(request)).token for _ in range(count)]


async def read_all(request: TokenStream, first: int = 0) -> list[int]:
    """Read every token of an answer from index ``first`` on; check the indices."""
    tokens: list[int] = []
    async with asyncio.timeout(HANG_S):
        async for delta in request:
            assert delta.index == first + len(tokens)
            tokens.append(delta.token)
    return tokens


async def read_choices(request: TokenStream, answers: dict[int, list[int]] | None = None) -> dict[int, list[int]]:
    """Read all further tokens of an answer of several choices, after those in ``answers``; check the indices."""
    answers = {} if answers is None else answers
    async with asyncio.timeout(HANG_S):
        async for delta in request:
            tokens = answers.setdefault(delta.choice, [])
            assert delta.index == len(tokens)
            tokens.append(delta.token)
    return answers


async def hand_off(
    prefill: ScriptedWorker, decode: ScriptedWorker, token: int = 100, *, released: bool = True
) -> worker_pb2.Request:
    """Play a prefill and a join: the first token of the attempt is out, and ``decode`` holds the KV.

    Args:
        released: whether ``prefill`` reports that it has released the request.

    Returns the request as received by ``decode``.
    """
    request = await prefill.next_submit()
    assert request.handoff
    prefill.send_event(request, RequestEventKind.STARTED, num_cached_tokens=1, waited_s=0.01)
    prefill.offer(request)
    prefill.send_token(request, len(request.emitted_tokens), token)
    prepared = await decode.next_prepare()
    prepared_as_sent = worker_pb2.Request()
    prepared_as_sent.CopyFrom(prepared)
    prepared_as_sent.deadline_s, prepared_as_sent.stall_slo_s = request.deadline_s, request.stall_slo_s
    assert prepared_as_sent == request
    decode.send_event(prepared, RequestEventKind.STARTED, waited_s=0.01)
    decode.send_event(prepared, RequestEventKind.JOINED, waited_s=0.02)
    if released:
        prefill.send_event(request, RequestEventKind.RELEASED)
    return prepared
