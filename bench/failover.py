"""Answers that lose their worker near saturation: how long their readers wait for the next token.

    python -m pdserve.bench.failover [--kills 100] [--share 0.9] [--time-scale 5] [--json FILE]

Two prefill and two decode workers, emulated processes of which every token is known, as slow as an 8B model on GPUs
``--time-scale`` times slower than H100s. Saturation is measured first: answers/s of a closed loop. Then requests arrive
at random at a share of that, and a worker chosen at random is killed and started anew, over and over, with `PAUSE_S`
between. Each stream must end in the right tokens. Its gap is its longest time between two tokens: of ``resumed`` ones,
which lost their worker with tokens, of ``restarted`` ones, which lost it without, and of others.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.bench.handoff_cluster import HandoffCluster, Pace, running_cluster
from pdserve.bench.handoff_models import EmulatedModel, Question
from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import LLAMA_3_8B_CONFIG
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.request import SamplingParams
from pdserve.router.requests.attempt import Decoding

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PROMPT_TOKENS, ANSWER_TOKENS, MAX_MODEL_LEN = (100, 1200), (20, 200), 2048
TTFT_S, TPOT_S = 0.15, 0.01
"""Objectives, in emulated seconds."""
NUM_CLIENTS, WARM_S, SATURATED_S = 192, 15.0, 30.0
PAUSE_S = 5.0


class LargeModel(EmulatedModel):
    """Random prompts for the sizes of Llama 3 8B."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(LLAMA_3_8B_CONFIG))
        self.path = folder
        super().__init__()

    def ask(self, rng: random.Random) -> Question:
        prompt, num_tokens = rng.choices(range(512), k=rng.randint(*PROMPT_TOKENS)), rng.randint(*ANSWER_TOKENS)
        return Question(tuple(prompt), SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))


class Load:
    """Requests of a cluster, and how long their readers waited."""

    def __init__(self, cluster: HandoffCluster) -> None:
        self._cluster = cluster
        self._lost: dict[tuple[int, ...], str] = {}
        """Kind by prompt of requests that lost their worker."""
        self.gaps_s = defaultdict[str, list[float]](list)
        """Longest gap of each answer, by kind."""

    async def _request(self) -> None:
        question, times_s = self._cluster.model.ask(self._cluster.rng), list[float]()
        if await self._cluster.request(question, times_s=times_s):
            kind = self._lost.pop(question.prompt, "others")
            self.gaps_s[kind].append(max(later - sooner for sooner, later in pairwise(times_s)))

    async def saturation(self) -> float:
        """Answers/s of `NUM_CLIENTS`, each of which sends its next request at once."""
        end_s = time.monotonic() + WARM_S + SATURATED_S

        async def client() -> None:
            while time.monotonic() < end_s:
                await self._request()

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(client())
            await asyncio.sleep(WARM_S)
            num_before = self._cluster.counts["right"]
            await asyncio.sleep(SATURATED_S)
            rate = (self._cluster.counts["right"] - num_before) / SATURATED_S
        self._cluster.counts.clear()
        self.gaps_s.clear()
        return rate

    async def run(self, rate: float, num_kills: int) -> None:
        """Send requests at random while workers are killed."""
        async with asyncio.TaskGroup() as group:
            kills = group.create_task(self._kills(num_kills))
            while not kills.done():
                await asyncio.sleep(self._cluster.rng.expovariate(rate))
                group.create_task(self._request())

    async def _kills(self, number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(PAUSE_S)
            name = self._cluster.rng.choice(NAMES)
            for attempt in self._cluster.dispatcher.attempts.all.values():
                state = attempt.state
                workers = (state.worker,) if isinstance(state, Decoding) else state.workers
                if name in {worker.worker_id for worker in workers}:
                    kind = "resumed" if attempt.emitted else "restarted"
                    self._lost[attempt.request.spec.prompt_tokens] = kind
            await self._cluster.kill(name)


async def failover(num_kills: int, share: float, time_scale: float) -> dict[str, Any]:
    """Returns what was seen.

    Raises:
        AssertionError: an answer was wrong, or blocks were not freed.
    """
    slo = SloConfig(ttft_seconds=TTFT_S * time_scale, tpot_seconds=TPOT_S * time_scale)
    pace = Pace(time_scale=time_scale, max_model_len=MAX_MODEL_LEN, dtype="bfloat16", slo=slo)
    with tempfile.TemporaryDirectory() as work:
        model = LargeModel(Path(work))
        async with running_cluster(model, dict.fromkeys(NAMES, (1, 1)), "memfd", pace=pace) as cluster:
            load = Load(cluster)
            saturation = await load.saturation()
            await load.run(share * saturation, num_kills)
            await cluster.check_free()
            gaps_s = {
                kind: {f"p{each}": round(float(np.percentile(gaps_s, each)), 3) for each in (50, 99, 100)}
                for kind, gaps_s in load.gaps_s.items()
            }
            counts = cluster.counts + Counter({kind: len(each) for kind, each in load.gaps_s.items()})
            return {"saturation_per_s": round(saturation, 2), "streams": dict(counts), "longest_gaps_s": gaps_s}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.9, help="of saturation")
    parser.add_argument("--time-scale", type=float, default=5.0)
    arguments = parser.parse_args()
    given = {"kills": arguments.kills, "share": arguments.share, "time_scale": arguments.time_scale}
    publish({**given, **asyncio.run(failover(*given.values()))}, arguments.json)


if __name__ == "__main__":
    main()
