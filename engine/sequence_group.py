"""The choices of one request on a worker: which of them still want tokens, and the sequences that produce these.

Until its first token a request is one sequence that stands for all of its choices. Then `fork` makes a sequence of each
choice that goes on: they share the prompt's full blocks, and each gets a copy of the last, partly filled one, because
each will write its own tokens into it. The first choice keeps the original.

Owned by `pdserve.engine.sequence_table`. Decides nothing and frees no block but those that a fork has no use for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pdserve.engine.scheduler import FirstToken, RequestKey
from pdserve.engine.sequence import Sequence
from pdserve.kv_transfer.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One attempt at a request, while it is alive."""

    root: Sequence
    """The sequence that computes the prompt; later the one of the first choice, which may end before the others."""
    open_choices: set[int] = field(init=False)
    """Choices that have neither finished nor been dropped."""
    sequences: list[Sequence] = field(init=False)
    """Those that are not over, in order of their choices."""

    def __post_init__(self) -> None:
        self.open_choices = set(self.root.choices)
        self.sequences = [self.root]

    @property
    def key(self) -> RequestKey:
        return self.root.key

    def finish(self, choice: int) -> bool:
        """A choice has its last token. Returns whether it was the last choice."""
        self.open_choices.remove(choice)
        return not self.open_choices

    def drop(self, choices: Iterable[int]) -> list[Sequence]:
        """Nothing more is wanted of these choices. Returns the sequences that stand for no other, to be closed."""
        self.open_choices.difference_update(choices)
        return [sequence for sequence in self.sequences if self.open_choices.isdisjoint(sequence.choices)]

    def remove(self, sequence: Sequence) -> None:
        """A sequence is over, and with it the choices that it stands for."""
        self.sequences.remove(sequence)
        self.open_choices.difference_update(sequence.choices)


def fork(group: SequenceGroup, pool: BlockPool, first_tokens: Iterable[FirstToken]) -> list[Sequence]:
    """Let the choices of a request go separate ways, each after its own first token.

    The KV of the prompt must be written or planned. The root stays the sequence of its first choice, even if that one
    is over, and is not told its token.

    Args:
        first_tokens: of each choice in order.

    Returns:
        The sequences of the further choices that are open.
    """
    root = group.root
    assert not root.is_retiring, "a fork takes blocks from its root"
    num_shared = len(root.tokens) // root.block_size
    num_private = len(root.fork_blocks) // (root.num_choices - 1)
    forks = []
    for offset, first in enumerate(first_tokens):
        if offset == 0 or root.choice + offset not in group.open_choices:
            continue
        shared = root.block_table[:num_shared]
        pool.share(shared)
        sequence = replace(root, sequence_id=root.sequence_id + offset, choice=root.choice + offset, num_choices=1)
        sequence.start_as_fork(root, shared, [root.fork_blocks.pop() for _ in range(num_private)])
        if len(root.tokens) > num_shared * root.block_size:
            sequence.copy_source = root.block_table[num_shared]
            pool.share([sequence.copy_source])
        sequence.append(first.token)
        forks.append(sequence)
    pool.release(root.fork_blocks)
    root.fork_blocks = []
    root.num_choices = 1
    group.sequences += forks
    return forks
