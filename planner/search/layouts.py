"""Enumerates the layouts that a question allows: degrees, replicas, devices and limits that fit on the hosts.

Used by `pdserve.planner.search.search`. Judges memory only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.quantisation import held_scheme
from pdserve.model.cost.hardware import Hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.estimates import fits
from pdserve.planner.search.hosts import placed
from pdserve.planner.search.plan import FitsNowhereError, Objective, Question, Supply
from pdserve.planner.workload.workload import WorkloadSample

_PREFILL_TOKENS, _DECODE_TOKENS = 8192, 2048
"""Token budgets of the steps of prefill workers, and of decode workers, which may prefill a prompt."""
_BATCH_SIZE = 256
_FIRST_CHUNK_TOKENS = (512, 2048)
"""Token budgets of the steps of mixed workers before they are tuned: short steps for TPOT, long ones for TTFT."""
_MAX_REMEDY_DEGREE = 64
"""Highest degree of either kind to try for the smallest layout that holds the model."""


class Enumeration(NamedTuple):
    """All layouts of a question."""

    layouts: list[Layout]
    """Layouts whose workers hold the model."""
    num_without_memory: int
    """Number of layouts of the same kinds whose workers do not."""


def enumerate_layouts(question: Question) -> Enumeration:
    """Every layout that the question allows.

    If the objective is to get the most out of the fleet, only layouts to which no worker can be added.

    Raises:
        FitsNowhereError: none of them holds the model.
        ValueError: there are none, because a device does not support the model's KV dtype.
    """
    layouts, num_without_memory = [], 0
    for layout, holds in _all(question):
        if holds:
            layouts.append(placed(layout, question.fleet))
        else:
            num_without_memory += 1
    if not layouts:
        for supply in question.fleet:
            supply.hardware.check_reads(question.model.precision.kv_dtype)
        raise FitsNowhereError(_remedy(question))
    return Enumeration(layouts, num_without_memory)


def dollars_per_hour(layout: Layout, fleet: Iterable[Supply]) -> float | None:
    """Price of the layout's devices; ``None`` if a price is unknown."""
    prices = {supply.hardware.name: supply.price for supply in fleet}
    total = 0.0
    for pool in layout.pools:
        price = prices[pool.hardware.name]
        if price is None:
            return None
        total += price * pool.num_devices
    return total


class _Worker(NamedTuple):
    """One kind of worker, as a pool of one."""

    pool: Pool
    supply: Supply
    holds: bool


def _all(question: Question) -> Iterator[tuple[Layout, bool]]:
    space = question.space
    wants_all = question.objective is Objective.RATE
    for worker in _workers(question, WorkerRole.MIXED, space.mixed_batch_tokens or _FIRST_CHUNK_TOKENS):
        for (replicas,) in _replicas((worker,), wants_all=wants_all):
            yield Layout(mixed=replace(worker.pool, replicas=replicas)), worker.holds
    if space.may_disaggregate:
        prefills = _workers(question, WorkerRole.PREFILL, (_PREFILL_TOKENS,))
        decodes = _workers(question, WorkerRole.DECODE, (_DECODE_TOKENS,))
        for prefill, decode in product(prefills, decodes):
            for num_prefill, num_decode in _replicas((prefill, decode), wants_all=wants_all):
                layout = Layout(
                    prefill=replace(prefill.pool, replicas=num_prefill),
                    decode=replace(decode.pool, replicas=num_decode),
                )
                yield layout, prefill.holds and decode.holds


def _workers(question: Question, role: WorkerRole, budgets: Sequence[int]) -> list[_Worker]:
    space = question.space
    like, batch_size, workers = space.like(role), _BATCH_SIZE, []
    if space.keeps_pools and like is None:
        return []
    if like is not None and (space.keeps_pools or role is not WorkerRole.MIXED):
        budgets, batch_size = (like.max_batch_tokens,), like.max_batch_size
    for supply in question.fleet:
        degrees = space.tensor_parallel or _degrees(supply.devices_per_node)
        for tensor, pipeline, budget in product(degrees, space.pipeline_parallel, budgets):
            if space.keeps_pools and like is not None and _kind(like) != (supply.hardware.name, tensor, pipeline):
                continue
            if tensor > supply.devices_per_node or tensor * pipeline > supply.num_devices:
                continue
            pool = Pool(
                role=role,
                replicas=1,
                hardware=supply.hardware,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                expert_parallel=like is not None and like.expert_parallel,
                max_batch_tokens=budget,
                max_batch_size=batch_size,
            )
            divided = _divided(pool, question.model)
            if divided is not None:
                workers.append(_Worker(divided, supply, fits(divided, question.model)))
    return workers


def _kind(pool: Pool) -> tuple[str, int, int]:
    return pool.hardware.name, pool.tensor_parallel, pool.pipeline_parallel


def _divided(pool: Pool, model: PlannedModel) -> Pool | None:
    """The worker, with whole experts on each rank if the model divides only so; ``None`` if it does not divide."""
    for expert_parallel in dict.fromkeys((pool.expert_parallel, model.shape.num_experts > 0)):
        divided = replace(pool, expert_parallel=expert_parallel)
        try:
            divided.cost(model)
        except ValueError:
            continue
        return divided
    return None


def _degrees(devices_per_node: int) -> list[int]:
    """Degrees of tensor parallelism: divisors of a host's size, and powers of two, which need not divide it: of three
    devices, two may prefill together and one decode."""
    divisors = {degree for degree in range(1, devices_per_node + 1) if devices_per_node % degree == 0}
    return sorted(divisors | {2**power for power in range(devices_per_node.bit_length())})


def _replicas(workers: tuple[_Worker, ...], *, wants_all: bool) -> Iterator[tuple[int, ...]]:
    """Numbers of workers of each pool that fit on the hosts."""
    first, *others = workers
    most_first = _most((), first)
    for count in range(1, most_first + 1):
        if not others:
            if not wants_all or count == most_first:
                yield (count,)
            continue
        (other,) = others
        most = _most(((first, count),), other)
        for other_count in range(most if wants_all else 1, most + 1):
            if other_count and not (wants_all and count < _most(((other, other_count),), first)):
                yield count, other_count


def _most(placed: tuple[tuple[_Worker, int], ...], worker: _Worker) -> int:
    """Maximum replicas of ``worker`` next to those already placed."""
    pool, supply = worker.pool, worker.supply
    groups: list[int] = []
    for other, count in placed:
        if other.supply is supply:
            groups += [other.pool.tensor_parallel] * (other.pool.pipeline_parallel * count)
    num_groups = _room(supply.num_nodes, supply.devices_per_node, tuple(groups), pool.tensor_parallel)
    return num_groups // pool.pipeline_parallel


@cache
def _room(num_nodes: int, devices_per_node: int, groups: tuple[int, ...], tensor_parallel: int) -> int:
    """Number of groups of ``tensor_parallel`` devices of one host each that fit next to ``groups``, with the largest
    placed first, each on the first host with room."""
    free = [devices_per_node] * num_nodes
    for group in sorted(groups, reverse=True):
        host = next((host for host, num_free in enumerate(free) if num_free >= group), None)
        if host is None:
            return 0
        free[host] -= group
    return sum(num_free // tensor_parallel for num_free in free)


def _remedy(question: Question) -> str:
    model, fleet = question.model, question.fleet
    have = " and ".join(f"{supply.num_devices} x {supply.hardware.name}" for supply in fleet)
    workers = _workers(question, WorkerRole.MIXED, _FIRST_CHUNK_TOKENS)
    most_tokens = max((_most_tokens(worker.pool, model) for worker in workers), default=0) - 1
    return _too_large(model, have, model.max_model_len, most_tokens, [supply.hardware for supply in fleet], None)


def check_fits(layout: Layout, model: PlannedModel, sample: WorkloadSample) -> None:
    """Raise FitsNowhereError if a worker of ``layout`` does not hold the weights and the KV of any request."""
    for pool in reversed([*layout.pools]):  # those first that hold answers, too
        longest = sample.longest(with_answer=pool.role is not WorkerRole.PREFILL)
        if longest > (most_tokens := _most_tokens(pool, model)):
            have = f"{pool.memory_fraction:.0%} of {pool.devices_per_worker} x {pool.hardware.name}"
            why = _too_large(model, have, longest, most_tokens, [pool.hardware], pool)
            raise FitsNowhereError(f"{pool.role.value}: {why}")


def _most_tokens(pool: Pool, model: PlannedModel) -> int:
    return pool.kv_blocks(model, pool.cost(model)) // pool.pipeline_parallel * model.block_size


def _too_large(
    model: PlannedModel, have: str, longest: int, most_tokens: int, kinds: Iterable[Hardware], given: Pool | None
) -> str:
    """What does not fit, and what would; ``given`` is the pool whose degrees are chosen, if they are."""
    scheme = held_scheme(model.precision.quantization, model.shape.scheme)
    name = f"{model.name or 'the model'} in {scheme.kind if scheme else model.precision.dtype}"
    what = f"the weights of {name} do not fit {have}"
    if most_tokens > 0:
        what = (
            f"the longest request, {longest} tokens, does not fit {have} beside {name}, but --set model.max_model_len="
            f"{most_tokens} does"
        )
    asked = replace(model, max_model_len=longest)
    smallest = [found for kind in kinds if (found := smallest_worker(kind, asked)) is not None]
    if not smallest:
        return f"{what}; no number of them holds both: use larger devices, a smaller max_model_len, or int4 weights"
    pool = min(smallest, key=lambda pool: pool.devices_per_worker)
    if given is None:
        remedy = "add devices"
    elif pool.devices_per_worker > given.devices_per_worker:
        degrees = {"tensor_parallel": pool.tensor_parallel, "pipeline_parallel": pool.pipeline_parallel}
        keys = [f"{key}={degree}" for key, degree in degrees.items() if degree > 1]
        keys += ["expert_parallel=true"] * pool.expert_parallel
        remedy = " ".join(f"--set {given.role.value}.{key}" for key in keys)
    else:
        remedy = f"raise {given.role.value}.gpu_memory_utilization or kv_memory"
    smaller = "int8 or int4" if scheme is None else "int4" if model.precision.quantization in ("int8", "fp8") else ""
    fewer_bytes = f", or use --set model.quantization={smaller}" if smaller else ""
    return (
        f"{what}; the smallest worker for both is {pool.degrees}, "
        f"{pool.devices_per_worker} x {pool.hardware.name}: {remedy}{fewer_bytes}"
    )


def smallest_worker(hardware: Hardware, model: PlannedModel) -> Pool | None:
    """The worker with the fewest devices that holds the model, with as little pipelining as possible."""
    degrees = [2**power for power in range(_MAX_REMEDY_DEGREE.bit_length())]
    pairs = sorted(product(degrees, degrees), key=lambda pair: (pair[0] * pair[1], pair[1]))
    for tensor, pipeline in pairs:
        if tensor > hardware.devices_per_host:
            continue
        pool = Pool(
            role=WorkerRole.MIXED,
            replicas=1,
            hardware=hardware,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
        )
        divided = _divided(pool, model)
        if divided is not None and fits(divided, model):
            return divided
    return None
