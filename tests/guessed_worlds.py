"""Worlds of hash chains with every kind of guesses, where workers die or take other roles, clients leave, and answers
are swapped, preempted and forked; in some, files below the pools outlive workers.
`tests.engine.scheduling.test_schedulers_property` runs one of each kind. Many more:

    python -m tests.guessed_worlds [--only KIND] [--sequences N] [--first-seed N] [--json FILE]

Fails at the first token that is wrong, lost or repeated, block that is left, or request that does not end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from pdserve.bench.script import publish, script_parser
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import Outcome
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.executors.draft_model import DraftModel
from pdserve.model.executors.drafting import Drafter, NgramDrafter
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from tests.hash_chain_node import WorldConfig
from tests.hash_chain_world import World, submit_many

MAX_TURNS = 20_000
FEW_TOKENS = 9
"""Size of a vocabulary in which answers quote themselves, and a draft model is right now and then."""

GUESSES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "oracle": {"right_guesses": 1.0},
    "half right": {"right_guesses": 0.5},
    "wrong": {"right_guesses": 0.0, "first_wrong_guess": 0},
    "wrong from the third on": {"right_guesses": 0.0, "first_wrong_guess": 2},
    "tiers": {"right_guesses": 0.5, "num_tier_blocks": 120, "kill": 0.01, "relabel": 0.01, "prefix_share": 0.8},
    "ngram": {"vocab_size": FEW_TOKENS, "new_drafter": lambda config: NgramDrafter()},
}
"""Changes to a configuration."""

REPORTED = (
    "sequences",
    "finished",
    "right guesses",
    "wrong guesses",
    "killed",
    "relabelled",
    "restored tokens",
    "preemptions",
    "swap-ins",
    "pulled",
    "prefix blocks pulled",
    "choice over cached blocks",
)


def draft_model(folder: Path) -> dict[str, Any]:
    """Write a small model to ``folder``. Returns changes to a configuration, to guess by it."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
    }
    write_random_checkpoint(folder, vocab_size=FEW_TOKENS, **sizes)
    model = DecoderConfig.from_folder(folder)

    def new_drafter(config: WorldConfig) -> Drafter:
        return DraftModel(
            folder=folder,
            config=model,
            layout=model.kv_layout(config.num_decode_blocks, config.block_size, "float32", "draft"),
            precision=Precision(dtype="float32"),
            vocab_size=FEW_TOKENS,
            max_batch_tokens=config.max_batch_tokens,
        )

    return {"vocab_size": FEW_TOKENS, "new_drafter": new_drafter}


def served(guesses: Mapping[str, Any], seed: int) -> World:
    """A world whose requests have all ended. In one of four, answers outgrow the pool."""
    random = Random(seed)
    config = WorldConfig(
        num_prefill=random.choice((0, 1, 2)),
        num_decode=random.choice((1, 2)),
        num_prefill_blocks=random.choice((20, 64)),
        num_decode_blocks=random.choice((20, 40, 64)),
        pipeline_depth=random.choice((1, 2)),
        eos_period=random.choice((0, 10, 30)),
        local_share=random.choice((0.0, 0.3)),
        pull_failure=0.03,
        step_failure=0.005,
        row_failure=0.005,
        cancel=random.choice((0.0, 0.2)),
        cancel_preempted=0.2,
        num_swap_slots=random.choice((0, 5, 60)),
        kill=random.choice((0.0, 0.01)),
        prefix_share=random.choice((0.0, 0.5)),
        relabel=random.choice((0.0, 0.01)),
        is_staged=random.choice((False, True)),
    )
    config = replace(config, **guesses)
    num_requests, max_answer = 40, 40
    if seed % 4 == 0:
        pools: dict[str, Any] = {"num_decode": 1, "num_prefill_blocks": 104, "num_decode_blocks": 104}
        config = replace(config, **pools, max_model_len=400, eos_period=0)
        num_requests, max_answer = 15, 360
    world = World(config, seed)
    submit_many(world, num_requests, max_prompt=40, max_answer=max_answer, max_choices=3)
    world.run(MAX_TURNS)
    outcomes = Counter(client.outcome for client in world.clients)
    assert set(outcomes) <= {Outcome.FINISHED, Outcome.CANCELLED}, outcomes
    world.counts["sequences"] = len(world.clients)
    world.counts["finished"] = outcomes[Outcome.FINISHED]
    return world


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", choices=[*GUESSES, "draft"], metavar="KIND", help="of guesses, or tiers")
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    table: dict[str, Counter[str]] = {}
    num_sequences, start_s, console = 0, time.process_time(), Console(stderr=True)
    with TemporaryDirectory() as folder:
        kinds = {**GUESSES, "draft": draft_model(Path(folder))}
        for seed in count(arguments.first_seed):
            if num_sequences >= arguments.sequences:
                break
            for name, guesses in kinds.items():
                if arguments.only not in (None, name):
                    continue
                try:
                    counts = served(guesses, seed).counts
                except BaseException:
                    console.print(f"{name}, seed {seed}:")
                    raise
                table[name] = table.get(name, Counter()) + counts
                num_sequences += counts["sequences"]
            if seed % 10 == 0:
                console.print(f"{num_sequences} sequences, {time.process_time() - start_s:.0f} s of CPU")
    process_s = round(time.process_time() - start_s)
    rows = {name: {each: counts[each] for each in REPORTED} for name, counts in table.items()}
    publish({"sequences": num_sequences, "process_s": process_s, "table": rows}, arguments.json)


if __name__ == "__main__":
    main()
