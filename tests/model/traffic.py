"""Random requests of every kind through a scheduler and an executor, as the step loop drives them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from pdserve.contracts.events import PromptLogprobsEvent, RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.step import Executor, ModelLimits, StepHandle, TokenLogprobs
from pdserve.engine.scheduling.speculation import Speculation
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.kv_transfer.block_pool import BlockPool


class Token(NamedTuple):
    token: int
    logprobs: TokenLogprobs | None


@dataclass
class Served:
    """What came of the requests."""

    tokens: dict[tuple[int, int], list[Token]] = field(default_factory=dict)
    """By request and choice."""
    prompts: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    num_emitted: dict[int, int] = field(default_factory=dict)
    """Tokens of earlier attempts."""
    ends: dict[int, RequestEventKind] = field(default_factory=dict)
    """Of those that did not end with a token."""


def random_request(request_id: int, vocab_size: int, *, is_plain: bool) -> GenerationRequest:
    """The same for the same number.

    Args:
        is_plain: greedy, or drawn from what truncation leaves; else anything.
    """
    random = Random(request_id)
    temperature = random.choice((0.0, 0.0, 0.7, 1.0, 1.3))
    options: dict[str, object] = {
        "top_k": random.choice((0, 0, 5, 40)),
        "top_p": random.choice((1.0, 1.0, 0.9, 0.5)),
        "min_p": random.choice((0.0, 0.0, 0.05)),
    }
    choice = 0
    if not is_plain and random.random() < 0.6:
        choice = random.choice((0, 0, 2))
        options |= random.choice(
            (
                {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
                {"presence_penalty": 1.5},
                {"logit_bias": ((5, 4.0), (9, -100.0))},
                {"num_logprobs": 2},
                {"num_prompt_logprobs": 1},
                {"min_tokens": 4},
            )
        )
    return GenerationRequest(
        request_id=request_id,
        prompt_tokens=tuple(random.randrange(vocab_size) for _ in range(random.randint(1, 40))),
        choice=choice,
        sampling=SamplingParams(
            temperature=temperature,
            seed=random.getrandbits(64),
            max_tokens=random.randint(1, 12),
            **options,  # type: ignore[arg-type]
        ),
    )


def serve(
    executor: Executor,
    requests: list[GenerationRequest],
    limits: ModelLimits,
    num_blocks: int,
    block_size: int,
    *,
    max_batch_size: int = 6,
    cancelled: frozenset[int] = frozenset(),
    speculation: Speculation | None = None,
) -> Served:
    """Run requests, which arrive over the first steps, to their ends. Request n is sequence n of the scheduler.

    Args:
        cancelled: requests whose client leaves soon after they began.
    """
    pool = BlockPool(num_blocks, block_size, [0] * num_blocks)
    scheduler = Scheduler(
        pool,
        limits,
        mint_handle=lambda: b"handle",
        max_batch_tokens=24,
        max_batch_size=max_batch_size,
        speculation=speculation,
    )
    served, in_flight, waiting = Served(), deque[tuple[int, StepHandle]](), deque(requests)
    for turn in range(2000):
        if waiting and turn % 2 == 0:
            request = waiting.popleft()
            served.num_emitted[request.request_id] = len(request.emitted_tokens)
            scheduler.add(RequestKey(0, request.request_id, 0), request, float(turn))
        batch = scheduler.plan(float(turn))
        if batch is not None:
            in_flight.append((batch.step_id, executor.submit(batch)))
        if in_flight and (batch is None or len(in_flight) >= executor.pipeline_depth):
            step_id, handle = in_flight.popleft()
            try:
                output = handle.result()
            except RuntimeError as error:
                scheduler.fail_step(step_id, str(error), float(turn))
            else:
                scheduler.complete(output, float(turn))
        _take_events(scheduler, served)
        for request_id in cancelled:
            if sum(len(tokens) for (of, _), tokens in served.tokens.items() if of == request_id) >= 2:
                scheduler.cancel(RequestKey(0, request_id, 0), float(turn))
        pool.check_integrity()
        if not (waiting or in_flight or batch is not None or scheduler.load().num_running):
            break
    assert not in_flight
    _take_events(scheduler, served)
    return served


def _take_events(scheduler: Scheduler, served: Served) -> None:
    for event in scheduler.take_events():
        if isinstance(event, TokenEvent):
            tokens = served.tokens.setdefault((event.key.request_id, event.choice), [])
            assert event.index == served.num_emitted[event.key.request_id] + len(tokens)
            tokens.append(Token(event.token, event.logprobs))
        elif isinstance(event, PromptLogprobsEvent):
            served.prompts.setdefault(event.key.request_id, []).extend(event.entries)
        elif isinstance(event, RequestEvent) and event.kind.is_terminal:
            served.ends[event.key.request_id] = event.kind
