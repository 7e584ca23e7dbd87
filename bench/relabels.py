"""Workers that take each other's role while streams run: what the streams notice, and how soon the role is taken.

    python -m pdserve.bench.relabels [--relabels 100] [--streams 500] [--kills] [--json FILE]

Two prefill and two decode workers, emulated processes of which every token is known, serve 64 clients. Over and over
one worker of each role or all four take the other role, at once or one after the other in random order; with --kills a
worker is killed every tenth time and started anew. Meanwhile streams go on: each must end in the right tokens. Timed is
a relabel, from the new list of workers until the router has the roles; the share of a supervisor, which sends the list,
is not part of that. At the end no block may be referenced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from pdserve.bench.handoff_cluster import HandoffCluster, running_cluster
from pdserve.bench.handoff_models import EmulatedModel
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.worker_config import WorkerRole

NUM_CLIENTS = 64
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SWAPPED = {WorkerRole.PREFILL: WorkerRole.DECODE, WorkerRole.DECODE: WorkerRole.PREFILL}
RELABELS_PER_KILL = 10
PAUSE_S = 0.1
"""Between two relabels, at most."""


class Relabels:
    """Load on a cluster, and changes of its workers' roles."""

    def __init__(self, cluster: HandoffCluster) -> None:
        self._cluster = cluster
        self._is_over = False
        self._roles = {name: WorkerRole(name.partition("-")[0]) for name in NAMES}
        self.seconds: list[float] = []
        """Of each relabel."""
        self.num_running: list[int] = []
        """Requests in flight at each relabel."""

    async def run(self, num_relabels: int, num_streams: int, *, kills: bool) -> None:
        """Relabel so often, and until so many streams have ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._client())
            while len(self.seconds) < num_relabels or self._cluster.counts["right"] < num_streams:
                await self._swap()
                if kills and len(self.seconds) >= RELABELS_PER_KILL * (self._cluster.counts["killed"] + 1):
                    await self._kill()
            self._is_over = True

    async def _client(self) -> None:
        while not self._is_over:
            await self._cluster.request(self._cluster.model.ask(self._cluster.rng))

    async def _swap(self) -> None:
        """Have one worker of each role, or all, take the other one, in one change or in several."""
        rng = self._cluster.rng
        of_role = [[name for name, role in self._roles.items() if role is each] for each in SWAPPED]
        names = list(NAMES) if rng.random() < 0.5 else [rng.choice(each) for each in of_role]
        rng.shuffle(names)
        swapped = {name: SWAPPED[self._roles[name]] for name in names}
        for change in [swapped] if rng.random() < 0.5 else [{name: role} for name, role in swapped.items()]:
            if len({*{**self._roles, **change}.values()}) == 2:  # a role without workers would serve nothing
                await self._relabel(change)

    async def _relabel(self, roles: Mapping[str, WorkerRole]) -> None:
        await asyncio.sleep(PAUSE_S * self._cluster.rng.random())
        self.num_running.append(self._cluster.dispatcher.num_in_flight)
        self._roles.update(roles)
        began_s = time.monotonic()
        await self._cluster.relabel(self._roles)
        self.seconds.append(time.monotonic() - began_s)
        for name, role in self._roles.items():
            assert self._cluster.session(name).role is role

    async def _kill(self) -> None:
        """Of a role that has another worker: without any, requests are refused after 5 s."""
        roles = list(self._roles.values())
        name = self._cluster.rng.choice([each for each, role in self._roles.items() if roles.count(role) > 1])
        await self._cluster.kill(name)
        await self._cluster.relabel(self._roles)  # as a supervisor starts it under its present role


def relabels(num_relabels: int, num_streams: int, *, kills: bool) -> dict[str, Any]:
    """Returns what was seen.

    Raises:
        AssertionError: a stream was wrong, or blocks were not freed.
    """
    return asyncio.run(_relabels(num_relabels, num_streams, kills))


async def _relabels(num_relabels: int, num_streams: int, kills: bool) -> dict[str, Any]:
    async with running_cluster(EmulatedModel(), dict.fromkeys(NAMES, (1, 1)), "memfd") as cluster:
        run = Relabels(cluster)
        await run.run(num_relabels, num_streams, kills=kills)
        await cluster.check_free()
        return {
            "relabels": len(run.seconds),
            "running_at_each": round(sum(run.num_running) / len(run.num_running), 1),
            "longest_relabel_s": round(max(run.seconds), 4),
            "streams": dict(cluster.counts),
        }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--relabels", type=int, default=100)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--kills", action="store_true")
    arguments = parser.parse_args()
    publish(relabels(arguments.relabels, arguments.streams, kills=arguments.kills), arguments.json)


if __name__ == "__main__":
    main()
