"""Time per token with and without guesses, in one process: a worker's scheduler, step times and executor, no router.

    python -m pdserve.bench.speculation [--model FOLDER] [--draft FOLDER] [--streams 1 8 64] [--rounds 5] [--json FILE]

Workloads: ``questions`` (held-out ones of the demo model, greedy), ``copy`` (answers of four tokens, which repeat
themselves), ``random`` (any tokens at temperature 1). Each round serves the same requests by every drafter in turn, so
many at a time; what a worker learns of its guesses, and the KV of prompts, stay from round to round. The first round is
not counted. A figure is the median over the rounds of a drafter's time over that of no guesses, by the process's time,
which other processes disturb least, and by the clock. Fails if tokens differ.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rich.console import Console

from pdserve.bench.script import publish, script_parser
from pdserve.contracts.events import RequestKey, TokenEvent
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import FinishReason, GenerationRequest, SamplingParams
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.demo.corpus import EXAMINED, examine
from pdserve.engine.scheduling.speculation import Speculation
from pdserve.engine.worker.backend import choose_backend
from pdserve.engine.worker.batches import scheduler_with
from pdserve.engine.worker.step_times import StepTimes
from pdserve.engine.worker.worker import speculation_of
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.weights.demo_model import DEMO_MODEL, DRAFT_MODEL
from pdserve.router.text.tokenizer import ChatTokenizer

NUM_TOKENS = 96
"""Of an answer."""
_COPIED = tuple((token, 15.0) for token in (7, 8, 9, 10))


class Server:
    """A worker without its processes."""

    def __init__(self, config: WorkerConfig) -> None:
        backend = choose_backend(config)
        [self._executor] = backend.build_executors(PoolMemory.create(backend.layout)).executors
        num_blocks = backend.layout.num_blocks
        self._times = StepTimes(backend.cost, backend.draft_cost)
        self._ids = count()
        speculation = speculation_of(config, self._times)
        self.speculation = speculation or Speculation(self._times.by_guesses)
        handles = count()
        self._scheduler = scheduler_with(config.batching)(
            BlockPool(num_blocks, config.block_size, [0] * num_blocks),
            backend.limits,
            mint_handle=lambda: next(handles).to_bytes(16, "little"),
            max_batch_tokens=config.max_batch_tokens,
            max_batch_size=config.max_batch_size,
            mixed_s=self._times.mixed_s,
            speculation=speculation,
        )
        self.vocab_size = backend.limits.vocab_size

    def serve(self, requests: Sequence[GenerationRequest], num_streams: int) -> tuple[dict[int, list[int]], int]:
        """Answers to requests, so many at a time, and the number of rows that decoded."""
        session, answers, num_rows, waiting, num_live = next(self._ids), dict[int, list[int]](), 0, deque(requests), 0
        while True:
            while waiting and num_live < num_streams:
                request = waiting.popleft()
                self._scheduler.add(RequestKey(session, request.request_id, 0), request, time.monotonic())
                num_live += 1
            if (batch := self._scheduler.plan(time.monotonic())) is None:
                return answers, num_rows
            prediction = self._times.predict(batch)
            output = self._executor.submit(batch).result()
            self._scheduler.complete(output, time.monotonic())
            self._times.observe(prediction, output.duration_s, output.num_guesses.values(), output.guessing_s)
            for event in self._scheduler.take_events():
                if isinstance(event, TokenEvent):
                    answers.setdefault(event.key.request_id, []).append(event.token)
                    num_live -= event.finish is not FinishReason.NONE
            num_rows += sum(each is not None for each in output.sampled)


def requests_of(workload: str, num_streams: int, vocab_size: int, tokenizer: ChatTokenizer) -> list[GenerationRequest]:
    requests = []
    for number in range(max(num_streams, 48 if workload == "questions" else 2)):
        random = Random(number)
        prompt = tuple(random.randrange(6, vocab_size) for _ in range(32))
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)
        if workload == "questions":
            task = EXAMINED[number % len(EXAMINED)]
            text = tokenizer.chat_text(examine(task, number).messages)
            prompt = tuple(asyncio.run(tokenizer.encode_chat(text)))
            sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        elif workload == "copy":
            sampling = SamplingParams(
                temperature=1.0, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=_COPIED
            )
        requests.append(GenerationRequest(request_id=number, prompt_tokens=prompt, sampling=sampling))
    return requests


def measure(
    servers: dict[str, Server], requests: Sequence[GenerationRequest], num_streams: int, num_rounds: int
) -> dict[str, dict[str, float]]:
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    figures: dict[str, dict[str, float]] = {name: {} for name in servers}
    expected: dict[int, list[int]] = {}
    for number in range(num_rounds + 1):
        times = {}
        for name, server in servers.items():
            made, right = server.speculation.num_guesses, server.speculation.num_right
            process_s, clock_s = time.process_time(), time.perf_counter()
            answers, num_rows = server.serve(requests, num_streams)
            times[name] = time.process_time() - process_s, time.perf_counter() - clock_s
            expected = expected or answers
            assert answers == expected, f"{name} changes tokens"
            num_tokens = sum(map(len, answers.values()))
            figures[name] |= {
                "tokens_per_row": round(num_tokens / num_rows, 2),
                "guesses": server.speculation.num_guesses - made,
                "right": server.speculation.num_right - right,
            }
        if number:
            for name in servers:
                pairs = zip(times[name], times["none"], strict=True)
                process, clock = (own_s / plain_s for own_s, plain_s in pairs)
                ratios[name].append((process, clock))
                figures[name]["tokens_per_s"] = round(num_tokens / times[name][1], 1)
    for name, each in ratios.items():
        process, clock = (round(median(column), 3) for column in zip(*each, strict=True))
        figures[name] |= {"process_time": process, "clock": clock}
    return figures


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--draft", type=Path, default=DRAFT_MODEL, help="folder of the draft model, or none")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cores", type=int, nargs="*", default=[], help="numbers of the cores to compute on")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--workloads", nargs="+", default=["questions", "copy", "random"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    drafters = ["none", "ngram", *(["draft"] if str(arguments.draft) != "none" else [])]
    servers = {
        drafter: Server(
            WorkerConfig(
                worker_id="mixed-0",
                role=WorkerRole.MIXED,
                model_path=str(arguments.model),
                precision=Precision(dtype=arguments.dtype),
                max_model_len=512,
                num_kv_blocks=2048,
                speculation=drafter,
                draft_path=str(arguments.draft),
                device="cpu",
                cpu_cores=tuple(arguments.cores),
            )
        )
        for drafter in drafters
    }
    tokenizer = ChatTokenizer.from_folder(arguments.model)
    console, table = Console(stderr=True), dict[str, Any]()
    for workload in arguments.workloads:
        for num_streams in arguments.streams:
            requests = requests_of(workload, num_streams, servers["none"].vocab_size, tokenizer)
            figures = measure(servers, requests, num_streams, arguments.rounds)
            table[f"{workload}, {num_streams} streams"] = figures
            console.print(workload, num_streams, figures)
    publish({"model": arguments.model.name, "dtype": arguments.dtype, "table": table}, arguments.json)


if __name__ == "__main__":
    main()
