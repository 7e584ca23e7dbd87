"""The scout: a compiled model of a placement under an open loop, fast enough to try every rate on long runs.

Takes what the judge, `pdserve.planner.simulate.simulator.simulate`, takes, and answers with the times of the same
requests. It models the router's choices, queues, chunked prefill, decode batches, KV blocks, transfers and preemption
on tables of the same cost model, with prefixes by the length that is cached instead of their contents; see
`pdserve.planner.simulate.scout_kernel`. The first call in a process loads the compiled kernel from the disk; the first
after an installation compiles it, which takes a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import nan

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.engine.worker.pool_size import AUTO_SWAP_SHARE
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.planner.arrays import FloatArray, IntArray
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate import scout_kernel as kernel
from pdserve.planner.simulate.simulation import RequestTimes, Simulation
from pdserve.planner.simulate.simulator import Overheads
from pdserve.planner.workload.requests import SimulatedRequest

_ROLES = {WorkerRole.PREFILL: kernel.PREFILL, WorkerRole.DECODE: kernel.DECODE, WorkerRole.MIXED: kernel.MIXED}
_DENSE_COUNTS = 256
_COUNT_RATIO = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoutRequests:
    """N requests in order of arrival."""

    arrived_s: FloatArray
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    num_cached_tokens: IntArray
    """Leading prompt tokens that every worker caches."""
    num_shared_tokens: IntArray
    """Those of them in KV blocks that several running requests share."""
    num_prefix_tokens: int = 0
    """Sum of all distinct shared prefixes, whose KV every worker holds once."""

    @classmethod
    def of(
        cls,
        requests: Sequence[SimulatedRequest],
        *,
        num_cached: int = 0,
        num_shared: int = 0,
        num_prefix_tokens: int = 0,
    ) -> ScoutRequests:
        """Requests with ``num_cached`` tokens each in the prefix caches, ``num_shared`` of them shared."""
        rows = [(each.arrived_s, each.num_prompt_tokens, each.num_output_tokens) for each in requests]
        arrived_s, num_prompt, num_output = np.array(rows, np.float64).reshape(-1, 3).T
        return cls(
            arrived_s=arrived_s.copy(),
            num_prompt_tokens=num_prompt.astype(np.int64),
            num_output_tokens=num_output.astype(np.int64),
            num_cached_tokens=np.full(len(rows), num_cached, np.int64),
            num_shared_tokens=np.full(len(rows), num_shared, np.int64),
            num_prefix_tokens=num_prefix_tokens,
        )

    def faster(self, factor: float) -> ScoutRequests:
        """The same requests, ``factor`` times as many per second."""
        return replace(self, arrived_s=self.arrived_s / factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoutResult:
    """Times of the requests, and what follows from them."""

    times: RequestTimes
    """``second_token_s`` is not known."""
    num_preemptions: int
    num_decoded: int
    """Tokens after token 0, of all answers."""

    def simulation(self) -> Simulation:
        """The result as the judge's, without figures of workers and gaps between tokens."""
        ended_s = np.nanmax(self.times.last_token_s, initial=0.0)
        none = np.zeros(0)
        return Simulation(times=self.times, workers=[], gap_s=none, gap_weights=none, ended_s=float(ended_s))


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
    workers = _workers(model, layout, pools, costs, requests.num_prefix_tokens // model.block_size)
    table = _request_table(model, requests, workers)
    longest = int(requests.num_prompt_tokens.max(initial=1))
    num_counts = max(longest, *(pool.max_batch_tokens for pool in pools)) + max_in_flight + 2
    tables = [_table_of(replace(pool, replicas=1), model, _power_of_two(num_counts)) for pool in pools]
    length = _power_of_two(max(2 * max_in_flight, model.block_size, *(pool.max_batch_size for pool in pools)))
    state = kernel.State(
        cluster=_cluster(model, slo, overheads or Overheads(), max_in_flight),
        requests=table,
        workers=workers,
        turn_at_s=np.full(len(workers), np.inf),
        quiet_until_s=np.full(len(workers), np.inf),
        lists=np.zeros((len(workers), kernel.NUM_LISTS, length), np.int32),
        messages=np.zeros(4 * length, kernel.EVENT),
        pulls=np.zeros(length, kernel.EVENT),
        tables=np.stack(tables),
    )
    kernel.run(state)
    times = RequestTimes(
        arrived_s=requests.arrived_s,
        started_s=table["started_s"].copy(),
        first_token_s=table["first_token_s"].copy(),
        second_token_s=np.full(len(table), nan),
        last_token_s=table["last_token_s"].copy(),
        num_prompt_tokens=requests.num_prompt_tokens,
        num_cached_tokens=table["num_cached"].copy(),
        num_output_tokens=requests.num_output_tokens,
        is_rejected=table["is_rejected"].astype(np.bool_),
    )
    return ScoutResult(
        times=times,
        num_preemptions=int(workers["num_preemptions"].sum()),
        num_decoded=int(workers["num_decoded"].sum()),
    )


def load_scout() -> None:
    """Load the compiled kernel, or compile it."""
    shape = ModelShape(
        num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=8
    )
    pool = Pool(role=WorkerRole.MIXED, replicas=1, hardware=hardware("h100-sxm"))
    requests = ScoutRequests.of([SimulatedRequest(0.0, 1, 2)])
    scout(PlannedModel(name="", shape=shape), Layout(mixed=pool), requests, slo=SloConfig())


def _cluster(
    model: PlannedModel, slo: SloConfig, overheads: Overheads, max_in_flight: int
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    cluster = np.zeros(1, kernel.CLUSTER)
    cluster["block_size"] = model.block_size
    cluster["max_in_flight"] = max_in_flight
    cluster["tpot_slo_s"] = slo.tpot_seconds
    for name in ("arrival_s", "message_s", "answer_s", "pull_s", "turn_s"):
        cluster[name] = getattr(overheads, name)
    return cluster


def _request_table(
    model: PlannedModel, requests: ScoutRequests, workers: np.ndarray[tuple[int], np.dtype[np.void]]
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Requests before their arrival; those that no worker could ever hold are rejected."""
    block_size = model.block_size
    table = np.zeros(len(requests.arrived_s), kernel.REQUEST)
    table["arrived_s"] = requests.arrived_s
    for name in ("started_s", "first_token_s", "last_token_s", "pull_begun_s", "granted_s"):
        table[name] = nan
    table["num_prompt"], table["num_output"] = requests.num_prompt_tokens, requests.num_output_tokens
    num_full_blocks = (requests.num_prompt_tokens - 1) // block_size
    table["num_cached"] = np.minimum(requests.num_cached_tokens // block_size, num_full_blocks) * block_size
    table["num_shared_blocks"] = np.minimum(requests.num_shared_tokens // block_size, num_full_blocks)
    num_tokens = requests.num_prompt_tokens + requests.num_output_tokens
    num_blocks = np.where(workers["role"] == kernel.PREFILL, np.iinfo(np.int64).max, workers["num_blocks"]).min()
    is_too_long = (num_tokens > model.max_model_len) | (-(-(num_tokens - 1) // block_size) > num_blocks)
    prefilling = workers["num_blocks"][workers["role"] == kernel.PREFILL]
    is_too_long |= -(-requests.num_prompt_tokens // block_size) > prefilling.min(initial=np.iinfo(np.int64).max)
    table["is_rejected"] = is_too_long
    return table


def _workers(
    model: PlannedModel, layout: Layout, pools: Sequence[Pool], costs: Sequence[CostModel], num_prefix_blocks: int
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Idle workers, one per micro-batch, in order of their names."""
    rows: list[np.ndarray[tuple[()], np.dtype[np.void]]] = []
    host_numbers: dict[tuple[int, ...], int] = {}
    for number, (pool, cost) in enumerate(zip(pools, costs, strict=True)):
        hosts = layout.worker_hosts[pool.role]
        num_stages = pool.pipeline_parallel
        num_blocks = pool.kv_blocks(model, cost) // num_stages - num_prefix_blocks
        if num_blocks < 1:
            raise ValueError(
                f"the weights leave no memory for KV on {pool.hardware.name} with {pool.devices_per_worker} devices a "
                "worker: use more of them, or larger ones"
            )
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
                worker["depth"] = pool.hardware.pipeline_depth
                worker["num_stages"], worker["first_of_pipeline"] = num_stages, first
                worker["decode_token_s"] = cost.decode_token_s
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
    """`CostModel.terms` by term and count: exact for small counts, within 1e-4 for others."""
    grid = np.arange(1, min(_DENSE_COUNTS, num_counts))
    num_more = int(np.log(num_counts / grid[-1]) / np.log(_COUNT_RATIO)) + 2
    grid = np.unique(np.concatenate([grid, np.geomspace(grid[-1], num_counts, num_more).astype(np.int64)]))
    terms = np.array([cost.terms(int(count)) for count in grid]).T
    counts = np.arange(num_counts)
    table = np.stack([np.interp(counts, grid, term) for term in terms])
    table[:, 0] = 0.0
    return table


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


if __name__ == "__main__":
    load_scout()
