"""Lost ranks and transfer processes: how soon the router and the others of the worker know, and what other workers'
streams notice.

    python -m pdserve.bench.rank_faults [--rounds 3] [--json FILE]

A prefill worker and two decode workers, each of two tensor-parallel ranks, compute a small model for some clients. In
turn each kind of process of one decode worker is killed, or stopped for good, and the worker is started anew. Timed,
from the signal:

- lost: until the router has given up the worker.
- ended: until no process of the worker is left. A stopped leader is killed once it is lost, as a supervisor does.
- gap: the longest time between two tokens from the other decode worker, up to the start of the new one and beyond.

Every answer must be right.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from pdserve.bench.handoff_cluster import HandoffCluster, learn, running_cluster, send_signal
from pdserve.bench.handoff_models import ComputedModel
from pdserve.bench.script import publish, script_parser
from pdserve.router.requests.attempt import Decoding

DEGREES = (2, 1)
VICTIM, OTHER = "decode-0", "decode-1"
NUM_CLIENTS = 4
FAULTS = {
    f"{name} {what}": (mark, number)
    for name, mark in (("leader", "worker.process"), ("rank", "follower"), ("transfer process", "transfer_process"))
    for what, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP))
}
"""A word of the process's command line, and the signal."""
WARM_S = 1.0
"""Load before each fault, and after the worker is back."""
TIMEOUT_S = 30.0
_POLL_S = 0.005


class RankFaults:
    """Load on a cluster, and the faults of one of its workers."""

    def __init__(self, cluster: HandoffCluster) -> None:
        self._cluster = cluster
        self._is_over = False
        self._gaps_s: list[float] = []
        """Between tokens from `OTHER`."""

    async def run(self, num_rounds: int) -> dict[str, list[dict[str, float]]]:
        """Seconds of each fault in each round."""
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._client())
            seen: dict[str, list[dict[str, float]]] = {name: [] for name in FAULTS}
            for _ in range(num_rounds):
                for name, (mark, number) in FAULTS.items():
                    seen[name].append(await self._strike(mark, number))
            self._is_over = True
        return seen

    async def _strike(self, mark: str, number: signal.Signals) -> dict[str, float]:
        victim = self._cluster.workers[VICTIM]
        await asyncio.sleep(WARM_S)
        self._gaps_s.clear()
        pids = victim.pids
        pid = next(pid for pid in pids if any(mark in word for word in psutil.Process(pid).cmdline()))
        session = self._cluster.session(VICTIM)
        struck_s = time.monotonic()
        send_signal(pid, number)
        await _until(lambda: not session.is_up)
        seconds = {"lost": time.monotonic() - struck_s}
        if pid == pids[0] and number is signal.SIGSTOP:
            send_signal(pid, signal.SIGKILL)
        await _until(lambda: not any(_runs(pid) for pid in pids))
        seconds["ended"] = time.monotonic() - struck_s
        await self._cluster.start_workers()
        assert not set(pids) & set(victim.pids)
        await asyncio.sleep(WARM_S)
        seconds["gap"] = max(self._gaps_s)
        return {name: round(value, 3) for name, value in seconds.items()}

    async def _client(self) -> None:
        model = self._cluster.model
        while not self._is_over:
            question = model.ask(self._cluster.rng)
            stream = self._cluster.start(question)
            tokens: list[int] = []
            seen: list[tuple[str, float]] = []
            """Decode worker of each token and its time."""
            async for event in stream:
                tokens.append(event.token)
                attempt = stream.attempts.get(0)
                if attempt is not None:  # the answer goes on
                    worker = attempt.state.worker.worker_id if isinstance(attempt.state, Decoding) else ""
                    seen.append((worker, time.monotonic()))
            assert tokens == model.answer(question), question
            # The first token from a decode worker waits for its handoff.
            self._gaps_s += [
                later_s - earlier_s
                for (worker, earlier_s), (same, later_s) in pairwise(seen[1:])
                if worker == same == OTHER
            ]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110  # processes send no event
            await asyncio.sleep(_POLL_S)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def measure(folder: Path, num_rounds: int) -> dict[str, list[dict[str, float]]]:
    model = ComputedModel(folder)
    await learn(model)
    layouts = dict.fromkeys(("prefill-0", VICTIM, OTHER), DEGREES)
    async with running_cluster(model, layouts, "memfd") as cluster:
        return await RankFaults(cluster).run(num_rounds)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = asyncio.run(measure(Path(folder), arguments.rounds))
    worst: dict[str, Any] = {
        name: {key: max(each[key] for each in seconds) for key in seconds[0]} for name, seconds in rounds.items()
    }
    publish({"worst_seconds": worst, "rounds": rounds}, arguments.json)


if __name__ == "__main__":
    main()
