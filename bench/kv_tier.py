"""What a tier below the KV pool gains and costs, in one process: a worker's scheduler, tier and executor, no router.

    python -m pdserve.bench.kv_tier [--shape 0.5b | small] [--folder FOLDER] [--rounds 3] [--json FILE]

With random weights, with and without the tier in turn: ``conversations`` (turns at random of conversations that fill
1.3 pools: TTFT), ``once`` (prompts that share nothing: seconds of all), ``restart`` (TTFT of a second turn over an
empty pool, from what the first left in the file), ``decode`` (seconds of answers beside which their blocks are copied).
The ratios are with over without, of clock and of process time; ``copies`` is the CPU time of the tier's thread over
that of the process without it. Fails if tokens differ.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console

from pdserve.bench.script import publish, script_parser
from pdserve.contracts.events import RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, SamplingParams
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.engine.worker.backend import choose_backend
from pdserve.engine.worker.scheduler import Scheduler
from pdserve.engine.worker.step_times import StepTimes
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.kv_transfer.file_tier import FileTier
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.prefill_worker.restores import NO_TIER, TierSpace

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_layers": 24,
        "num_heads": 14,
        "num_kv_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "small": {"hidden_size": 512, "intermediate_size": 1408, "num_layers": 8, "vocab_size": 4096},
}
POOL_TOKENS = 2560
BLOCK_SIZE = 16
TURN_TOKENS = 32
ANSWER_TOKENS = 8


class Server:
    """A worker without its processes. Each `Session` begins with an empty pool."""

    def __init__(self, model: Path) -> None:
        self.config = WorkerConfig(
            worker_id="mixed-0",
            role=WorkerRole.MIXED,
            model_path=str(model),
            max_model_len=POOL_TOKENS - BLOCK_SIZE,
            num_kv_blocks=POOL_TOKENS // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_batch_tokens=256,
            device="cpu",
        )
        self.backend = choose_backend(self.config)
        self.memory = PoolMemory.create(self.backend.layout)
        [self.executor] = self.backend.build_executors(self.memory).executors
        self.times = StepTimes(self.backend.cost)


class Served(NamedTuple):
    ttft_s: list[float]
    answers: list[list[int]]
    clock_s: float
    process_s: float


class MeasuredTier(FileTier):
    cpu_s = 0.0
    """Of its thread's work."""

    def work(self) -> bool:
        begun_s = time.thread_time()
        try:
            return super().work()
        finally:
            self.cpu_s += time.thread_time() - begun_s


class Session:
    def __init__(self, server: Server, path: Path | None) -> None:
        """``path``: file of the tier; ``None`` without."""
        self._server, config = server, server.config
        self._ended: deque[int] = deque()
        self._pool = BlockPool(config.num_kv_blocks, BLOCK_SIZE, server.memory.generations)  # type: ignore[arg-type]
        self.tier: MeasuredTier | None = None
        space = NO_TIER
        if path is not None:
            self.tier = MeasuredTier(
                path,
                server.memory,
                self._pool,
                size_bytes=8 * server.backend.layout.pool_bytes,
                max_model_len=config.max_model_len,
                secret="",
                on_restored=self._ended.append,
            )
            self.tier.start()
            space = TierSpace(tier=self.tier, compute_s=self._compute_s)
        handles = count()
        self.scheduler = Scheduler(
            self._pool,
            server.backend.limits,
            mint_handle=lambda: next(handles).to_bytes(16, "little"),
            max_batch_tokens=config.max_batch_tokens,
            max_batch_size=config.max_batch_size,
            tier_space=space,
        )
        self._ids = count()

    def _compute_s(self, num_tokens: int, num_cached: int) -> float:
        times, budget = self._server.times, self._server.config.max_batch_tokens
        return self._server.backend.cost.prompt_s(num_tokens, num_cached, budget) * times.prefill.factor

    def serve(self, prompts: Sequence[Sequence[int]], num_tokens: int, *, at_once: bool = False) -> Served:
        """Answer prompts, one after another or all at once."""
        process_s, begun_s = time.process_time(), time.perf_counter()
        runs = [prompts] if at_once else [[prompt] for prompt in prompts]
        parts = [self._run(run, num_tokens) for run in runs]
        return Served(
            [each for ttft_s, _ in parts for each in ttft_s],
            [each for _, answers in parts for each in answers],
            time.perf_counter() - begun_s,
            time.process_time() - process_s,
        )

    def _run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[float], list[list[int]]]:
        scheduler, times, begun_s = self.scheduler, self._server.times, time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        answers: dict[int, list[int]] = {}
        ttft_s: dict[int, float] = {}
        for prompt in prompts:
            number = next(self._ids)
            answers[number] = []
            request = GenerationRequest(request_id=number, prompt_tokens=tuple(prompt), sampling=sampling)
            scheduler.add(RequestKey(0, number, 0), request, time.monotonic())
        num_live = len(prompts)
        while num_live:
            while self._ended:
                scheduler.restored(self._ended.popleft())
            batch = scheduler.plan(time.monotonic())
            if batch is None:
                time.sleep(0.0005)  # a prompt waits for the tier
                continue
            prediction = times.predict(batch)
            output = self._server.executor.submit(batch).result()
            scheduler.complete(output, time.monotonic())
            times.observe(prediction, output.duration_s)
            self._follow()
            for event in scheduler.take_events():
                if isinstance(event, TokenEvent):
                    number = event.key.request_id
                    ttft_s.setdefault(number, time.perf_counter() - begun_s)
                    answers[number].append(event.token)
                    num_live -= event.finish is not FinishReason.NONE
        return list(ttft_s.values()), list(answers.values())

    def _follow(self) -> None:
        events = self._pool.take_cache_events()
        if self.tier is not None:
            self.tier.follow(events)

    def close(self) -> None:
        """End the tier's thread once all is copied."""
        if self.tier is not None:
            while self.tier.num_waiting:
                time.sleep(0.01)
            self.tier.close()


class Bench:
    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._files = count()

    def _sessions(self) -> list[tuple[str, Session]]:
        path = self._folder / f"{next(self._files)}.kv"
        return [("without", Session(self._server, None)), ("with", Session(self._server, path))]

    def _prompt(self, random: Random, num_tokens: int) -> list[int]:
        return [random.randrange(6, self._server.backend.limits.vocab_size) for _ in range(num_tokens)]

    def conversations(self, seed: int) -> dict[str, Any]:
        """Ten of them, each of 0.13 pools at its end."""
        figures: dict[str, Any] = {}
        num_turns, expected = 3, list[list[int]]()
        for name, session in self._sessions():
            random = Random(seed)
            length = int(0.13 * POOL_TOKENS) - num_turns * (TURN_TOKENS + ANSWER_TOKENS)
            texts = [self._prompt(random, length) for _ in range(10)]
            ttft_s: list[float] = []
            answers: list[list[int]] = []
            order = [number for number in range(len(texts)) for _ in range(num_turns)]
            random.shuffle(order)
            for number in [*range(len(texts)), *order]:
                texts[number] += self._prompt(random, TURN_TOKENS)
                served = session.serve([texts[number]], ANSWER_TOKENS)
                texts[number] += served.answers[0]
                ttft_s += served.ttft_s
                answers += served.answers
            session.close()
            expected = expected or answers
            assert answers == expected, "the tier changes tokens"
            later = ttft_s[len(texts) :]
            figures[name] = {"p50_s": round(median(later), 3), "p90_s": round(quantiles(later, n=10)[-1], 3)}
            figures[name]["restored_tokens"] = session.scheduler.load().num_restored_tokens
        figures["p90_ratio"] = round(figures["with"]["p90_s"] / figures["without"]["p90_s"], 3)
        return figures

    def once(self, seed: int) -> dict[str, Any]:
        """Two pools of prompts."""
        return self._compare([self._prompt(Random(seed + n), 512) for n in range(10)], ANSWER_TOKENS, at_once=False)

    def decode(self, seed: int) -> dict[str, Any]:
        """Eight short prompts with long answers, whose blocks are copied as they are complete."""
        return self._compare([self._prompt(Random(seed + n), 17) for n in range(8)], 96, at_once=True)

    def _compare(self, prompts: list[list[int]], num_tokens: int, *, at_once: bool) -> dict[str, Any]:
        served, copy_s = {}, 0.0
        for name, session in self._sessions():
            served[name] = session.serve(prompts, num_tokens, at_once=at_once)
            session.close()
            copy_s = 0.0 if session.tier is None else session.tier.cpu_s
        one, other = served["without"], served["with"]
        assert one.answers == other.answers, "the tier changes tokens"
        ratios = {"clock_ratio": other.clock_s / one.clock_s, "process_ratio": other.process_s / one.process_s}
        return {name: round(ratio, 4) for name, ratio in {**ratios, "copies": copy_s / one.process_s}.items()}

    def restart(self, seed: int) -> dict[str, Any]:
        path, random = self._folder / f"{next(self._files)}.kv", Random(seed)
        text = self._prompt(random, 2048)
        first = Session(self._server, path)
        text += first.serve([text], ANSWER_TOKENS).answers[0] + self._prompt(random, TURN_TOKENS)
        first.close()
        figures: dict[str, Any] = {}
        answers = []
        for name, each in (("without", None), ("with", path)):
            session = Session(self._server, each)
            served = session.serve([text], ANSWER_TOKENS)
            session.close()
            figures[f"{name}_s"] = round(served.ttft_s[0], 3)
            answers.append(served.answers)
        assert answers[0] == answers[1], "the tier changes tokens"
        figures["restored_tokens"] = session.scheduler.load().num_restored_tokens
        figures["ratio"] = round(figures["with_s"] / figures["without_s"], 3)
        return figures


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--folder", type=Path, help="for the tier's file; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["conversations", "once", "restart", "decode"])
    arguments = parser.parse_args()
    console = Console(stderr=True)
    with TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        model = write_random_checkpoint(folder / "model", **SHAPES[arguments.shape])
        bench = Bench(Server(model), folder)
        result: dict[str, Any] = {}
        for part in arguments.parts:
            result[part] = []
            for number in range(arguments.rounds):
                result[part].append(getattr(bench, part)(1000 * number))
                console.print(part, result[part][-1])
    publish({"shape": arguments.shape, "rounds": result}, arguments.json)


if __name__ == "__main__":
    main()
