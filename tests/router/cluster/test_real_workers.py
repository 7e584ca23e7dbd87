"""Dispatch over worker processes that hash tokens: a lost or repeated token, or wrong KV, changes the answer."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.request import Outcome, SamplingParams
from pdserve.contracts.step import TokenLogprobs
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.router.requests.attempt import Decoding, Parked, Prefilling
from pdserve.router.requests.placement import Arrival, PrefixPull
from pdserve.router.requests.prefix_sources import PrefixSources, Sources
from pdserve.router.requests.request import RequestSpec
from pdserve.router.requests.settings import NO_OBJECTIVES
from pdserve.router.requests.worker_view import WorkerView
from pdserve.router.token_stream import TokenStream
from tests.expected_tokens import expected_tokens
from tests.router.rig import Rig, attempt_of, read_all, read_choices, read_some, running_rig
from tests.router.scripted_worker import until
from tests.workers import WorkerProcess, emulated_config

NUM_STREAMS = 16
NUM_TOKENS = 150
TOKEN = "secret"
PATIENCE_S = 20.0
"""Silence of a worker that is not lost, on a busy machine; the sessions of those that are killed break."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def start_worker(checkpoint: Path, worker_id: str, time_scale: float, num_stages: int = 1) -> WorkerProcess:
    role = WorkerRole(worker_id.split("-")[0])
    fields = {"worker_id": worker_id, "pipeline_parallel": num_stages, "num_kv_blocks": 512}
    return WorkerProcess(emulated_config(checkpoint, role, time_scale=time_scale, **fields))


@asynccontextmanager
async def running_cluster(
    checkpoint: Path, *names: str, time_scale: float = 0.0, num_stages: int = 1, slo: SloConfig = NO_OBJECTIVES
) -> AsyncIterator[tuple[Rig, dict[str, WorkerProcess]]]:
    """Run a rig over worker processes; every KV block must be free soon after."""
    async with AsyncExitStack() as stack:
        workers = {name: stack.enter_context(start_worker(checkpoint, name, time_scale, num_stages)) for name in names}
        rig = await stack.enter_async_context(running_rig(cluster_token=TOKEN, stall_timeout_s=PATIENCE_S, slo=slo))
        await put_targets(rig, workers)
        yield rig, workers
        await until(lambda: rig.dispatcher.num_in_flight == 0)
        await until(lambda: not any(w.load.num_blocks_referenced for w in rig.cluster.workers.values()))


async def put_targets(rig: Rig, workers: dict[str, WorkerProcess]) -> None:
    await rig.cluster.set_targets([endpoint for worker in workers.values() for endpoint in worker.endpoints])
    await until(lambda: all(worker.takes_work for worker in rig.cluster.workers.values()))


def prompt(number: int) -> list[int]:
    """Prompt of a distinct length; three in four share a prefix of more than two blocks."""
    rng = random.Random(number)
    own = [rng.randrange(6, 512) for _ in range(5 + 9 * number % 150)]
    return (list(range(40)) if number % 4 else []) + own


def oracle(checkpoint: Path, number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    return answer_to(checkpoint, prompt(number), num_tokens)


def answer_to(
    checkpoint: Path, tokens: list[int], num_tokens: int, sampling: SamplingParams | None = None, choice: int = 0
) -> list[int]:
    config = DecoderConfig.from_folder(checkpoint)
    vocab_size, eos = config.shape.vocab_size, config.eos_token_ids
    return expected_tokens(tokens, num_tokens, vocab_size, sampling=sampling, choice=choice, eos_token_ids=eos)


async def check_streams(
    rig: Rig,
    checkpoint: Path,
    disturb: Callable[[], object] | None = None,
    *,
    is_time: Callable[[list[TokenStream]], bool] = bool,
) -> None:
    """Run all streams, calling ``disturb`` when ``is_time``; every answer must equal the oracle's."""
    streams = [rig.start(prompt(number), NUM_TOKENS) for number in range(NUM_STREAMS)]
    answers = [asyncio.create_task(read_all(stream)) for stream in streams]
    if disturb is not None:
        await until(lambda: is_time(streams))
        assert rig.dispatcher.num_in_flight == NUM_STREAMS
        disturb()
    for number, answer in enumerate(answers):
        assert await answer == oracle(checkpoint, number), number
    assert rig.dispatcher.outcomes[Outcome.FINISHED] == NUM_STREAMS


def has_begun(stream: TokenStream) -> bool:
    return bool(attempt_of(stream).emitted)


@pytest.mark.parametrize(
    ("names", "num_stages"),
    [
        (("prefill-0", "decode-0"), 1),
        (("prefill-0", "prefill-1", "decode-0", "decode-1"), 1),
        (("mixed-0",), 1),
        (("prefill-0", "decode-0"), 2),
    ],
    ids=["1P+1D", "2P+2D", "mixed", "1P+1D of 2 stages"],
)
def test_every_topology_gives_the_same_tokens(checkpoint: Path, names: tuple[str, ...], num_stages: int) -> None:
    async def run() -> None:
        async with running_cluster(checkpoint, *names, num_stages=num_stages) as (rig, _):
            assert len(rig.cluster.workers) == num_stages * len(names)
            await check_streams(rig, checkpoint)
            assert rig.sample("pdserve_redispatches_total", reason="worker_lost") == 0
            handed_off = rig.sample("pdserve_handoff_stall_seconds_count")
            assert handed_off == (0 if names == ("mixed-0",) else NUM_STREAMS)

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_killed_worker_loses_no_token(checkpoint: Path, victim: str) -> None:
    async def run() -> None:
        names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
        async with running_cluster(checkpoint, *names, time_scale=10.0) as (rig, workers):

            def is_time(streams: list[TokenStream]) -> bool:
                """Some have begun, and the victim holds part of a request that no other worker holds."""
                states = [attempt_of(stream).state for stream in streams]
                worker = rig.cluster.workers[victim]
                decodes = any(isinstance(state, Decoding) and state.worker is worker for state in states)
                prefills = any(isinstance(state, Prefilling) and state.worker is worker for state in states)
                return any(map(has_begun, streams)) and (decodes or prefills)

            await check_streams(rig, checkpoint, workers[victim].process.kill, is_time=is_time)
            assert not rig.cluster.workers[victim].is_up
            assert rig.sample("pdserve_redispatches_total", reason="worker_lost") > 0
            await put_targets(rig, {name: worker for name, worker in workers.items() if name != victim})

    asyncio.run(run())


def test_a_minimum_of_tokens_holds_over_a_handoff_and_a_loss(checkpoint: Path) -> None:
    """So do seed and choice; and every prompt token but the first gets its log probability."""
    config = DecoderConfig.from_folder(checkpoint)
    free = oracle(checkpoint, 9)
    sampling = SamplingParams(
        seed=5, max_tokens=NUM_TOKENS, min_tokens=120, stop_token_ids=tuple(range(6, 90)), num_prompt_logprobs=0
    )
    expected = expected_tokens(
        prompt(9), NUM_TOKENS, config.shape.vocab_size, sampling=sampling, eos_token_ids=config.eos_token_ids
    )
    assert not set(sampling.stop_token_ids).intersection(expected[:120])
    assert set(sampling.stop_token_ids).intersection(free[:120])

    async def run() -> None:
        async with running_cluster(checkpoint, "prefill-0", "decode-0", "decode-1", time_scale=10.0) as (rig, workers):
            stream = rig.start_spec(
                RequestSpec(prompt_tokens=tuple(prompt(9)), sampling=sampling, arrived_s=time.monotonic())
            )
            tokens = await read_some(stream, 20)
            state = attempt_of(stream).state
            assert isinstance(state, Decoding)
            name = state.worker.worker_id
            workers[name].process.kill()
            assert tokens + await read_all(stream, 20) == expected
            assert list(stream.prompt_logprobs) == [TokenLogprobs(0.0, ())] * (len(prompt(9)) - 1)
            assert rig.sample("pdserve_redispatches_total", reason="worker_lost") == 1
            await put_targets(rig, {other: worker for other, worker in workers.items() if other != name})

    asyncio.run(run())


@pytest.mark.parametrize("pull", ["not begun", "almost done"])
def test_a_parked_prompt_is_not_prefilled_again(checkpoint: Path, pull: str) -> None:
    """The decode worker is killed during its pull; the other one pulls the same parked prompt."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            time_scales = {"prefill-0": 1.0, "decode-0": 0.0 if pull == "not begun" else 1e6, "decode-1": 0.0}
            workers = {
                name: stack.enter_context(start_worker(checkpoint, name, scale)) for name, scale in time_scales.items()
            }
            rig = await stack.enter_async_context(running_rig(cluster_token=TOKEN, stall_timeout_s=PATIENCE_S))
            await put_targets(rig, workers)
            victim = workers["decode-0"]
            if pull == "not begun":
                (transfer_process,) = victim.children()
                os.kill(transfer_process, signal.SIGSTOP)
            stream = rig.start(prompt(9), 20)
            tokens = await read_some(stream, 1)
            await asyncio.sleep(0.5)
            state = attempt_of(stream).state
            assert isinstance(state, Parked)
            assert state.pull is not None
            assert state.pull.worker is rig.cluster.workers["decode-0"]
            victim.process.kill()
            assert tokens + await read_all(stream, 1) == oracle(checkpoint, 9, 20)
            assert rig.sample("pdserve_redispatches_total", reason="rebound") == 1
            assert rig.sample("pdserve_redispatches_total", reason="worker_lost") == 0
            assert rig.sample("pdserve_step_tokens_sum", role="prefill") == len(prompt(9))
            await put_targets(rig, {name: worker for name, worker in workers.items() if worker is not victim})
            await until(lambda: all(worker.load.num_blocks_referenced == 0 for worker in rig.cluster.workers.values()))

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_the_only_worker_of_a_phase_is_killed_and_replaced(checkpoint: Path, victim: str) -> None:
    async def run() -> None:
        async with running_cluster(checkpoint, "prefill-0", "decode-0", time_scale=10.0) as (rig, workers):

            def replace_victim() -> None:
                workers[victim].close()
                workers[victim] = start_worker(checkpoint, victim, 10.0)
                replaced.append(asyncio.create_task(put_targets(rig, workers)))

            replaced: list[asyncio.Task[None]] = []
            try:
                await check_streams(rig, checkpoint, replace_victim)
                await replaced[0]
            finally:
                workers[victim].close()
                await rig.cluster.set_targets([])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("names", "num_stages"),
    [(("prefill-0", "decode-0"), 1), (("prefill-0", "decode-0"), 2)],
    ids=["1 stage", "2 stages"],
)
def test_running_streams_outlive_every_change_of_roles(
    checkpoint: Path, names: tuple[str, ...], num_stages: int
) -> None:
    """Both workers at once, one by one, and one that ends meanwhile and comes back in its present role."""

    async def run() -> None:
        async with running_cluster(checkpoint, *names, time_scale=10.0, num_stages=num_stages) as (rig, workers):
            switch_s: list[float] = []

            async def take(*roles: WorkerRole) -> None:
                for worker, role in zip(workers.values(), roles, strict=True):
                    worker.endpoints = [replace(each, role=role) for each in worker.endpoints]
                began_s = time.monotonic()
                await put_targets(rig, workers)
                switch_s.append(time.monotonic() - began_s)
                await asyncio.sleep(0.05)

            async def disturb() -> None:
                for _ in range(3):
                    await take(WorkerRole.DECODE, WorkerRole.PREFILL)
                    await take(WorkerRole.PREFILL, WorkerRole.DECODE)
                await take(WorkerRole.DECODE, WorkerRole.DECODE)
                await take(WorkerRole.DECODE, WorkerRole.PREFILL)
                workers["decode-0"].close()
                workers["decode-0"] = start_worker(checkpoint, "decode-0", 10.0, num_stages)
                await take(WorkerRole.DECODE, WorkerRole.PREFILL)

            tasks: list[asyncio.Task[None]] = []
            try:
                await check_streams(rig, checkpoint, lambda: tasks.append(asyncio.create_task(disturb())))
                await tasks[0]
                assert rig.dispatcher.outcomes[Outcome.FAILED] == 0
                assert {worker.role for worker in rig.cluster.workers.values()} == set(WorkerRole) - {WorkerRole.MIXED}
                assert min(switch_s) < 0.2
                stream = rig.start(prompt(3), 20)
                assert await read_all(stream) == oracle(checkpoint, 3, 20)
                assert stream.workers[0].startswith("decode-0")
            finally:
                workers["decode-0"].close()

    asyncio.run(run())


def test_two_hundred_cancels_free_everything(checkpoint: Path) -> None:
    async def run() -> None:
        async with running_cluster(checkpoint, "prefill-0", "decode-0", time_scale=5.0) as (rig, _):
            rng = random.Random(1)
            loop = asyncio.get_running_loop()
            for number in range(200):
                stream = rig.start(prompt(number), 200)
                loop.call_later(rng.uniform(0.0, 0.8), stream.cancel)
                await asyncio.sleep(0.002)
            await until(lambda: rig.dispatcher.num_in_flight == 0)
            outcomes = rig.dispatcher.outcomes
            assert outcomes[Outcome.CANCELLED] > 100, outcomes
            assert outcomes[Outcome.CANCELLED] + outcomes[Outcome.FINISHED] == 200
            await until(lambda: all(worker.load.num_blocks_referenced == 0 for worker in rig.cluster.workers.values()))
            stream = rig.start(prompt(3), 20)
            assert await read_all(stream) == oracle(checkpoint, 3, 20)

    asyncio.run(run())


@pytest.mark.parametrize("end", ["with token 0", "by the client"])
def test_pulls_of_requests_that_end_meanwhile_have_not_failed(checkpoint: Path, end: str) -> None:
    async def run() -> None:
        async with running_cluster(checkpoint, "prefill-0", "decode-0", time_scale=1.0) as (rig, workers):
            (transfer_process,) = workers["decode-0"].children()
            link = {"source": "prefill-0", "worker": "decode-0"}
            prefill, decode = rig.cluster.workers["prefill-0"], rig.cluster.workers["decode-0"]

            def num_pulls(*results: str) -> float:
                return sum(rig.sample("pdserve_kv_link_pulls_total", **link, result=result) for result in results)

            for number in range(8):
                (token,) = answer_to(checkpoint, prompt(number), 1)
                stop = (token,) if end == "with token 0" else ()
                sampling = SamplingParams(max_tokens=20, stop_token_ids=stop, ignore_eos=True)
                spec = RequestSpec(prompt_tokens=tuple(prompt(number)), sampling=sampling, arrived_s=time.monotonic())
                if stop:
                    await read_all(rig.start_spec(spec))
                else:
                    os.kill(transfer_process, signal.SIGSTOP)  # or the pull may be done before the client leaves
                    stream = rig.start_spec(spec)
                    await read_some(stream, 1)
                    await until(lambda: decode.load.num_running > 0)
                    stream.cancel()
                    await until(lambda: decode.load.num_running == 0)
                    os.kill(transfer_process, signal.SIGCONT)
                await until(lambda: not any(w.load.num_blocks_referenced for w in (prefill, decode)))
            await until(lambda: num_pulls("ended", "aborted") > 0)
            assert num_pulls("failed", "done") == 0
            assert rig.metrics.transports == {("prefill-0", "decode-0"): ""}

    asyncio.run(run())


def test_a_chat_finds_its_earlier_answers(checkpoint: Path) -> None:
    """Only the decode worker caches them, so the next turns are prefilled there; another tenant's are not."""

    async def run() -> None:
        async with running_cluster(
            checkpoint, "prefill-0", "decode-0", time_scale=1.0, slo=SloConfig(ttft_seconds=0.0, tpot_seconds=1.0)
        ) as (rig, _):
            history: list[int] = []
            for turn in range(3):
                text = history + [6 + (7 * turn + position) % 500 for position in range(70)]
                stream = rig.start(text, 45)
                answer = await read_all(stream)
                assert answer == answer_to(checkpoint, text, 45)
                # The last token's KV is never computed, and blocks hold 16 tokens.
                assert stream.num_cached_tokens == max(len(history) - 1, 0) // 16 * 16
                history = text + answer
                in_blocks = block_hashes(history[:-1], 16)
                await until(lambda: all(each in rig.cluster.workers["decode-0"].cached_blocks for each in in_blocks))  # noqa: B023
            assert rig.sample("pdserve_handoff_stall_seconds_count") == 1
            stream = rig.start(history, 2, cache_salt=b"another tenant")
            assert len(await read_all(stream)) == 2
            assert stream.num_cached_tokens == 0
            assert rig.sample("pdserve_handoff_stall_seconds_count") == 2

    asyncio.run(run())


NUM_CHOICES = 3
NUM_REQUESTS = 6


def is_decoding(stream: TokenStream) -> bool:
    """Whether every choice of a request decodes."""
    attempts = stream.attempts.values()
    return len(attempts) == NUM_CHOICES and all(len(attempt.emitted) > 1 for attempt in attempts)


async def check_choices(rig: Rig, checkpoint: Path, disturb: Callable[[], object] | None = None) -> None:
    """Run requests for several answers, calling ``disturb`` when all decode; every choice must equal the oracle's."""
    streams = [
        rig.start(prompt(number), NUM_TOKENS, num_choices=NUM_CHOICES, seed=number, num_prompt_logprobs=0)
        for number in range(NUM_REQUESTS)
    ]
    answers = [asyncio.create_task(read_choices(stream)) for stream in streams]
    if disturb is not None:
        await until(lambda: all(map(is_decoding, streams)))
        assert rig.dispatcher.num_in_flight == NUM_REQUESTS
        disturb()
    for number, (stream, answer) in enumerate(zip(streams, answers, strict=True)):
        sampling = SamplingParams(seed=number, ignore_eos=True)
        assert await answer == {
            choice: answer_to(checkpoint, prompt(number), NUM_TOKENS, sampling, choice) for choice in range(NUM_CHOICES)
        }
        assert len(stream.prompt_logprobs) == len(prompt(number)) - 1
    assert rig.dispatcher.num_accepted == rig.dispatcher.outcomes[Outcome.FINISHED] == NUM_REQUESTS


@pytest.mark.parametrize("names", [("prefill-0", "decode-0"), ("mixed-0",)], ids=["1P+1D", "mixed"])
def test_choices_of_one_prompt(checkpoint: Path, names: tuple[str, ...]) -> None:
    async def run() -> None:
        async with running_cluster(checkpoint, *names) as (rig, _):
            await check_choices(rig, checkpoint)
            assert rig.sample("pdserve_redispatches_total", reason="failed") == 0

    asyncio.run(run())


def test_a_killed_worker_loses_no_token_of_any_choice(checkpoint: Path) -> None:
    async def run() -> None:
        names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
        async with running_cluster(checkpoint, *names, time_scale=10.0) as (rig, workers):
            await check_choices(rig, checkpoint, workers["decode-0"].process.kill)
            assert rig.sample("pdserve_redispatches_total", reason="worker_lost") > 0
            await put_targets(rig, {name: worker for name, worker in workers.items() if name != "decode-0"})

    asyncio.run(run())


def test_a_choice_that_stops_frees_its_blocks(checkpoint: Path) -> None:
    """Stop strings end all choices but one early; the decode worker stops generating them."""

    async def run() -> None:
        async with running_cluster(checkpoint, "prefill-0", "decode-0", time_scale=10.0) as (rig, _):
            stream = rig.start(prompt(1), NUM_TOKENS, num_choices=NUM_CHOICES, seed=1)
            await read_some(stream, 10 * NUM_CHOICES)
            for choice in range(1, NUM_CHOICES):
                rig.dispatcher.finish(stream, choice)
            await until(lambda: rig.cluster.workers["decode-0"].load.num_running == 1)
            last = [delta async for delta in stream if delta.choice == 0][-1]
            assert last.index == NUM_TOKENS - 1
            assert stream.outcome is Outcome.FINISHED

    asyncio.run(run())


def any_pull(
    prefix_sources: PrefixSources, arrival: Arrival, view: WorkerView, num_cached: int, sources: Sources
) -> PrefixPull | None:
    """The pull of a prefix, whether or not it pays, from all sources in turn."""
    if sources.num_tokens <= num_cached:
        return None
    _, source = sources.waits[arrival.request_id % len(sources.waits)]
    return PrefixPull(source.worker_id, sources.num_tokens, 1, 0.0, 5.0)


@pytest.mark.parametrize("is_killed", [False, True])
def test_prefixes_come_from_workers_of_every_role_and_change_no_token(checkpoint: Path, is_killed: bool) -> None:
    names = "prefill-0", "prefill-1", "mixed-0", "decode-0"
    prompts = [prompt(number) * 2 for number in range(NUM_STREAMS)]

    async def check(rig: Rig, kill: Callable[[], object] | None = None) -> None:
        streams = [rig.start(each, NUM_TOKENS) for each in prompts]
        answers = [asyncio.create_task(read_all(stream)) for stream in streams]
        if kill is not None:
            workers = rig.cluster.workers.values()
            await until(lambda: any(each.load.num_waiting for each in workers) or any(each.done() for each in answers))
            kill()
        for each, answer in zip(prompts, answers, strict=True):
            assert await answer == answer_to(checkpoint, each, NUM_TOKENS)

    async def run() -> None:
        async with running_cluster(checkpoint, *names, time_scale=10.0) as (rig, workers):
            await check(rig)
            await check(rig)
            await check(rig, workers["prefill-0"].process.kill if is_killed else None)
            if is_killed:
                await put_targets(rig, {name: workers[name] for name in names[1:]})
            num_pulled = [rig.sample("pdserve_prefix_tokens_total", source=role.value) for role in WorkerRole]
            assert sum(num_pulled) > 300
            assert min(num_pulled[1:]) > 0, "decode and mixed workers lent some"

    with patch.object(PrefixSources, "pull", any_pull):
        asyncio.run(run())
