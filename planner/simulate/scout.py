"""The scout: a compiled model of a placement under an open loop, fast enough to try every rate on long runs.

Takes what the judge, `pdserve.planner.simulate.simulator.simulate`, takes, and answers with the times of the same
requests. It models the router's choices, queues, chunked prefill, decode batches, KV blocks, prefix caches, transfers
and preemption on tables of the same cost model; see `pdserve.planner.simulate.scout_kernel`. The first call in a
process loads the compiled kernel from the disk; the first after an installation compiles it, which takes a minute, and
for which other processes wait.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import nan

import numpy as np
from numba import typeof

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.engine.worker.pool_size import AUTO_SWAP_SHARE
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel, CountTerms
from pdserve.model.cost.hardware import hardware
from pdserve.planner.arrays import FloatArray, IntArray
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate import scout_kernel as kernel
from pdserve.planner.simulate.simulation import RequestTimes, Simulation
from pdserve.planner.simulate.simulator import Overheads
from pdserve.planner.workload.requests import Segment, SimulatedRequest

MAX_WAIT_S = 600.0
"""For another process that compiles the kernel, which takes a minute or, on a busy machine, several."""
_POLL_S = 0.1
_ROLES = {WorkerRole.PREFILL: kernel.PREFILL, WorkerRole.DECODE: kernel.DECODE, WorkerRole.MIXED: kernel.MIXED}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoutRequests:
    """N requests: the first turns of conversations in order of arrival, then all other turns."""

    arrived_s: FloatArray
    """Of first turns; others arrive ``think_s`` after the turn before them has ended."""
    think_s: FloatArray
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    max_tokens: IntArray
    """Limit of each answer, 0 for its length."""
    next_turn: IntArray
    """Row of the conversation's next turn; -1 for none."""
    prefixes: PrefixTree

    @classmethod
    def of(cls, requests: Sequence[SimulatedRequest]) -> ScoutRequests:
        """The same requests, in order of arrival."""
        turns, next_turn = list(requests), [-1] * len(requests)
        for row, turn in enumerate(turns):
            if turn.follow_up is not None:
                next_turn[row] = len(turns)
                next_turn.append(-1)
                turns.append(turn.follow_up)
        rows = [(each.arrived_s, each.num_prompt_tokens, each.num_output_tokens, each.max_tokens) for each in turns]
        times_s, num_prompt, num_output, max_tokens = np.array(rows, np.float64).reshape(-1, 4).T
        return cls(
            arrived_s=times_s[: len(requests)].copy(),
            think_s=times_s,
            num_prompt_tokens=num_prompt.astype(np.int64),
            num_output_tokens=num_output.astype(np.int64),
            max_tokens=max_tokens.astype(np.int64),
            next_turn=np.array(next_turn, np.int64),
            prefixes=PrefixTree.of(turns, next_turn),
        )

    def faster(self, factor: float) -> ScoutRequests:
        """The same requests, ``factor`` times as many per second; users think as long."""
        return replace(self, arrived_s=self.arrived_s / factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Prompts as paths of nodes from the root: prompts that begin alike have the same first nodes. Without nodes if no
    prompts do."""

    paths: IntArray
    """Nodes of all prompts, one prompt after the other."""
    ends: IntArray
    """End of each prompt's path."""
    answers: IntArray
    """Node of each request's answer, which its next turn continues."""
    from_tokens: IntArray
    """First token of each node, counted from the beginning of the prompt."""
    to_tokens: IntArray
    """The one after its last, counted likewise."""

    @classmethod
    def of(cls, turns: Sequence[SimulatedRequest], next_turn: Sequence[int]) -> PrefixTree:
        """
        Args:
            turns: later turns of a conversation after earlier ones.
            next_turn: row of each turn's next one; -1 for none.
        """
        if not any(turn.segments or turn.follow_up is not None for turn in turns):
            none = np.zeros(0, np.int64)
            nothing = np.zeros(len(turns), np.int64)
            return cls(paths=none, ends=nothing, answers=nothing - 1, from_tokens=none, to_tokens=none)
        uses = Counter([segment.content for turn in turns for segment in turn.segments])
        shared: dict[tuple[int, Segment], int] = {}
        spans: list[tuple[int, int]] = []
        paths: list[list[int]] = [[] for _ in turns]
        answers = []

        def add(num_before: int, num_tokens: int) -> int:
            spans.append((num_before, num_before + num_tokens))
            return len(spans) - 1

        for turn, after, path in zip(turns, next_turn, paths, strict=True):
            num_before = spans[path[-1]][1] if path else 0
            for segment in turn.segments:
                if uses[segment.content] < 2:
                    break  # the rest is this prompt's alone
                key = path[-1] if path else -1, segment
                if key not in shared:
                    shared[key] = add(num_before, segment.num_tokens)
                path.append(shared[key])
                num_before += segment.num_tokens
            if turn.num_prompt_tokens > num_before:
                path.append(add(num_before, turn.num_prompt_tokens - num_before))
            answers.append(add(turn.num_prompt_tokens, turn.num_output_tokens))
            if after >= 0:
                paths[after] += [*path, answers[-1]]
        from_tokens, to_tokens = np.array(spans, np.int64).T
        return cls(
            paths=np.concatenate([np.array(path, np.int64) for path in paths]),
            ends=np.cumsum([len(path) for path in paths]),
            answers=np.array(answers, np.int64),
            from_tokens=from_tokens,
            to_tokens=to_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoutResult:
    """Times of the requests, and what follows from them."""

    times: RequestTimes
    """In order of arrival, without turns after one that was rejected. ``second_token_s`` is not known."""
    num_preemptions: int
    num_decoded: int
    """Tokens after token 0, of all answers."""
    offered_until_s: float
    """Arrival of the last first turn."""

    def simulation(self) -> Simulation:
        """The result as that of the simulator, without figures of workers and gaps between tokens."""
        ended_s = np.nanmax(self.times.last_token_s, initial=0.0)
        none = np.zeros(0)
        return Simulation(
            times=self.times,
            workers=[],
            gap_s=none,
            gap_weights=none,
            ended_s=float(ended_s),
            offered_until_s=self.offered_until_s,
        )


def scout(
    model: PlannedModel,
    layout: Layout,
    requests: ScoutRequests,
    *,
    slo: SloConfig,
    overheads: Overheads | None = None,
    max_in_flight: int = 1024,
) -> ScoutResult:
    """Serve ``requests`` on ``layout``; see `pdserve.planner.simulate.simulator.simulate` for the arguments.

    Raises:
        ValueError: the model does not fit, or does not divide as the layout says.
    """
    pools = list(layout.pools)
    costs = [pool.cost(model) for pool in pools]
    workers = _workers(model, layout, pools, costs)
    table = _request_table(model, requests, workers)
    num_counts = max(pool.max_batch_tokens for pool in pools) + max_in_flight + 2
    tables = [_table_of(replace(pool, replicas=1), model, _power_of_two(num_counts)) for pool in pools]
    length = _power_of_two(max(2 * max_in_flight, model.block_size, *(pool.max_batch_size for pool in pools)))
    prefixes, num_nodes = requests.prefixes, len(requests.prefixes.to_tokens)
    lru = np.zeros((len(workers), num_nodes + 1, 2), np.int32)
    lru[:, num_nodes] = num_nodes
    state = kernel.State(
        cluster=_cluster(model, slo, overheads or Overheads(), max_in_flight, len(requests.arrived_s)),
        requests=table,
        workers=workers,
        turn_at_s=np.full(len(workers), np.inf),
        quiet_until_s=np.full(len(workers), np.inf),
        lists=np.zeros((len(workers), kernel.NUM_LISTS, length), np.int32),
        messages=np.zeros(4 * length, kernel.EVENT),
        timers=np.zeros(length + len(table), kernel.EVENT),
        tables=np.stack(tables),
        paths=prefixes.paths.astype(np.int32),
        node_blocks=np.diff(np.stack([prefixes.from_tokens, prefixes.to_tokens]) // model.block_size, axis=0)[0].astype(
            np.int32
        ),
        cached=np.zeros((len(workers), num_nodes), np.int32),
        num_references=np.zeros((len(workers), num_nodes), np.int32),
        lru=lru,
    )
    if not kernel.run.signatures:
        with _one_compiler():
            kernel.run.compile((typeof(state),))
    kernel.run(state)
    assert (workers["num_free"] == workers["num_blocks"]).all(), "all blocks are free in the end"
    if len(table) > len(requests.arrived_s):
        table = np.sort(table[~np.isnan(table["arrived_s"])], order="arrived_s", kind="stable")
    times = RequestTimes(
        arrived_s=table["arrived_s"].copy(),
        started_s=table["started_s"].copy(),
        first_token_s=table["first_token_s"].copy(),
        second_token_s=np.full(len(table), nan),
        last_token_s=table["last_token_s"].copy(),
        num_prompt_tokens=table["num_prompt"].copy(),
        num_cached_tokens=table["num_cached"].copy(),
        num_output_tokens=table["num_output"].copy(),
        is_rejected=table["is_rejected"].astype(np.bool_),
    )
    return ScoutResult(
        times=times,
        num_preemptions=int(workers["num_preemptions"].sum()),
        num_decoded=int(workers["num_decoded"].sum()),
        offered_until_s=float(requests.arrived_s[-1]),
    )


@contextmanager
def _one_compiler() -> Iterator[None]:
    """Let one process at a time compile the kernel, or load it; where one dies, the operating system lets in the
    next."""
    folder = os.open(kernel.run.stats.cache_path, os.O_RDONLY)
    try:
        deadline_s = time.monotonic() + MAX_WAIT_S
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(folder)


def load_scout() -> None:
    """Load the compiled kernel, or compile it."""
    shape = ModelShape(
        num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=8
    )
    pool = Pool(role=WorkerRole.MIXED, replicas=1, hardware=hardware("h100-sxm"))
    requests = ScoutRequests.of([SimulatedRequest(0.0, 1, 2)])
    scout(PlannedModel(name="", shape=shape), Layout(mixed=pool), requests, slo=SloConfig())


def _cluster(
    model: PlannedModel, slo: SloConfig, overheads: Overheads, max_in_flight: int, num_first: int
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    cluster = np.zeros(1, kernel.CLUSTER)
    cluster["block_size"] = model.block_size
    cluster["max_in_flight"] = max_in_flight
    cluster["num_first"] = num_first
    cluster["tpot_slo_s"] = slo.tpot_seconds
    for name in ("arrival_s", "message_s", "answer_s", "pull_s", "turn_s"):
        cluster[name] = getattr(overheads, name)
    return cluster


def _request_table(
    model: PlannedModel, requests: ScoutRequests, workers: np.ndarray[tuple[int], np.dtype[np.void]]
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Requests before their arrival; those that no worker could ever hold are rejected."""
    block_size = model.block_size
    table = np.zeros(len(requests.num_prompt_tokens), kernel.REQUEST)
    for name in ("arrived_s", "started_s", "first_token_s", "last_token_s", "pull_begun_s", "granted_s"):
        table[name] = nan
    table["arrived_s"][: len(requests.arrived_s)] = requests.arrived_s
    table["think_s"] = requests.think_s
    table["num_prompt"], table["num_output"] = requests.num_prompt_tokens, requests.num_output_tokens
    limit = np.minimum(requests.max_tokens, model.max_model_len - requests.num_prompt_tokens)
    table["max_output"] = np.maximum(limit, requests.num_output_tokens)
    table["next_turn"] = requests.next_turn
    prefixes = requests.prefixes
    table["path_begin"][1:], table["path_end"] = prefixes.ends[:-1], prefixes.ends
    table["answer_node"] = prefixes.answers
    num_tokens = requests.num_prompt_tokens + table["max_output"]
    num_blocks = np.where(workers["role"] == kernel.PREFILL, np.iinfo(np.int64).max, workers["num_blocks"]).min()
    is_too_long = (num_tokens > model.max_model_len) | (-(-(num_tokens - 1) // block_size) > num_blocks)
    prefilling = workers["num_blocks"][workers["role"] == kernel.PREFILL]
    is_too_long |= -(-requests.num_prompt_tokens // block_size) > prefilling.min(initial=np.iinfo(np.int64).max)
    table["is_rejected"] = is_too_long
    return table


def _workers(
    model: PlannedModel, layout: Layout, pools: Sequence[Pool], costs: Sequence[CostModel]
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Idle workers, one per micro-batch, in order of their names."""
    rows: list[np.ndarray[tuple[()], np.dtype[np.void]]] = []
    host_numbers: dict[tuple[int, ...], int] = {}
    for number, (pool, cost) in enumerate(zip(pools, costs, strict=True)):
        hosts = layout.worker_hosts[pool.role]
        num_stages = pool.pipeline_parallel
        num_blocks = pool.micro_batch_blocks(model, cost)
        max_batch_size = max(1, pool.max_batch_size // num_stages)
        if pool.role is not WorkerRole.PREFILL:
            max_batch_size = min(max_batch_size, max(1, pool.max_batch_tokens - 1))
        for replica in sorted(range(pool.replicas), key=str):
            first = len(rows)
            for _ in range(num_stages):
                worker = np.zeros((), kernel.WORKER)
                worker["role"], worker["pool"] = _ROLES[pool.role], number
                worker["host"] = host_numbers.setdefault(hosts[replica], len(host_numbers))
                worker["max_batch_tokens"], worker["max_batch_size"] = pool.max_batch_tokens, max_batch_size
                worker["num_blocks"] = worker["num_free"] = num_blocks
                worker["num_swap_slots"] = int(num_blocks * AUTO_SWAP_SHARE)
                worker["depth"] = cost.pipeline_depth
                worker["num_stages"], worker["first_of_pipeline"] = num_stages, first
                worker["decode_token_s"], worker["window_share"] = cost.decode_token_s, cost.window_share
                worker["window"] = cost.window
                worker["near_block_s"] = cost.transfer_s(model.block_size, same_host=True)
                worker["far_block_s"] = cost.transfer_s(model.block_size, same_host=False)
                worker["swap_block_s"] = cost.swap_s(model.block_size)
                worker["first_last_step"] = worker["refused_blocks"] = kernel.NEVER
                rows.append(worker)
    return np.array(rows)


@lru_cache(maxsize=256)
def _table_of(pool: Pool, model: PlannedModel, num_counts: int) -> FloatArray:
    return step_table(pool.cost(model), num_counts)


def step_table(cost: CostModel, num_counts: int) -> FloatArray:
    """`CostModel.terms` by term and count, 0 for none."""
    table = np.zeros((len(CountTerms._fields), num_counts))
    table[:, 1:] = cost.terms(np.arange(1, num_counts, dtype=np.float64))
    return table


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


if __name__ == "__main__":
    load_scout()
