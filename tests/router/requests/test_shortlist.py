"""First stage of a decision: the workers that are worth a score."""

from __future__ import annotations

from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.shortlist import NUM_SCORED, by_backlog, by_room
from tests.router.requests.test_least_time import prompt, worker

PREFILLS = [worker(f"prefill-{index}", num_waiting_tokens=100 * index) for index in range(12)]
DECODES = [
    worker(f"decode-{index}", WorkerRole.DECODE, max_batch_size=64, num_decoding=index, next_step_s=0.01 + index / 1000)
    for index in range(12)
]


def ids(workers: object) -> list[int]:
    return [int(each.worker_id.split("-")[1]) for each in workers]  # type: ignore[attr-defined]


def test_few_workers_are_all_scored() -> None:
    assert by_backlog(prompt(100), PREFILLS[:NUM_SCORED], {}, {}) == PREFILLS[:NUM_SCORED]
    assert by_room(prompt(100), DECODES[:NUM_SCORED], {}) == DECODES[:NUM_SCORED]


def test_the_first_tokens_before_token_0() -> None:
    assert ids(by_backlog(prompt(100), PREFILLS[::-1], {}, {})) == list(range(NUM_SCORED))
    slow = [PREFILLS[0]._replace(prefill_correction=20.0), *PREFILLS[1:]]
    assert ids(by_backlog(prompt(100), slow, {}, {})) == [1, 2, 3, 4]


def test_late_prompts_delay_none_but_late_ones() -> None:
    chosen = by_backlog(prompt(100), PREFILLS, {}, {"prefill-11": 1100, "prefill-10": 1000})
    assert ids(chosen) == [0, 10, 11, 1]
    with_late = [PREFILLS[0]._replace(num_waiting_tokens=5000), *PREFILLS[1:]]
    assert ids(by_backlog(prompt(100), with_late, {}, {"prefill-0": 5000})) == [0, 1, 2, 3]
    in_time = [each._replace(num_waiting_tokens=5) for each in PREFILLS[:7]]
    all_late = {f"prefill-{index}": 100 * index for index in range(7, 12)}
    assert ids(by_backlog(prompt(100), [*in_time, *PREFILLS[7:]], {}, all_late)) == [7, 8, 9, 10, 0]


def test_who_caches_most_of_the_prompt_is_scored_however_busy() -> None:
    cached = {"prefill-9": 600, "prefill-11": 900, "prefill-8": 100, "decode-7": 600}
    assert ids(by_backlog(prompt(1000), PREFILLS, cached, {})) == [0, 1, 2, 11, 9]
    assert ids(by_room(prompt(1000), DECODES, cached))[NUM_SCORED:] == [7, 11]


def test_the_shortest_steps_with_room_and_the_longest() -> None:
    assert ids(by_room(prompt(100), DECODES[::-1], {})) == [0, 1, 2, 3, 11]
    full = [DECODES[0]._replace(num_free_blocks=3), *DECODES[1:11], DECODES[11]._replace(max_batch_size=11)]
    assert ids(by_room(prompt(100), full, {})) == [1, 2, 3, 4, 10]
    none = [each._replace(num_free_blocks=each.num_decoding) for each in DECODES]
    assert ids(by_room(prompt(100), none, {})) == [11, 10, 9, 8], "those that lack least"


def test_equal_workers_are_taken_by_empty_blocks() -> None:
    equal = [each._replace(num_waiting_tokens=0, num_empty_blocks=index) for index, each in enumerate(PREFILLS)]
    assert ids(by_backlog(prompt(100), equal, {}, {})) == [11, 10, 9, 8]
