"""Placement policies: each rule picks the worker that it says, in both phases."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.deployment import POLICIES
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.placement import Arrival, Placement, PromptBlocks, WorkerSnapshot
from pdserve.router.requests.policies import new_placement
from tests.router.requests.test_least_time import BLOCK_SIZE, COSTS, worker

PREFILLS = [worker(f"prefill-{index}") for index in range(3)]
DECODES = [worker(f"decode-{index}", WorkerRole.DECODE) for index in range(3)]


def arrival(num_tokens: int = 100, now_s: float = 0.0) -> Arrival:
    return Arrival(1, PromptBlocks(range(num_tokens), BLOCK_SIZE), now_s, inf)


def decoder(chooser: Placement, workers: Sequence[WorkerSnapshot], *cut_off: str) -> str:
    binding = chooser.decode(arrival(), workers, set(cut_off), "")
    return "" if binding is None else binding.worker_id


def picks(policy: str, workers: Sequence[WorkerSnapshot], num_picks: int = 1) -> list[str]:
    """Choices for equal prompts, by the phase of ``workers``."""
    chooser, found = new_placement(policy, COSTS, tpot_slo_s=0.05), []
    for _ in range(num_picks):
        if workers[0].role is WorkerRole.PREFILL:
            choice = chooser.prefill(arrival(), [*workers, DECODES[0]._replace(num_decoding=8)])
            assert choice is not None
            assert choice.handoff
            found.append(choice.worker_id)
        else:
            found.append(decoder(chooser, workers))
    return found


def test_round_robin_takes_turns_in_each_phase() -> None:
    assert picks("round-robin", PREFILLS[::-1], 4) == ["prefill-0", "prefill-1", "prefill-2", "prefill-0"]
    assert picks("round-robin", DECODES, 4) == ["decode-0", "decode-1", "decode-2", "decode-0"]


@pytest.mark.parametrize("policy", ["least-loaded", "cache-aware", "least-time"])
def test_the_least_loaded_worker(policy: str) -> None:
    busy = [one._replace(num_waiting_tokens=5000 - 1000 * index) for index, one in enumerate(PREFILLS)]
    assert picks(policy, busy) == ["prefill-2"]
    full = [one._replace(num_decoding=3 - index) for index, one in enumerate(DECODES)]
    assert picks(policy, full) == ["decode-2"]


def test_power_of_two_never_takes_the_most_loaded_and_is_reproducible() -> None:
    full = [one._replace(num_decoding=index) for index, one in enumerate(DECODES)]
    found = picks("power-of-two", full, 50)
    assert set(found) == {"decode-0", "decode-1"}
    assert found == picks("power-of-two", full, 50)


def test_cache_aware_follows_a_prefix_while_loads_are_balanced() -> None:
    cached = DECODES[1]._replace(cached_blocks=frozenset(block_hashes(range(60), BLOCK_SIZE)), num_decoding=5)
    assert picks("cache-aware", [DECODES[0], cached]) == ["decode-1"]
    few = cached._replace(cached_blocks=frozenset(block_hashes(range(40), BLOCK_SIZE)))
    assert picks("cache-aware", [DECODES[0], few]) == ["decode-0"]
    overloaded = cached._replace(num_decoding=40, max_batch_size=64)
    assert picks("cache-aware", [DECODES[0], overloaded]) == ["decode-0"]


def test_conserve_keeps_a_conversation_where_its_first_turn_decoded() -> None:
    chooser = new_placement("conserve", COSTS)
    held = [one._replace(num_free_blocks=40 + 10 * (index == 1)) for index, one in enumerate(DECODES)]
    assert placed(chooser, arrival(100), held) == ("prefill-0", True)
    assert decoder(chooser, held) == "decode-1"
    fuller = [one._replace(num_free_blocks=40 - 30 * (index == 1)) for index, one in enumerate(DECODES)]
    assert placed(chooser, arrival(150), fuller) == ("decode-1", False)
    assert placed(chooser, arrival(200), fuller) == ("decode-1", False)
    # Prompts that end with what is cached, such as a system prompt, pin nobody.
    system = block_hashes(range(1000, 1064), BLOCK_SIZE)
    short = arrival()._replace(blocks=PromptBlocks(range(1000, 1066), BLOCK_SIZE))
    cached = [one._replace(cached_blocks=frozenset(system)) for one in held]
    assert chooser.decode(short, cached, set(), "") is not None
    assert placed(chooser, short, cached) == ("prefill-0", True)
    # Another conversation, whose prompt begins with less than all blocks of a pinned one, or a worker that is gone.
    other = arrival(100)._replace(blocks=PromptBlocks([*range(60), *range(500, 600)], BLOCK_SIZE))
    assert placed(chooser, other, fuller) == ("prefill-0", True)
    assert placed(chooser, arrival(250), fuller[:1]) == ("prefill-0", True)


def placed(chooser: Placement, prompt: Arrival, decodes: Sequence[WorkerSnapshot]) -> tuple[str, bool]:
    choice = chooser.prefill(prompt, [*PREFILLS, *decodes])
    assert choice is not None
    return choice.worker_id, choice.handoff


@pytest.mark.parametrize("policy", POLICIES)
def test_room_and_whole_pairs_come_first(policy: str) -> None:
    chooser = new_placement(policy, COSTS, tpot_slo_s=0.05)
    full = DECODES[0]._replace(num_free_blocks=3)
    assert decoder(chooser, [full, DECODES[1]]) == "decode-1"
    assert decoder(chooser, DECODES[:2], "decode-0") == "decode-1"
    assert decoder(chooser, DECODES[:1], "decode-0") == "decode-0"
    assert chooser.decode(arrival(), [], set(), "") is None
    assert chooser.prefill(arrival(), PREFILLS) is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [PREFILLS, DECODES], ids=["prefill", "decode"])
def test_idle_workers_fill_their_caches_evenly(policy: str, workers: list[WorkerSnapshot]) -> None:
    """Prompts that no worker caches, one after the other."""
    chooser = new_placement(policy, COSTS, tpot_slo_s=1e-4)
    cached: dict[str, set[bytes]] = {one.worker_id: set() for one in workers}
    for number in range(30):
        idle = [one._replace(num_empty_blocks=200 - len(cached[one.worker_id])) for one in workers]
        if workers is PREFILLS:
            choice = chooser.prefill(arrival()._replace(request_id=number), [*idle, DECODES[0]])
            assert choice is not None
            chosen = choice.worker_id
        else:
            chosen = decoder(chooser, idle)
        cached[chosen] |= {b"%d-%d" % (number, index) for index in range(5)}
    assert all(45 <= len(blocks) <= 55 for blocks in cached.values())
