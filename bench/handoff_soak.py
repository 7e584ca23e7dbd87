"""Handoffs under random faults: real workers and transfer processes, the router's dispatch, and known answers.

    python -m pdserve.bench.handoff_soak [--handoffs 10000] [--case memfd|tcp|ranks-memfd|ranks-tcp] [--seed 0]
        [--json FILE]

Two prefill and two decode workers over one transport emulate a model whose memory is a hash of all tokens so far. In
the cases with ranks they compute a small model instead. Of each pair, one worker has two tensor-parallel ranks and the
other two pipeline stages, so that each layout hands off to both. The decode pools hold a quarter of what the clients
ask for. Meanwhile clients cancel; workers, transfer processes and other ranks are killed, or stopped and woken, at a
step of a handoff or within milliseconds of one; and with tcp a proxy between the transfer processes flips bytes, delays
them, breaks connections, and cuts the link for seconds.

Each request must end in the right tokens or in one error. After each round, when every lease has ended, no block may be
referenced anywhere, and the workers that were started anew must serve.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pdserve.bench.handoff_cluster import (
    EVENT_STEPS,
    LINK_STEPS,
    NUM_CLIENTS,
    Degrees,
    HandoffCluster,
    learn,
    running_cluster,
    send_signal,
)
from pdserve.bench.handoff_models import ComputedModel, EmulatedModel, Model
from pdserve.bench.script import publish, script_parser

CASES = ("memfd", "tcp", "ranks-memfd", "ranks-tcp")
RANKS: dict[str, Degrees] = {"prefill-0": (2, 1), "prefill-1": (1, 2), "decode-0": (1, 2), "decode-1": (2, 1)}
"""Layouts that differ within each phase."""
FAULT_INTERVAL_S = 1.0
PULL_S = 0.01
"""About the time from an offer to the end of its pull."""
PAUSE_S = 0.2
"""Pause of a client whose request failed."""


class Soak:
    """Load and faults of a cluster."""

    def __init__(self, cluster: HandoffCluster, transport: str) -> None:
        self._cluster = cluster
        self._transport = transport
        self._rng = cluster.rng
        self._goal = 0
        """Handoffs at which the round ends."""

    @property
    def num_handoffs(self) -> int:
        """Pulls that brought a prompt's blocks."""
        return self._cluster.pulls()[self._transport]

    async def run(self, num_handoffs: int, handoffs_per_round: int) -> None:
        cluster = self._cluster
        while self.num_handoffs < num_handoffs:
            self._goal = min(num_handoffs, self.num_handoffs + handoffs_per_round)
            await self._round()
            await cluster.check_free()
            cluster.counts["rounds that ended with every block free"] += 1
            sys.stderr.write(f"{self.num_handoffs} handoffs: {dict(cluster.counts)} {dict(cluster.faults.counts)}\n")

    async def _round(self) -> None:
        self._cluster.faults.is_calm = False
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._client()) for _ in range(NUM_CLIENTS)]
            group.create_task(self._disturb(clients))
        self._cluster.faults.is_calm = True

    async def _client(self) -> None:
        while self.num_handoffs < self._goal:
            leaves = self._rng.random() < 0.1
            question = self._cluster.model.ask(self._rng)
            if not await self._cluster.request(question, leaves_after_s=self._rng.random() / 10 if leaves else None):
                await asyncio.sleep(PAUSE_S)

    async def _disturb(self, clients: list[asyncio.Task[None]]) -> None:
        """Cause faults until the round's goal, and start workers that have ended while a request may wait for them."""
        while not all(client.done() for client in clients):
            await asyncio.sleep(FAULT_INTERVAL_S * self._rng.random() * 2)
            if self.num_handoffs < self._goal:
                await self._cause_fault()
            await self._cluster.start_workers()

    async def _cause_fault(self) -> None:
        """Kill a process, stop and wake one, or cut the link."""
        cluster = self._cluster
        kinds = ["killed", "stopped", *(["cut"] if cluster.is_proxied else [])]
        match self._rng.choice(kinds):
            case "killed":
                await self._signal_at_step(signal.SIGKILL)
            case "stopped":
                pid = await self._signal_at_step(signal.SIGSTOP)
                await asyncio.sleep(self._rng.choice((0.1, 1.0, 5.0)))
                send_signal(pid, signal.SIGCONT)
            case "cut":
                await cluster.faults.cut(self._rng.choice((0.2, 1.0, 6.0)))

    async def _signal_at_step(self, number: signal.Signals) -> int:
        """Signal any process when a handoff reaches a step, or up to `PULL_S` later; returns its id."""
        cluster = self._cluster
        pid = self._rng.choice(self._rng.choice(list(cluster.workers.values())).pids)
        step = self._rng.choice([*EVENT_STEPS.values(), *(LINK_STEPS if cluster.is_proxied else [])])
        delay_s = self._rng.choice((0.0, 0.0, PULL_S * self._rng.random()))
        if delay_s:
            await cluster.steps.at_next(step, lambda: None)
            await asyncio.sleep(delay_s)
            self._signal(pid, number, "later")
        else:
            await cluster.steps.at_next(step, lambda: self._signal(pid, number, step))
        return pid

    def _signal(self, pid: int, number: signal.Signals, step: str) -> None:
        name = "killed" if number is signal.SIGKILL else "stopped"
        self._cluster.counts[f"{name}: {step}"] += send_signal(pid, number)


def soak(
    case: str, num_handoffs: int, *, seed: int = 0, handoffs_per_round: int = 500, num_pairs: int = 2
) -> dict[str, Any]:
    """Run ``num_handoffs`` of one case, with ``num_pairs`` prefill workers and as many decode workers; returns what was
    seen.

    Raises:
        AssertionError: a stream was wrong, or blocks were not freed.
    """
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_soak(case, Path(folder), num_handoffs, seed, handoffs_per_round, num_pairs))


async def _soak(
    case: str, folder: Path, num_handoffs: int, seed: int, handoffs_per_round: int, num_pairs: int
) -> dict[str, Any]:
    transport = case.removeprefix("ranks-")
    names = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(num_pairs)]
    model: Model = EmulatedModel()
    layouts = dict.fromkeys(names, (1, 1))
    if transport != case:
        model = ComputedModel(folder)
        await learn(model)
        layouts = {name: RANKS[name] for name in names}
    started_s = time.monotonic()
    async with running_cluster(model, layouts, transport, seed=seed) as cluster:
        run = Soak(cluster, transport)
        await run.run(num_handoffs, handoffs_per_round)
        return {
            "seconds": round(time.monotonic() - started_s, 1),
            "handoffs": run.num_handoffs,
            "pulls": dict(cluster.pulls()),
            "requests": dict(cluster.counts),
            "link": dict(cluster.faults.counts),
        }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--handoffs", type=int, default=10_000, help="of each case")
    parser.add_argument("--case", choices=CASES, action="append", help="may be repeated; all by default")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cases = arguments.case or CASES
    publish({name: soak(name, arguments.handoffs, seed=arguments.seed) for name in cases}, arguments.json)


if __name__ == "__main__":
    main()
