"""A cluster in one thread under a virtual clock: real schedulers, pools and executor; everything else is simulated.

Workers run the hash-chain executor over in-memory pools, so that one wrong, lost or repeated token, or a block
reused too early, shows in the next token. The world simulates the transfer processes (pulls copy bytes between
pools, or between staging copies, late, in parts, and sometimes incompletely), the clients (which leave at any time)
and the router (which sends the further choices of a prompt once the first has a token or has ended, retries the pull
of a parked prompt, resends a failed request with the tokens it has, and may change roles). After every turn it checks
each pool's integrity, and in every step the inputs of sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp

from pdserve.contracts.events import PromptLogprobsEvent, RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import (
    FinishReason,
    GenerationRequest,
    KvSource,
    Outcome,
    PrefixSource,
    SamplingParams,
)
from pdserve.engine.scheduling.interface import (
    AbortPullEvent,
    Event,
    GrantEvent,
    OfferEvent,
    PullResult,
    StartPullEvent,
    WithdrawEvent,
)
from tests.expected_tokens import expected_tokens
from tests.hash_chain_node import EOS, Node, WorldConfig

STOP_TOKEN = 100
"""The rest of this divided by the vocabulary's size is."""


@dataclass
class Client:
    """A request as its client sees it: one choice of a prompt."""

    request: GenerationRequest
    expected: list[int]
    received: list[int] = field(default_factory=list)
    further: list[Client] = field(default_factory=list)
    """Other choices of the prompt, until they are dispatched."""
    outcome: Outcome | None = None
    leaves_at_turn: int = -1


@dataclass(eq=False)
class Dispatch:
    """An attempt at a request, as the router sees it."""

    client: Client
    request: GenerationRequest
    nodes: list[Node] = field(default_factory=list)
    """Workers that received the attempt."""
    handle: bytes = b""
    """Handle of the parked prompt."""

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
    handle: bytes
    is_open: bool = False
    is_aborted: bool = False
    num_grants: int = 0


class World:
    def __init__(self, config: WorldConfig, seed: int) -> None:
        self.config = config
        self.random = Random(seed)
        self._folder = Path(mkdtemp()) if config.num_tier_blocks else Path()
        """Of the tiers' files, until the run ends."""
        self.now_s = 1000.0
        self.num_turns = 0
        self.prefill = [self._node(f"prefill-{i}", decodes=False) for i in range(config.num_prefill)]
        self.decode = [self._node(f"decode-{i}", decodes=True) for i in range(config.num_decode)]
        self.nodes = self.prefill + self.decode
        self.clients: list[Client] = []
        self.counts: Counter[str] = Counter()
        self._offers: dict[bytes, _Offer] = {}
        self._pulls: list[_Pull] = []
        self._num_pulls = 0
        self._dispatches: dict[RequestKey, Dispatch] = {}
        self._alive: set[tuple[str, RequestKey]] = set()
        """(worker, attempt) pairs without a terminal event yet."""
        self._num_prompt_logprobs: Counter[tuple[str, RequestKey]] = Counter()
        """Number of prompt log probabilities each attempt has emitted."""

    def _node(self, name: str, *, decodes: bool) -> Node:
        return Node(self.config, name, decodes=decodes, random=self.random, folder=self._folder)

    # Clients and router

    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        deadline_s: float = 600.0,
        num_choices: int = 1,
    ) -> None:
        """Send the first choice. The others follow when it has a token."""
        ttft_slo_s = self.random.choice((0.0, 0.1, 1.0))
        choices = []
        for choice in range(num_choices):
            request = GenerationRequest(
                request_id=len(self.clients),
                prompt_tokens=prompt,
                choice=choice,
                sampling=sampling,
                deadline_s=deadline_s,
                ttft_slo_s=ttft_slo_s,
                patience_s=self.random.choice((0.0, 0.05, 600.0)),
            )
            expected = expected_tokens(
                prompt,
                sampling.max_tokens,
                self.config.vocab_size,
                sampling=sampling,
                choice=choice,
                eos_token_ids=(EOS,),
                eos_period=self.config.eos_period,
            )
            client = Client(request, expected)
            if self.random.random() < self.config.cancel:
                client.leaves_at_turn = self.num_turns + self.random.randrange(60)
            self.clients.append(client)
            choices.append(client)
        choices[0].further = choices[1:]
        self._dispatch(choices[0], choices[0].request)

    def _dispatch_further(self, client: Client) -> None:
        further, client.further = client.further, []
        for other in further:
            if other.outcome is None:
                self._dispatch(other, other.request)

    def _dispatch(self, client: Client, request: GenerationRequest) -> None:
        is_handoff = bool(self.prefill) and self.random.random() >= self.config.local_share
        node = self.random.choice(self.prefill if is_handoff else self.decode)
        source = self._prefix_source(node, request) if self.random.random() < self.config.prefix_share else None
        dispatch = Dispatch(client, replace(request, handoff=is_handoff, prefix_source=source), [node])
        self._dispatches[dispatch.key] = dispatch
        self._alive.add((node.name, dispatch.key))
        node.scheduler.add(dispatch.key, dispatch.request, self.now_s)

    def _prefix_source(self, node: Node, request: GenerationRequest) -> PrefixSource | None:
        """Any other worker, whatever it caches."""
        others = [other for other in self.nodes if other is not node]
        num_tokens = self.random.choice((0, 8, request.num_known_tokens, 1000))
        min_tokens = self.random.choice((0, 5, 12))
        name = self.random.choice(others).name if others else ""
        source = PrefixSource(address=name, worker_epoch=1, num_tokens=num_tokens, min_tokens=min_tokens, max_s=1.0)
        return source if others else None

    def _redispatch(self, dispatch: Dispatch, reason: str) -> None:
        """Resend an attempt with the tokens that the client has."""
        self.counts[f"redispatched: {reason}"] += 1
        self._withdraw(dispatch)
        attempt, emitted = dispatch.request.attempt + 1, tuple(dispatch.client.received)
        self._dispatch(dispatch.client, replace(dispatch.request, attempt=attempt, emitted_tokens=emitted))

    def _withdraw(self, dispatch: Dispatch) -> None:
        del self._dispatches[dispatch.key]
        for node in dispatch.nodes:
            node.scheduler.cancel(dispatch.key, self.now_s)

    def _end(self, client: Client, outcome: Outcome) -> None:
        """Record the outcome of a client. Workers detect a finished request themselves; any other end is a cancel."""
        client.outcome = outcome
        for dispatch in [dispatch for dispatch in self._dispatches.values() if dispatch.client is client]:
            if outcome is Outcome.FINISHED:
                del self._dispatches[dispatch.key]
            else:
                self._withdraw(dispatch)
        self._dispatch_further(client)

    def _on_token(self, node: Node, event: TokenEvent) -> None:
        if event.finish:
            self._alive.remove((node.name, event.key))
        dispatch = self._dispatches.get(event.key)
        if dispatch is None:
            return
        client = dispatch.client
        assert event.choice == client.request.choice
        if event.index == 0 and client.request.sampling.num_prompt_logprobs >= 0:
            num_sent = self._num_prompt_logprobs[node.name, event.key]
            assert num_sent == len(client.request.prompt_tokens) - 1, f"{event.key}: {num_sent} prompt logprobs"
        expected, received = client.expected, client.received
        assert event.index == len(received), f"{event.key}: token {event.index} came, {len(received)} is next"
        assert event.token == expected[event.index], f"{event.key}: token {event.index} is wrong"
        received.append(event.token)
        self._dispatch_further(client)
        is_last = len(received) == len(expected)
        assert (event.finish is not FinishReason.NONE) == is_last
        if is_last:
            sampling = client.request.sampling
            is_stop = event.token in (*(() if sampling.ignore_eos else (EOS,)), *sampling.stop_token_ids)
            assert event.finish is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            self._end(client, Outcome.FINISHED)

    def _on_prompt_logprobs(self, node: Node, event: PromptLogprobsEvent) -> None:
        """Check that prompt log probabilities arrive in order. A preempted prompt starts again from the first."""
        attempt = node.name, event.key
        num_before = event.first_position - 1
        assert num_before <= self._num_prompt_logprobs[attempt], f"{event.key}: no prompt logprobs before {num_before}"
        num_sent = num_before + len(event.entries)
        self._num_prompt_logprobs[attempt] = max(self._num_prompt_logprobs[attempt], num_sent)

    def _on_request_event(self, node: Node, event: RequestEvent) -> None:
        self.counts[event.kind.name] += 1
        if event.kind.is_terminal:
            self._alive.remove((node.name, event.key))
        dispatch = self._dispatches.get(event.key)
        if dispatch is None:
            return
        match event.kind:
            case RequestEventKind.STARTED if dispatch.request.choice and event.num_cached_tokens:
                self.counts["choice over cached blocks"] += 1
            case RequestEventKind.LAST_CHUNK:
                self._bind(dispatch, event.handle)
            case RequestEventKind.PREEMPTED if self.random.random() < self.config.cancel_preempted:
                dispatch.client.leaves_at_turn = self.num_turns + self.random.randrange(6)
            case RequestEventKind.FAILED if event.message.startswith("deadline"):
                self._end(dispatch.client, Outcome.FAILED)
            case RequestEventKind.KV_UNAVAILABLE if node is not dispatch.nodes[0] and self._may_rebind(dispatch):
                self.counts["rebound"] += 1
                dispatch.nodes.pop()
                self._bind(dispatch, dispatch.handle)
            case RequestEventKind.FAILED | RequestEventKind.KV_UNAVAILABLE:
                self._redispatch(dispatch, event.message.split(":")[0])
            case RequestEventKind.REJECTED:
                self._end(dispatch.client, Outcome.REJECTED)

    def _may_rebind(self, dispatch: Dispatch) -> bool:
        """Whether to retry a failed pull: half the time, while the prompt is parked."""
        return (dispatch.nodes[0].name, dispatch.key) in self._alive and self.random.random() < 0.5

    def _bind(self, dispatch: Dispatch, handle: bytes) -> None:
        dispatch.handle = handle
        others = [node for node in self.decode if node is not dispatch.nodes[0]]
        if not others:
            self._redispatch(dispatch, "relabelled")
            return
        node = self.random.choice(others)
        dispatch.nodes.append(node)
        source = KvSource(address="", worker_epoch=1, handle=handle)
        self._alive.add((node.name, dispatch.key))
        node.scheduler.prepare(dispatch.key, dispatch.request, source, self.now_s)

    # Transfer processes

    def _on_event(self, node: Node, event: Event) -> None:
        match event:
            case TokenEvent():
                self._on_token(node, event)
            case PromptLogprobsEvent():
                self._on_prompt_logprobs(node, event)
            case RequestEvent():
                self._on_request_event(node, event)
            case _ if node.staging is not None and not isinstance(event, OfferEvent):
                node.orders.append(event)
            case _:
                self._obey(node, event)

    def _obey(self, node: Node, order: Event) -> None:
        """Apply an order that reaches the transfer process. The blocks it grants are staged by then."""
        match order:
            case OfferEvent():
                self._offers[order.handle] = _Offer(node)
            case GrantEvent():
                if node.staging is not None:
                    node.staging.copy_d2h(order.block_ids, order.generations)
                self._grant(order)
            case WithdrawEvent():
                self._offers.pop(order.handle, None)  # the puller may have released it already
            case StartPullEvent():
                opens_at_turn = self.num_turns + self.random.randrange(4)
                self._num_pulls += 1
                handle = f"loan/{self._num_pulls}".encode() if order.prefix else order.source.handle
                self._pulls.append(_Pull(node, order, opens_at_turn, handle))
            case AbortPullEvent():
                self._abort(node, order.pull_id)

    def _tell(self, node: Node, message: Callable[[], None]) -> None:
        """Send a message from a transfer process to a worker: at once, or after the copies queued before it."""
        if node.staging is not None:
            node.messages.append(message)
        else:
            message()

    def _move_copies(self, node: Node) -> None:
        """Finish some of the waiting copies."""
        while node.orders and self.random.random() < 0.6:
            self._obey(node, node.orders.popleft())
        while node.messages and self.random.random() < 0.6:
            node.messages.popleft()()

    def _grant(self, event: GrantEvent) -> None:
        if event.is_prefix and event.handle not in self._offers:
            return  # its pull has ended
        offer = self._offers[event.handle]
        assert event.first_index == sum(len(grant.block_ids) for grant in offer.grants)
        assert not any(grant.final for grant in offer.grants)
        offer.grants.append(event)

    def _abort(self, node: Node, pull_id: int) -> None:
        for pull in self._pulls:  # it may have ended already
            if pull.node is node and pull.order.pull_id == pull_id:
                pull.is_aborted = True

    def _move_pull(self, pull: _Pull) -> None:
        """One turn of one pull: open it, copy one grant's blocks, or end it."""
        offer = self._offers.get(pull.handle)
        is_failing = self.random.random() < self.config.pull_failure
        if pull.is_aborted and self.random.random() < 0.7:
            pull.node.transferred[list(pull.order.block_ids)] = 3  # a copy in flight
        elif pull.is_aborted or is_failing or (pull.is_open and offer is None):
            self._end_pull(pull, "aborted" if pull.is_aborted else "copy" if is_failing else "withdrawn")
        elif self.num_turns < pull.opens_at_turn:
            return
        elif pull.order.prefix and not pull.is_open:
            self._borrow(pull)
        elif offer is None:
            self._end_pull(pull, "refused")
        elif not pull.is_open:
            pull.is_open = True
            self._tell(offer.node, lambda: offer.node.scheduler.set_leased(pull.handle, True))
        elif pull.order.prefix and self.random.random() < 0.9:
            return  # a slow link
        elif pull.num_grants < len(offer.grants):
            self._copy(pull, offer, offer.grants[pull.num_grants])

    def _borrow(self, pull: _Pull) -> None:
        pull.is_open = True
        node = next(node for node in self.nodes if node.name == pull.order.source.address)
        self._offers[pull.handle] = _Offer(node)
        self._tell(node, lambda: node.scheduler.lend(pull.handle, pull.order.prefix))

    def _copy(self, pull: _Pull, offer: _Offer, grant: GrantEvent) -> None:
        pull.num_grants += 1
        if grant.first_token is not None and grant.first_token.finish:
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
                pull.node.transferred[pull.order.block_ids[target]] = offer.node.transferred[block]
                if offer.node.generations[block] != generation:
                    last = offer.grants[-1].first_token
                    is_over = last is not None and last.finish
                    assert is_over or offer.node.orders, "a block was reused that is parked or lent"
                    self.counts["reused"] += 1
                    self._end_pull(pull, "verify")
                    return
        if grant.final:
            self._finish_pull(pull, offer, grant)

    def _finish_pull(self, pull: _Pull, offer: _Offer, grant: GrantEvent) -> None:
        self._pulls.remove(pull)
        del self._offers[grant.handle]
        if grant.is_prefix:
            self.counts["prefix blocks pulled"] += len(grant.block_ids)
        else:
            self.counts["pulled"] += 1
        self.counts["ended at token 0"] += bool(grant.first_token and grant.first_token.finish)
        self._tell(offer.node, lambda: offer.node.scheduler.released(grant.handle))
        result = PullResult(pull_id=pull.order.pull_id, num_tokens=grant.num_tokens, first_token=grant.first_token)
        self._tell(pull.node, lambda: self._pull_done(pull, result))

    def _pull_done(self, pull: _Pull, result: PullResult) -> None:
        if pull.node.staging is not None and not result.failure:
            pull.node.staging.copy_h2d(pull.order.block_ids)
        pull.node.scheduler.pull_done(result, self.now_s)

    def _end_pull(self, pull: _Pull, failure: str) -> None:
        """Fail the pull after a last write of garbage to its targets."""
        self._pulls.remove(pull)
        self.counts[f"{'prefix ' * bool(pull.order.prefix)}pull failed: {failure}"] += 1
        pull.node.transferred[list(pull.order.block_ids)] = 2
        self._leave_source(pull)
        self._tell(pull.node, lambda: self._pull_done(pull, PullResult(pull_id=pull.order.pull_id, failure=failure)))

    def _leave_source(self, pull: _Pull) -> None:
        """A lent prefix is given back; a parked prompt may be pulled again."""
        offer = self._offers.get(pull.handle)
        if not pull.is_open or offer is None:
            return
        if pull.order.prefix:
            del self._offers[pull.handle]
            self._tell(offer.node, partial(offer.node.scheduler.released, pull.handle))
        else:
            self._tell(offer.node, partial(offer.node.scheduler.set_leased, pull.handle, False))

    # Workers that end

    def kill(self, node: Node) -> None:
        """Start a worker anew. Its pulls end, those from it fail, and the router resends what it had."""
        self.counts["killed"] += 1
        self._count(node)
        node.in_flight.clear()
        node.orders.clear()
        node.messages.clear()
        for pull in [pull for pull in self._pulls if pull.node is node]:
            self._pulls.remove(pull)
            self._leave_source(pull)
        self._offers = {handle: offer for handle, offer in self._offers.items() if offer.node is not node}
        self._alive = {(name, key) for name, key in self._alive if name != node.name}
        node.kill()
        for dispatch in [each for each in self._dispatches.values() if node in each.nodes]:
            self._redispatch(dispatch, "killed")

    # Roles

    def take_roles(self, num_prefill: int) -> None:
        """Make so many workers, chosen at random, prefill workers, and decode workers of the others."""
        nodes = self.random.sample(self.nodes, len(self.nodes))
        self.counts["relabelled"] += len(set(nodes[:num_prefill]) - set(self.prefill))
        self.prefill, self.decode = nodes[:num_prefill], nodes[num_prefill:]

    def swap_roles(self) -> None:
        """Make prefill workers of all decode workers, and the other way round, at once."""
        self.prefill, self.decode = self.decode, self.prefill

    # Time

    def turn(self) -> bool:
        """Give every participant a chance to act; returns whether any of them is busy."""
        self.num_turns += 1
        self.now_s += self.random.random() * 0.02
        if self.config.relabel and len(self.nodes) > 1 and self.random.random() < self.config.relabel:
            self.take_roles(self.random.randrange(1, len(self.nodes)))
        if self.config.kill and self.random.random() < self.config.kill:
            self.kill(self.random.choice(self.nodes))
        is_busy = False
        for node in self.random.sample(self.nodes, len(self.nodes)):
            if self.random.random() < 0.05:
                node.sleeps_until_turn = self.num_turns + self.random.randrange(10)
            if node.sleeps_until_turn > self.num_turns:
                is_busy = True
            else:
                is_busy |= node.turn(self.now_s)
        self._take_events()
        for node in self.nodes:
            self._move_copies(node)
        for pull in list(self._pulls):
            if pull in self._pulls and self.random.random() < 0.7:
                self._move_pull(pull)
        for client in self.clients:
            if client.leaves_at_turn == self.num_turns and client.outcome is None:
                self._end(client, Outcome.CANCELLED)
        self._take_events()
        for node in self.nodes:
            node.scheduler.check_integrity()
        return is_busy or bool(self._pulls) or any(node.orders or node.messages for node in self.nodes)

    def _take_events(self) -> None:
        """Handle every worker's events, and the events caused by handling them."""
        while events := [(node, event) for node in self.nodes for event in node.scheduler.take_events()]:
            for node, event in events:
                self._on_event(node, event)

    def run(self, max_turns: int) -> None:
        """Turn until every client has an outcome and every worker is empty.

        Raises:
            AssertionError: it takes more than ``max_turns`` turns, or leaves something behind.
        """
        last_turn = self.num_turns + max_turns
        while self.turn() or not self._is_empty():
            assert self.num_turns < last_turn, f"no end after {max_turns} turns: {self.counts}"
        for client in self.clients:
            assert client.outcome is not None, f"request {client.request.request_id} has no outcome"
        for node in self.nodes:
            assert node.pool.num_referenced == 0, f"{node.name} keeps {node.pool.num_referenced} blocks"
            assert not node.in_flight
            load = node.scheduler.load()
            assert load.num_swap_slots_used == 0, f"{node.name} keeps {load.num_swap_slots_used} slots"
            self._count(node)
            if node.tier is not None:
                node.tier.close()
        if self.config.num_tier_blocks:
            rmtree(self._folder)
        assert not self._alive, f"never ended: {self._alive}"

    def _count(self, node: Node) -> None:
        """Add what a worker did since it started."""
        load = node.scheduler.load()
        self.counts["preemptions"] += load.num_preemptions
        self.counts["right guesses"] += load.num_right_guesses
        self.counts["wrong guesses"] += load.num_guesses - load.num_right_guesses
        self.counts["swap-outs"] += load.num_swap_outs
        self.counts["swap-ins"] += load.num_swap_ins
        self.counts["restored tokens"] += load.num_restored_tokens
        self.counts["given up"] += load.num_restores_given_up

    def _is_empty(self) -> bool:
        loads = [node.scheduler.load() for node in self.nodes]
        for node, load in zip(self.nodes, loads, strict=True):
            num_blocks = load.num_blocks_free + load.num_blocks_cached + load.num_blocks_referenced
            assert num_blocks == node.pool.num_blocks
        return all(load.num_running + load.num_waiting + load.num_parked == 0 for load in loads)


def submit_many(
    world: World, num_requests: int, *, max_prompt: int, max_answer: int, max_choices: int = 1, turns_between: int = 2
) -> None:
    """Submit requests of random lengths, some with shared prefixes, over time."""
    random, vocab_size = world.random, world.config.vocab_size
    families = [tuple(random.randrange(vocab_size) for _ in range(max_prompt)) for _ in range(3)]
    for _ in range(num_requests):
        shared = random.choice(families)[: random.randrange(max_prompt)]
        tail = tuple(random.randrange(vocab_size) for _ in range(random.randint(1, max_prompt - len(shared))))
        sampling = SamplingParams(
            temperature=random.choice((0.0, 1.0)),
            seed=random.randrange(2**32),
            max_tokens=random.randint(1, max_answer),
            ignore_eos=random.random() < 0.3,
            stop_token_ids=random.choice(((), (STOP_TOKEN % vocab_size,))),
            presence_penalty=random.choice((0.0, 1.0)),
            num_prompt_logprobs=random.choice((-1, -1, 0)),
        )
        if random.random() < 0.3:
            sampling = replace(sampling, min_tokens=random.randint(1, sampling.max_tokens))
        world.submit(shared + tail, sampling, num_choices=random.randint(1, max_choices))
        for _ in range(random.randint(0, turns_between)):
            world.turn()
