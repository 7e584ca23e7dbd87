"""A cluster in one thread under a virtual clock: real schedulers, pools and executor, everything else made up.

Workers run the hash-chain executor over in-memory pools, so that one wrong, lost or repeated token, or a block reused
too early, shows in the next token. The world plays the transfer processes (pulls copy bytes between pools, late, in
parts, and sometimes not to the end), the clients (who cancel at any time) and the router (which sends a failed request
again, keeping the tokens it has). After every turn each pool's integrity is checked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from random import Random

import numpy as np

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource, Outcome, SamplingParams
from pdserve.contracts.step import BlockCopy, ModelLimits, StepBatch, StepHandle, StepOutput, StepRow
from pdserve.decode_worker.scheduler import DecodeScheduler
from pdserve.decode_worker.swapping import SwapSpace
from pdserve.engine.scheduler import (
    AbortPullEvent,
    Event,
    GrantEvent,
    OfferEvent,
    PullResult,
    RequestEvent,
    RequestEventKind,
    RequestKey,
    StartPullEvent,
    TokenEvent,
    WithdrawEvent,
)
from pdserve.kv_transfer.block_pool import BlockPool
from pdserve.model.emulated_executor import EmulatedExecutor
from pdserve.model.hash_chain import expected_tokens
from pdserve.prefill_worker.scheduler import PrefillScheduler

VOCAB_SIZE = 500
EOS = 7


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    num_prefill: int = 1
    """0: the decode workers are mixed ones."""
    num_decode: int = 1
    num_prefill_blocks: int = 64
    num_decode_blocks: int = 64
    block_size: int = 4
    max_batch_tokens: int = 32
    max_batch_size: int = 8
    max_model_len: int = 128
    num_swap_slots: int = 0
    recompute_share: float = 0.0
    """Of preemptions, those that are recomputed although there are slots."""
    pipeline_depth: int = 2
    park_timeout_s: float = 2.0
    eos_period: int = 0
    local_share: float = 0.0
    """Of requests that are prefilled on a decode worker although there are prefill workers."""
    pull_failure: float = 0.0
    step_failure: float = 0.0
    cancel: float = 0.0
    """Share of requests whose client leaves at some time."""
    cancel_preempted: float = 0.0
    """Share of preemptions soon after which the client leaves."""


class LateExecutor:
    """Computes a step when its result is asked for: a block that is given away while a step is in flight gets the
    step's writes, or misleads its reads. A step that is made to fail leaves garbage, and the step planned before that
    was known may fail with it; no other may."""

    def __init__(self, inner: EmulatedExecutor, memory: np.ndarray, fails: Callable[[], bool]) -> None:
        self._inner = inner
        self._memory = memory
        self._fails = fails
        self._may_fail = False

    def submit(self, batch: StepBatch) -> StepHandle:
        rows = [replace(row, block_table=tuple(row.block_table)) for row in batch.rows]
        return _LateStep(self, replace(batch, rows=rows))

    def compute(self, batch: StepBatch) -> StepOutput:
        try:
            output = self._inner.submit(batch).result()
        except RuntimeError as error:
            if not self._may_fail:
                raise AssertionError("a step failed by itself") from error
            self._may_fail = False
            raise
        self._may_fail = self._fails()
        if self._may_fail:
            for row in batch.rows:
                self._scribble(row)
            self._spoil_copies(batch)
            raise RuntimeError("injected")
        return output

    def _scribble(self, row: StepRow) -> None:
        block_size = self._memory.shape[-2]
        for position in range(row.cached_length, row.cached_length + row.num_new_tokens):
            self._memory[row.block_table[position // block_size], ..., position % block_size, :] = 1

    def _spoil_copies(self, batch: StepBatch) -> None:
        """Every target of the step's swap copies holds garbage: slots are reached by way of a block saved meanwhile."""
        block, saved = 0, self._memory[0].copy()
        self._memory[block] = 1
        spoiled = [BlockCopy(block, copy.target) for copy in batch.swap_outs]
        self._inner.submit(StepBatch(step_id=batch.step_id, rows=[], swap_outs=spoiled))
        self._memory[block] = saved
        self._memory[[copy.target for copy in batch.swap_ins]] = 1


@dataclass
class _LateStep:
    executor: LateExecutor
    batch: StepBatch

    def result(self) -> StepOutput:
        return self.executor.compute(self.batch)


class Node:
    """A worker: a scheduler, its pool, and the executor under both."""

    def __init__(self, config: WorldConfig, name: str, *, decodes: bool, random: Random) -> None:
        self.name = name
        self.generations = [0] * (config.num_decode_blocks if decodes else config.num_prefill_blocks)
        self.pool = BlockPool(len(self.generations), config.block_size, self.generations)
        layout = KvLayout(
            num_blocks=self.pool.num_blocks,
            num_kv_heads=1,
            num_layers=1,
            block_size=config.block_size,
            head_dim=1,
            dtype="uint64",
            model_hash="hash-chain",
        )
        self.memory = np.zeros(layout.shape, dtype=np.uint64)
        eos = (EOS,)
        inner = EmulatedExecutor(
            layout=layout,
            pool=self.memory,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=eos,
            eos_period=config.eos_period,
            num_swap_slots=config.num_swap_slots,
        )
        self.executor = LateExecutor(inner, self.memory, lambda: random.random() < config.step_failure)
        self.pipeline_depth = config.pipeline_depth
        self.in_flight: deque[tuple[int, StepHandle]] = deque()
        self.sleeps_until_turn = 0
        self.max_batch_tokens = config.max_batch_tokens
        handles = (f"{name}/{number}".encode() for number in count())
        limits = ModelLimits(max_model_len=config.max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=eos)
        space = SwapSpace(
            num_slots=config.num_swap_slots,
            is_cheaper=lambda num_tokens, num_cached: random.random() >= config.recompute_share,
        )
        kind = partial(DecodeScheduler, swap_space=space) if decodes else PrefillScheduler
        self.scheduler: DecodeScheduler | PrefillScheduler = kind(
            self.pool,
            limits,
            mint_handle=lambda: next(handles),
            max_batch_tokens=config.max_batch_tokens,
            max_batch_size=config.max_batch_size,
            park_timeout_s=config.park_timeout_s,
        )

    def turn(self, now_s: float) -> bool:
        """One turn of a step loop; returns whether there was anything to do."""
        batch = self.scheduler.plan(now_s)
        if batch is not None:
            assert batch.num_new_tokens <= self.max_batch_tokens
            self.in_flight.append((batch.step_id, self.executor.submit(batch)))
        if self.in_flight and (batch is None or len(self.in_flight) >= self.pipeline_depth):
            step_id, handle = self.in_flight.popleft()
            try:
                output = handle.result()
            except RuntimeError as error:
                self.scheduler.fail_step(step_id, str(error), now_s)
            else:
                self.scheduler.complete(output, now_s)
        self.check()
        return batch is not None or bool(self.in_flight)

    def check(self) -> None:
        self.pool.check_integrity()
        if isinstance(self.scheduler, DecodeScheduler):
            self.scheduler.check_integrity()
        load = self.scheduler.load()
        total = load.num_blocks_free + load.num_blocks_cached + load.num_blocks_referenced
        assert total == self.pool.num_blocks


@dataclass
class Client:
    """A request as its client and the router see it."""

    request: GenerationRequest
    expected: list[int]
    received: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    nodes: list[Node] = field(default_factory=list)
    """Workers that know of the current attempt."""
    leaves_at_turn: int = -1

    @property
    def key(self) -> RequestKey:
        return RequestKey(0, self.request.request_id, self.request.attempt)


@dataclass
class _Offer:
    node: Node
    grants: list[GrantEvent] = field(default_factory=list)


@dataclass
class _Pull:
    node: Node
    order: StartPullEvent
    opens_at_turn: int
    is_open: bool = False
    is_aborted: bool = False
    num_grants: int = 0


class World:
    def __init__(self, config: WorldConfig, seed: int) -> None:
        self.config = config
        self.random = Random(seed)
        self.now_s = 1000.0
        self.num_turns = 0
        self.prefill = [self._node(f"prefill-{i}", decodes=False) for i in range(config.num_prefill)]
        self.decode = [self._node(f"decode-{i}", decodes=True) for i in range(config.num_decode)]
        self.nodes = self.prefill + self.decode
        self.clients: list[Client] = []
        self.counts: Counter[str] = Counter()
        self._offers: dict[bytes, _Offer] = {}
        self._pulls: list[_Pull] = []

    def _node(self, name: str, *, decodes: bool) -> Node:
        return Node(self.config, name, decodes=decodes, random=self.random)

    # Clients and router

    def submit(self, prompt: tuple[int, ...], sampling: SamplingParams, *, deadline_s: float = 600.0) -> Client:
        expected = expected_tokens(
            prompt,
            sampling.max_tokens,
            VOCAB_SIZE,
            sampling=sampling,
            eos_token_ids=(EOS,),
            eos_period=self.config.eos_period,
        )
        request = GenerationRequest(
            request_id=len(self.clients),
            prompt_tokens=prompt,
            sampling=sampling,
            deadline_s=deadline_s,
            ttft_slo_s=self.random.choice((0.0, 0.1, 1.0)),
        )
        client = Client(request, expected)
        if self.random.random() < self.config.cancel:
            client.leaves_at_turn = self.num_turns + self.random.randrange(60)
        self.clients.append(client)
        self._dispatch(client)
        return client

    def _dispatch(self, client: Client) -> None:
        is_handoff = bool(self.prefill) and self.random.random() >= self.config.local_share
        node = self.random.choice(self.prefill if is_handoff else self.decode)
        client.request = replace(client.request, handoff=is_handoff)
        client.nodes = [node]
        node.scheduler.add(client.key, client.request, self.now_s)

    def _redispatch(self, client: Client, reason: str) -> None:
        self.counts[f"redispatched: {reason}"] += 1
        self._cancel_on_nodes(client)
        request = client.request
        client.request = replace(request, attempt=request.attempt + 1, emitted_tokens=tuple(client.received))
        self._dispatch(client)

    def _cancel_on_nodes(self, client: Client) -> None:
        for node in client.nodes:
            node.scheduler.cancel(client.key, self.now_s)

    def _leave(self, client: Client) -> None:
        client.outcome = Outcome.CANCELLED
        self._cancel_on_nodes(client)

    def _on_token(self, event: TokenEvent) -> None:
        client = self.clients[event.key.request_id]
        if client.outcome is not None or event.key != client.key:
            return
        index = len(client.received)
        assert event.index == index, f"{event.key}: token {event.index} came, {index} is next"
        assert event.token == client.expected[index], f"{event.key}: token {index} is wrong"
        client.received.append(event.token)
        is_last = len(client.received) == len(client.expected)
        assert (event.finish is not FinishReason.NONE) == is_last
        if is_last:
            is_stop = event.token == EOS and not client.request.sampling.ignore_eos
            assert event.finish is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            client.outcome = Outcome.FINISHED

    def _on_request_event(self, event: RequestEvent) -> None:
        self.counts[event.kind.name] += 1
        client = self.clients[event.key.request_id]
        if client.outcome is not None or event.key != client.key:
            return
        match event.kind:
            case RequestEventKind.LAST_CHUNK:
                node = self.random.choice(self.decode)
                client.nodes.append(node)
                source = KvSource(address="", worker_epoch=1, handle=event.handle)
                node.scheduler.prepare(client.key, client.request, source, self.now_s)
            case RequestEventKind.PREEMPTED if self.random.random() < self.config.cancel_preempted:
                client.leaves_at_turn = self.num_turns + self.random.randrange(6)
            case RequestEventKind.FAILED if event.message.startswith("deadline"):
                client.outcome = Outcome.FAILED
                self._cancel_on_nodes(client)
            case RequestEventKind.FAILED | RequestEventKind.KV_UNAVAILABLE:
                self._redispatch(client, event.message.split(":")[0])
            case RequestEventKind.REJECTED:
                client.outcome = Outcome.REJECTED

    # Transfer processes

    def _on_event(self, node: Node, event: Event) -> None:
        match event:
            case TokenEvent():
                self._on_token(event)
            case RequestEvent():
                self._on_request_event(event)
            case OfferEvent():
                self._offers[event.handle] = _Offer(node)
            case GrantEvent():
                self._grant(event)
            case WithdrawEvent():
                self._offers.pop(event.handle, None)  # the puller may have released it meanwhile
            case StartPullEvent():
                opens_at_turn = self.num_turns + self.random.randrange(4)
                self._pulls.append(_Pull(node, event, opens_at_turn))
            case AbortPullEvent():
                self._abort(node, event.pull_id)

    def _grant(self, event: GrantEvent) -> None:
        offer = self._offers[event.handle]
        assert event.first_index == sum(len(grant.block_ids) for grant in offer.grants)
        assert not any(grant.final for grant in offer.grants)
        offer.grants.append(event)

    def _abort(self, node: Node, pull_id: int) -> None:
        for pull in self._pulls:  # it may have ended meanwhile
            if pull.node is node and pull.order.pull_id == pull_id:
                pull.is_aborted = True

    def _move_pull(self, pull: _Pull) -> None:
        """One turn of one pull: open it, copy one grant's blocks, or end it."""
        offer = self._offers.get(pull.order.source.handle)
        is_failing = self.random.random() < self.config.pull_failure
        if pull.is_aborted and self.random.random() < 0.7:
            pull.node.memory[list(pull.order.block_ids)] = 3  # a copy that was under way
        elif pull.is_aborted or is_failing or (pull.is_open and offer is None):
            self._end_pull(pull, "aborted" if pull.is_aborted else "copy" if is_failing else "withdrawn")
        elif self.num_turns < pull.opens_at_turn:
            return
        elif offer is None:
            self._end_pull(pull, "refused")
        elif not pull.is_open:
            pull.is_open = True
            offer.node.scheduler.lease_opened(pull.order.source.handle, self.now_s)
        elif pull.num_grants < len(offer.grants):
            self._copy(pull, offer, offer.grants[pull.num_grants])

    def _copy(self, pull: _Pull, offer: _Offer, grant: GrantEvent) -> None:
        pull.num_grants += 1
        if grant.final and grant.finish:
            self._finish_pull(pull, offer, grant)
            return
        for index, block, generation in zip(
            range(grant.first_index, grant.first_index + len(grant.block_ids)),
            grant.block_ids,
            grant.generations,
            strict=True,
        ):
            target = index - pull.order.num_cached_blocks
            if target >= 0:
                pull.node.memory[pull.order.block_ids[target]] = offer.node.memory[block]
                if offer.node.generations[block] != generation:
                    assert offer.grants[-1].finish, "a parked block was reused"
                    self._end_pull(pull, "verify")
                    return
        if grant.final:
            self._finish_pull(pull, offer, grant)

    def _finish_pull(self, pull: _Pull, offer: _Offer, grant: GrantEvent) -> None:
        self._pulls.remove(pull)
        del self._offers[grant.handle]
        self.counts["pulled"] += 1
        self.counts["ended at token 0"] += grant.finish is not FinishReason.NONE
        offer.node.scheduler.released(grant.handle, self.now_s)
        result = PullResult(
            pull_id=pull.order.pull_id,
            num_tokens=grant.num_tokens,
            first_token=grant.first_token,
            finish=grant.finish,
        )
        pull.node.scheduler.pull_done(result, self.now_s)

    def _end_pull(self, pull: _Pull, failure: str) -> None:
        """The pull fails, after a last write of garbage to its targets."""
        self._pulls.remove(pull)
        self.counts[f"pull failed: {failure}"] += 1
        pull.node.memory[list(pull.order.block_ids)] = 2
        offer = self._offers.get(pull.order.source.handle)
        if pull.is_open and offer is not None:
            offer.node.scheduler.lease_lost(pull.order.source.handle, self.now_s)
        pull.node.scheduler.pull_done(PullResult(pull_id=pull.order.pull_id, failure=failure), self.now_s)

    # Time

    def turn(self) -> bool:
        """Everybody gets a chance to do something; returns whether anybody is at work."""
        self.num_turns += 1
        self.now_s += self.random.random() * 0.02
        is_busy = False
        for node in self.random.sample(self.nodes, len(self.nodes)):
            if self.random.random() < 0.05:
                node.sleeps_until_turn = self.num_turns + self.random.randrange(10)
            if node.sleeps_until_turn > self.num_turns:
                is_busy = True
            else:
                is_busy |= node.turn(self.now_s)
        self._take_events()
        for pull in list(self._pulls):
            if pull in self._pulls and self.random.random() < 0.7:
                self._move_pull(pull)
        for client in self.clients:
            if client.leaves_at_turn == self.num_turns and client.outcome is None:
                self._leave(client)
        self._take_events()
        for node in self.nodes:
            node.check()
        return is_busy or bool(self._pulls)

    def _take_events(self) -> None:
        """Handle every worker's events, and those that handling them causes."""
        while events := [(node, event) for node in self.nodes for event in node.scheduler.take_events()]:
            for node, event in events:
                self._on_event(node, event)

    def run(self, max_turns: int) -> None:
        """Turn until every client has an outcome and every worker is empty.

        Raises:
            AssertionError: that takes more than ``max_turns`` turns, or leaves something behind.
        """
        last_turn = self.num_turns + max_turns
        while self.turn() or not self._is_empty():
            assert self.num_turns < last_turn, f"no end after {max_turns} turns: {self.counts}"
        for client in self.clients:
            assert client.outcome is not None, f"{client.key} has no outcome"
        for node in self.nodes:
            assert node.pool.num_referenced == 0, f"{node.name} keeps {node.pool.num_referenced} blocks"
            assert not node.in_flight
            load = node.scheduler.load()
            assert load.num_swap_slots_used == 0, f"{node.name} keeps {load.num_swap_slots_used} slots"
            self.counts["preemptions"] += load.num_preemptions
            self.counts["swap-outs"] += load.num_swap_outs
            self.counts["swap-ins"] += load.num_swap_ins

    def _is_empty(self) -> bool:
        loads = [node.scheduler.load() for node in self.nodes]
        return all(load.num_running + load.num_waiting + load.num_parked == 0 for load in loads)


def submit_many(world: World, num_requests: int, *, max_prompt: int, max_answer: int, turns_between: int = 2) -> None:
    """Requests of random lengths, some of which share prefixes, arriving over time."""
    random = world.random
    families = [tuple(random.randrange(VOCAB_SIZE) for _ in range(max_prompt)) for _ in range(3)]
    for _ in range(num_requests):
        shared = random.choice(families)[: random.randrange(max_prompt)]
        tail = tuple(random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, max_prompt - len(shared))))
        sampling = SamplingParams(
            temperature=random.choice((0.0, 1.0)),
            seed=random.randrange(2**32),
            max_tokens=random.randint(1, max_answer),
            ignore_eos=random.random() < 0.3,
        )
        world.submit(shared + tail, sampling)
        for _ in range(random.randint(0, turns_between)):
            world.turn()
