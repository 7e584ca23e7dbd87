"""The scout's event loop, compiled: router, prefill and decode schedulers, step loops and links on plain arrays.

Called by `pdserve.planner.simulate.scout`, which fills the arrays and reads the results. Every function follows one of
the live code and names it; all take the same `State`. Lists of requests are rings or arrays in ``State.lists``,
indexed by worker and one of the constants below.

Prompts that begin alike share nodes of a tree, each a run of tokens: a request's path are the nodes of its prompt, from
the root. A worker caches the leading blocks of a node.

Simplified against the live code: the router knows the prefix caches without delay; prompts that compute the same node
at the same time share its blocks, though each computes it; a preempted sequence frees its blocks at once, so that none
waits a step for them, and finds none of them again; an answer that ends before its limit leaves no row in the step in
flight; nothing times out.
"""

from __future__ import annotations

from math import inf, isnan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

COMPILED = {"nogil": True, "error_model": "numpy", "_nrt": False}
"""Options of compiled functions: no checks of divisors, and no reference counts of arrays, which would halve the speed:
nothing here allocates."""
INLINED = {"forceinline": True, **COMPILED}
"""By LLVM: numba's own inlining infers the types of each copy anew, which makes compilation twice as long."""

PREFILL, DECODE, MIXED = range(3)

LOOKAHEAD_TOKENS = 64
"""See `pdserve.engine.scheduling.sequence`."""
STALL_TOKENS = 100
"""See `pdserve.router.requests.least_time`."""

INBOX, WAITING, RESERVED, ADMITTED, COMPUTED, RUNNING, LAST_STEP, GROWTH, AHEAD, SWAPPED = range(10)
"""Lists of a worker: messages; prompts and reservations in line; prompts in chunks; prompts whose last chunk is in
flight; sequences that decode, and the step with the last row of each; sequences by the step, modulo the block size,
that needs a block, and those of them that have it already; sequences in host memory."""
NUM_LISTS = 10

PULL_ENDED, ARRIVED, ROUTED = range(3)
"""Timers: ends of pulls, and arrivals of next turns at the edge and at the dispatcher."""

ADD, PREPARE, PULLED, RELEASED, CANCEL = range(5)
"""Messages to a worker: see `pdserve.engine.worker.messages`."""
STARTED, RESERVED_BLOCKS, LAST_CHUNK, FINISHED = range(4)
"""Messages to the router."""

TOKENS, ROWS, PAIRS = range(3)
"""Tables of a pool: seconds of a step by new tokens and by rows, and of one pair of tokens in a prefill chunk."""


def _record(seconds: str, counts: str) -> np.dtype[np.void]:
    return np.dtype([(name, "f8") for name in seconds.split()] + [(name, "i8") for name in counts.split()])


REQUEST = _record(
    "arrived_s started_s first_token_s last_token_s pull_begun_s granted_s think_s",
    """num_prompt num_output max_output path_begin path_end answer_node next_turn is_rejected prefill decode ticket
    is_preempted num_cached num_sent num_pull_cached num_parked_shared num_shared num_known num_computed num_left
    chunk_step num_before_chunk num_last_blocks first_step num_ahead is_in_flight""",
)
"""``max_output`` is the limit of the answer, ``prefill`` and ``decode`` are its workers, ``ticket`` is its place among
the arrivals of a worker. The prompt's nodes are ``paths[path_begin:path_end]``. ``num_cached`` tokens were cached where
it was prefilled, ``num_pull_cached`` where it decodes; ``num_sent`` were to compute when it was sent; others held
``num_parked_shared`` of its blocks on the prefill worker when it started, ``num_shared`` where it decodes. Prefill goes
from ``num_computed`` to ``num_known`` tokens, the last chunk in step ``chunk_step`` from ``num_before_chunk``;
``num_left`` are decode rows to plan, from step ``first_step`` on, ``num_last_blocks`` the blocks in the last grant,
``num_ahead`` those that it holds for tokens to come. ``is_in_flight`` if `InFlightLoad` counts it as decoding."""

WORKER = _record(
    """decode_token_s window_share near_block_s far_block_s swap_block_s
    free_at_s stage_free_at_s end_s next_end_s egress_free_at_s ingress_free_at_s""",
    """role pool host window max_batch_tokens max_batch_size num_blocks num_swap_slots depth num_stages
    first_of_pipeline num_in_flight num_steps chunk_tokens next_chunk_tokens num_messages
    waiting_head waiting_tail waiting_tokens num_admitted uncomputed_tokens admitted_context computed_head computed_tail
    is_held_up num_tickets reserved_head reserved_tail num_pulling num_swapped num_preemptions num_decoded
    num_running num_active active_context ending_context pulling_context first_last_step num_ending
    num_free num_evictable handoff_blocks soon_blocks most_blocks refused_blocks
    sent_tokens sent_context sent_blocks num_sent""",
)
"""By line: limits; steps, of which ``num_steps`` were planned and the oldest in flight ends at ``end_s``; prompts;
handoffs and preemptions; sequences, of which those with rows to plan are active and ``first_last_step`` is the first
step to end one; blocks: free or cached, of those cached ones, of prompts for other workers, expected by sequences that
pull or prefill here, at the ends of all sequences, and the least number that did not fit since a sequence ended; load
sent and not reported (`InFlightLoad`)."""

EVENT = _record("at_s", "kind request")

CLUSTER = _record(
    "tpot_slo_s arrival_s message_s answer_s pull_s turn_s",
    "block_size max_in_flight num_first num_live message_head message_tail num_timers",
)

NEVER = np.iinfo(np.int64).max


class State(NamedTuple):
    """Arrays of one run."""

    cluster: npt.NDArray[np.void]
    """One `CLUSTER`."""
    requests: npt.NDArray[np.void]
    """First turns, ``num_first`` of them, in order of arrival, then all others."""
    workers: npt.NDArray[np.void]
    turn_at_s: npt.NDArray[np.float64]
    """Next turn of each worker; infinite for an idle one."""
    quiet_until_s: npt.NDArray[np.float64]
    """Earliest turn of each worker that may send a message."""
    lists: npt.NDArray[np.int32]
    """By worker, list and position; rings wrap around at its power of two."""
    messages: npt.NDArray[np.void]
    """Ring of `EVENT` to the router."""
    timers: npt.NDArray[np.void]
    """Heap of `EVENT` by time."""
    tables: npt.NDArray[np.float64]
    """By pool, table and count."""
    paths: npt.NDArray[np.int32]
    node_blocks: npt.NDArray[np.int32]
    """Full blocks of each node."""
    cached: npt.NDArray[np.int32]
    """Cached leading blocks, by worker and node."""
    num_references: npt.NDArray[np.int32]
    """Requests that hold the node's blocks, by worker and node."""
    lru: npt.NDArray[np.int32]
    """Next and previous of each cached node without references, by worker and node: rings from the least to the most
    recently used one, each with an extra node that begins and ends it."""


# Time of steps: `pdserve.model.cost.cost_model`


@njit(**INLINED)
def decode_attention_s(worker, num_tokens, num_rows):
    num_beyond = max(0, num_tokens - num_rows * worker.window)
    return (num_tokens - worker.window_share * num_beyond) * worker.decode_token_s


@njit(**INLINED)
def attention_s(state, worker, num_new, num_cached):
    if num_new == 1:
        return decode_attention_s(worker, num_cached + 1, 1)
    pairs_s = num_pairs(worker, num_new, num_cached) * state.tables[worker.pool, PAIRS, num_new]
    return max(pairs_s, read_s(worker, num_new, num_cached))


@njit(**INLINED)
def num_pairs(worker, num_new, num_cached):
    before, after = max(0, num_cached - worker.window), max(0, num_cached + num_new - worker.window)
    num_beyond = (after * (after + 1) - before * (before + 1)) / 2
    return num_new * num_cached + num_new * (num_new + 1) / 2 - worker.window_share * num_beyond


@njit(**INLINED)
def read_s(worker, num_new, num_cached):
    num_unread = max(0, num_cached + 1 - worker.window)
    return (num_cached + num_new - worker.window_share * num_unread) * worker.decode_token_s


@njit(**INLINED)
def sum_s(state, worker, num_tokens, num_rows, attention):
    if num_tokens == 0:
        return 0.0
    return state.tables[worker.pool, TOKENS, num_tokens] + state.tables[worker.pool, ROWS, num_rows] + attention


@njit(**INLINED)
def prefill_s(state, worker, num_new, num_cached):
    return sum_s(state, worker, num_new, 1, attention_s(state, worker, num_new, num_cached))


@njit(**INLINED)
def prompt_s(state, worker, num_new, num_cached):
    budget = worker.max_batch_tokens
    num_chunks, num_left = num_new // budget, num_new % budget
    if num_new <= budget:
        return prefill_s(state, worker, num_new, num_cached)
    num_whole = num_new - num_left
    pairs_s = num_pairs(worker, num_whole, num_cached) * state.tables[worker.pool, PAIRS, budget]
    first_s, last_s = read_s(worker, budget, num_cached), read_s(worker, budget, num_cached + num_whole - budget)
    attention = max(pairs_s, num_chunks * (first_s + last_s) / 2)
    chunk_s = state.tables[worker.pool, TOKENS, budget] + state.tables[worker.pool, ROWS, 1]
    return num_chunks * chunk_s + attention + prefill_s(state, worker, num_left, num_cached + num_whole)


@njit(**INLINED)
def mixed_s(state, worker, num_new, num_cached, batch_size, num_context):
    attention = attention_s(state, worker, num_new, num_cached)
    attention += decode_attention_s(worker, num_context + batch_size, batch_size)
    return sum_s(state, worker, num_new + batch_size, 1 + batch_size, attention)


# Router: `pdserve.router.requests.least_time` and `pdserve.router.cluster.worker.InFlightLoad.snapshot`


@njit(**INLINED)
def waiting_tokens(worker):
    started = worker.chunk_tokens + worker.next_chunk_tokens + worker.uncomputed_tokens
    return started + max(worker.waiting_tokens, worker.sent_tokens)


@njit(**INLINED)
def num_decoding(worker):
    num_reserved = worker.reserved_tail - worker.reserved_head
    num_waiting = worker.waiting_tail - worker.waiting_head + num_reserved + worker.num_swapped
    return worker.num_running + worker.num_pulling + worker.num_admitted + max(num_waiting, worker.num_sent)


@njit(**INLINED)
def num_context_tokens(worker):
    num_running = worker.active_context + worker.ending_context
    return num_running + worker.pulling_context + worker.admitted_context + worker.sent_context


@njit(**INLINED)
def own_prefill_s(state, worker, request, num_cached):
    """Seconds to prefill the request alone: a lower bound of its TTFT."""
    return prompt_s(state, worker, request.num_prompt - num_cached, num_cached)


@njit(**INLINED)
def predict_ttft_s(state, worker, request, num_cached):
    num_waiting, budget = waiting_tokens(worker), worker.max_batch_tokens
    num_new = request.num_prompt - num_cached
    ttft_s = own_prefill_s(state, worker, request, num_cached)
    if num_waiting > budget:
        ttft_s += prefill_s(state, worker, budget, 0) * num_waiting / budget
    elif num_waiting > 0:
        ttft_s += prefill_s(state, worker, num_waiting, 0)
    batch_size = num_decoding(worker)
    if worker.role != PREFILL and batch_size > 0:
        chunk = min(num_waiting + num_new, budget)
        step_s = mixed_s(state, worker, chunk, num_cached, batch_size, num_context_tokens(worker))
        num_steps = (num_waiting + num_new + budget - 1) // budget
        ttft_s += num_steps * (step_s - prefill_s(state, worker, chunk, num_cached))
    return ttft_s


@njit(**INLINED)
def shortfall(state, worker, request):
    num_blocks = request.num_prompt // state.cluster[0].block_size + 1
    missing_blocks = max(0, num_blocks - (worker.num_free - worker.sent_blocks))
    return missing_blocks + max(0, num_decoding(worker) + 1 - worker.max_batch_size)


@njit(**INLINED)
def may_prefill_locally(state, worker, request, num_cached):
    num_new = waiting_tokens(worker) + request.num_prompt - num_cached
    chunk = min(num_new, worker.max_batch_tokens)
    batch_size, num_context = num_decoding(worker), num_context_tokens(worker)
    return mixed_s(state, worker, chunk, num_cached, batch_size, num_context) <= state.cluster[0].tpot_slo_s


@njit(**INLINED)
def is_emptier(state, worker, best, request):
    """`tie_order`, between workers of which both or none only decode."""
    other, fits = state.workers[best], worker.num_free > request.num_prompt // state.cluster[0].block_size
    return (worker.role == DECODE) == (other.role == DECODE) and fits and worker.num_free > other.num_free


@njit(**INLINED)
def place(state, index, now_s):
    """`LeastTime.prefill`, and the load in flight."""
    request = state.requests[index]
    best, least_s, best_cached, num_workers = -1, inf, 0, len(state.workers)
    for position in range(2 * num_workers):  # decode workers last
        w = position % num_workers
        worker, is_last_round = state.workers[w], position >= num_workers
        if (worker.role == DECODE) != is_last_round:
            continue
        num_cached = num_cached_tokens(state, w, index)
        if own_prefill_s(state, worker, request, num_cached) > least_s:
            continue
        ttft_s = predict_ttft_s(state, worker, request, num_cached)
        may_start = not is_last_round or (
            shortfall(state, worker, request) == 0 and may_prefill_locally(state, worker, request, num_cached)
        )
        if may_start and (ttft_s < least_s or (ttft_s == least_s and is_emptier(state, worker, best, request))):
            best, least_s, best_cached = w, ttft_s, num_cached
    worker = state.workers[best]
    request.prefill = best
    request.num_sent = request.num_prompt - best_cached
    worker.sent_tokens += request.num_sent
    if worker.role != PREFILL:
        request.decode = best
        send_decode(state, worker, request)
    tell(state, best, ADD, index, now_s)


@njit(**INLINED)
def bind(state, index, now_s):
    """`LeastTime.decode`, and the load in flight."""
    request = state.requests[index]
    host = state.workers[request.prefill].host
    block_size = state.cluster[0].block_size
    best, least_missing, least_s = -1, NEVER, inf
    for w in range(len(state.workers)):
        worker = state.workers[w]
        if worker.role != DECODE:
            continue
        missing = shortfall(state, worker, request)
        batch_size, num_context = num_decoding(worker) + 1, num_context_tokens(worker) + request.num_prompt
        attention = decode_attention_s(worker, num_context + batch_size, batch_size)
        tpot_s = sum_s(state, worker, batch_size, batch_size, attention)
        block_s = worker.near_block_s if worker.host == host else worker.far_block_s
        tpot_s += (request.num_prompt - num_cached_tokens(state, w, index)) / block_size * block_s / STALL_TOKENS
        is_tie = tpot_s == least_s and best >= 0 and is_emptier(state, worker, best, request)
        if missing < least_missing or (missing == least_missing and (tpot_s < least_s or is_tie)):
            best, least_missing, least_s = w, missing, tpot_s
    request.decode = best
    send_decode(state, state.workers[best], request)
    tell(state, best, PREPARE, index, now_s)


@njit(**INLINED)
def send_decode(state, worker, request):
    """`InFlightLoad.add_decode`."""
    request.is_in_flight = 1
    worker.num_sent += 1
    worker.sent_context += request.num_prompt
    worker.sent_blocks += request.num_prompt // state.cluster[0].block_size + 1


@njit(**INLINED)
def settle_decode(state, worker, request):
    """`InFlightLoad.remove`."""
    if request.is_in_flight == 1:
        request.is_in_flight = 0
        worker.num_sent -= 1
        worker.sent_context -= request.num_prompt
        worker.sent_blocks -= request.num_prompt // state.cluster[0].block_size + 1


@njit(**INLINED)
def tell(state, w, kind, index, now_s):
    worker = state.workers[w]
    state.lists[w, INBOX, worker.num_messages] = index * 8 + kind
    worker.num_messages += 1
    if state.turn_at_s[w] == inf:
        state.turn_at_s[w] = now_s
    state.quiet_until_s[w] = state.turn_at_s[w]


@njit(**INLINED)
def report(state, kind, index, now_s):
    cluster = state.cluster[0]
    message = state.messages[cluster.message_tail & (len(state.messages) - 1)]
    message.at_s, message.kind, message.request = now_s + cluster.message_s, kind, index
    cluster.message_tail += 1


@njit(**INLINED)
def receive(state, kind, index, now_s):
    """A message arrives at the router."""
    request = state.requests[index]
    if kind == STARTED:
        worker = state.workers[request.prefill]
        worker.sent_tokens -= request.num_sent
        if worker.role != PREFILL:
            settle_decode(state, worker, request)
    elif kind == RESERVED_BLOCKS:
        settle_decode(state, state.workers[request.decode], request)
    elif kind == LAST_CHUNK:
        bind(state, index, now_s)
    else:
        state.cluster[0].num_live -= 1
        if request.decode != request.prefill and request.num_output == 1:
            settle_decode(state, state.workers[request.decode], request)
            tell(state, request.decode, CANCEL, index, now_s)
        if request.next_turn >= 0:
            think_s = state.cluster[0].answer_s + state.requests[request.next_turn].think_s
            push(state, now_s + think_s, ARRIVED, request.next_turn)


@njit(**INLINED)
def arrive(state, index):
    """A request reaches the edge, which has a limit."""
    request, cluster = state.requests[index], state.cluster[0]
    if cluster.num_live >= cluster.max_in_flight:
        request.is_rejected = 1
    if request.is_rejected == 0:
        cluster.num_live += 1


# Prefix caches: `pdserve.kv_transfer.block_pool`


@njit(**INLINED)
def has_path(request):
    """Whether the prompt may share a prefix. The functions below, which are not inlined, are for those that may."""
    return request.path_begin < request.path_end


@njit(**INLINED)
def num_cached_tokens(state, w, index):
    """Leading tokens of the prompt, but the last one, that the worker caches."""
    return match_prefix(state, w, index) if has_path(state.requests[index]) else 0


@njit(**COMPILED)
def match_prefix(state, w, index):
    request, block_size = state.requests[index], state.cluster[0].block_size
    num_blocks = 0
    for position in range(request.path_begin, request.path_end):
        node = state.paths[position]
        num_blocks += state.cached[w, node]
        if state.cached[w, node] < state.node_blocks[node]:
            break
    return min(num_blocks, (request.num_prompt - 1) // block_size) * block_size


@njit(**COMPILED)
def num_held_by_others(state, w, index):
    """Blocks of the prompt that requests on the worker hold."""
    request, num_blocks = state.requests[index], 0
    for position in range(request.path_begin, request.path_end):
        node = state.paths[position]
        if state.num_references[w, node] == 0:
            break
        num_blocks += state.node_blocks[node]
    return num_blocks


@njit(**COMPILED)
def hold(state, w, index):
    """`BlockPool.share`."""
    request, worker = state.requests[index], state.workers[w]
    for position in range(request.path_begin, request.path_end):
        node = state.paths[position]
        if state.num_references[w, node] == 0 and state.cached[w, node] > 0:
            unlink(state.lru[w], node)
            worker.num_evictable -= state.cached[w, node]
        state.num_references[w, node] += 1


@njit(**COMPILED)
def store(state, w, index, num_tokens):
    """`BlockPool.register`: the KV of the prompt's first ``num_tokens`` is on the worker."""
    request, num_blocks = state.requests[index], num_tokens // state.cluster[0].block_size
    for position in range(request.path_begin, request.path_end):
        node = state.paths[position]
        state.cached[w, node] = max(state.cached[w, node], min(state.node_blocks[node], num_blocks))
        num_blocks -= state.node_blocks[node]
        if num_blocks <= 0:
            break


@njit(**COMPILED)
def store_chunks(state, w, step):
    """`store` what the prompts in chunks have written up to the end of ``step``."""
    worker, mask = state.workers[w], state.lists.shape[2] - 1
    for position in range(worker.computed_head - worker.computed_tail, worker.num_admitted):
        if position < 0:
            index = state.lists[w, COMPUTED, (worker.computed_tail + position) & mask]
        else:
            index = state.lists[w, ADMITTED, position]
        request = state.requests[index]
        if has_path(request):
            store(state, w, index, request.num_computed if request.chunk_step <= step else request.num_before_chunk)


@njit(**COMPILED)
def release(state, w, index, num_shared, num_written):
    """`BlockPool.release`, after the request has freed all of its blocks but ``num_shared``: those that others still
    hold are not free, and the full blocks of the ``num_written`` tokens after the prompt are cached."""
    request, worker, block_size = state.requests[index], state.workers[w], state.cluster[0].block_size
    num_answered = (request.num_prompt + num_written) // block_size - request.num_prompt // block_size
    if num_answered > 0:
        make_evictable(state, w, request.answer_node, num_answered)
    num_kept = 0
    for position in range(request.path_end - 1, request.path_begin - 1, -1):
        node = state.paths[position]
        state.num_references[w, node] -= 1
        if state.num_references[w, node] > 0:
            num_kept += state.node_blocks[node]
        elif state.cached[w, node] > 0:
            make_evictable(state, w, node, state.cached[w, node])
    worker.num_free -= num_kept - num_shared
    worker.most_blocks += num_kept - num_shared
    worker.soon_blocks += num_kept - num_shared


@njit(**COMPILED)
def make_evictable(state, w, node, num_blocks):
    lru, end = state.lru[w], state.cached.shape[1]
    state.cached[w, node] = num_blocks
    state.workers[w].num_evictable += num_blocks
    last = lru[end, 1]
    lru[last, 0], lru[node, 1] = node, last
    lru[node, 0], lru[end, 1] = end, node


@njit(**COMPILED)
def unlink(lru, node):
    lru[lru[node, 1], 0], lru[lru[node, 0], 1] = lru[node, 0], lru[node, 1]


@njit(**INLINED)
def evict(state, w):
    """Cached blocks beyond the available ones were overwritten."""
    if state.workers[w].num_evictable > state.workers[w].num_free:
        evict_oldest(state, w)


@njit(**COMPILED)
def evict_oldest(state, w):
    worker, lru, end = state.workers[w], state.lru[w], state.cached.shape[1]
    while worker.num_evictable > max(worker.num_free, 0):
        node = lru[end, 0]
        num_blocks = min(worker.num_evictable - max(worker.num_free, 0), state.cached[w, node])
        state.cached[w, node] -= num_blocks
        worker.num_evictable -= num_blocks
        if state.cached[w, node] == 0:
            unlink(lru, node)


# Transfers: `pdserve.planner.simulate.simulated_transfers`


@njit(**INLINED)
def carry(state, index, now_s):
    """Once blocks are reserved and the last chunk is written, the end of the pull is known."""
    request, cluster = state.requests[index], state.cluster[0]
    if isnan(request.pull_begun_s) or isnan(request.granted_s):
        return
    source, target = state.workers[request.prefill], state.workers[request.decode]
    if source.host == target.host:
        block_s = max(source.near_block_s, target.near_block_s)
    else:
        block_s = max(source.far_block_s, target.far_block_s)
    num_blocks = blocks_for(state, request.num_prompt) - request.num_pull_cached // cluster.block_size
    num_last = min(request.num_last_blocks, num_blocks)
    begins_s = max(request.pull_begun_s, now_s - (num_blocks - num_last) * block_s)
    sender, taker = state.workers[source.first_of_pipeline], state.workers[target.first_of_pipeline]
    ends_s = max(begins_s, sender.egress_free_at_s, taker.ingress_free_at_s) + num_blocks * block_s
    sender.egress_free_at_s = taker.ingress_free_at_s = ends_s
    push(state, ends_s + cluster.pull_s, PULL_ENDED, index)


@njit(**INLINED)
def push(state, at_s, kind, index):
    timers, cluster = state.timers, state.cluster[0]
    slot = cluster.num_timers
    cluster.num_timers += 1
    while slot > 0 and at_s < timers[(slot - 1) // 2].at_s:
        parent = (slot - 1) // 2
        set_timer(timers[slot], timers[parent].at_s, timers[parent].kind, timers[parent].request)
        slot = parent
    set_timer(timers[slot], at_s, kind, index)


@njit(**INLINED)
def pop(state):
    timers, cluster = state.timers, state.cluster[0]
    kind, index = timers[0].kind, timers[0].request
    cluster.num_timers -= 1
    size = cluster.num_timers
    at_s, slot = timers[size].at_s, 0
    while 2 * slot + 1 < size:
        child = 2 * slot + 1
        if child + 1 < size and timers[child + 1].at_s < timers[child].at_s:
            child += 1
        if at_s <= timers[child].at_s:
            break
        set_timer(timers[slot], timers[child].at_s, timers[child].kind, timers[child].request)
        slot = child
    set_timer(timers[slot], at_s, timers[size].kind, timers[size].request)
    return kind, index


@njit(**INLINED)
def set_timer(timer, at_s, kind, index):
    timer.at_s, timer.kind, timer.request = at_s, kind, index


@njit(**INLINED)
def turn(state, w, now_s):
    worker, cluster = state.workers[w], state.cluster[0]
    had_step = worker.num_in_flight > 0
    while worker.num_in_flight > 0 and worker.end_s <= now_s:
        complete(state, w, now_s)
    if had_step and worker.num_in_flight == 0:
        worker.free_at_s = now_s + cluster.turn_s
    for position in range(worker.num_messages):
        message = state.lists[w, INBOX, position]
        handle(state, w, message & 7, message >> 3, now_s)
    worker.num_messages = 0
    before_s = worker.free_at_s
    step_s, num_chunk_tokens = plan(state, w, now_s)
    if step_s > 0.0:
        worker.free_at_s = max(now_s, before_s) + step_s
        if worker.num_stages > 1:
            worker.free_at_s = enter_stage(state, worker, worker.free_at_s - step_s, step_s)
        if worker.num_in_flight == 0:
            worker.end_s, worker.chunk_tokens = worker.free_at_s, num_chunk_tokens
        else:
            worker.next_end_s, worker.next_chunk_tokens = worker.free_at_s, num_chunk_tokens
        worker.num_in_flight += 1
    if worker.num_in_flight == 0:
        state.turn_at_s[w] = inf
    elif step_s == 0.0 or worker.num_in_flight >= worker.depth:
        state.turn_at_s[w] = worker.end_s
    else:
        state.turn_at_s[w] = max(now_s, before_s)
    state.quiet_until_s[w] = state.turn_at_s[w]


@njit(**INLINED)
def coast(state, w, until_s):
    """Turns of `turn` in which the same sequences decode and nothing else happens, up to the next event at ``until_s``
    or the next turn of another worker that may cause one: they change only lengths."""
    worker, cluster = state.workers[w], state.cluster[0]
    if (
        worker.num_in_flight != worker.depth
        or worker.num_active == 0
        or worker.num_messages > 0
        or worker.num_ending > 0
        or worker.num_stages > 1
        or worker.chunk_tokens + worker.next_chunk_tokens > 0
        or worker.computed_head < worker.computed_tail
        or worker.waiting_head < worker.waiting_tail
        or worker.reserved_head < worker.reserved_tail
        or worker.num_admitted > 0
        or worker.num_swapped > 0
    ):
        return
    for other in range(len(state.quiet_until_s)):
        if other != w and state.quiet_until_s[other] < until_s:
            until_s = state.quiet_until_s[other]
    growth, ahead = state.lists[w, GROWTH], state.lists[w, AHEAD]
    num_rows, num_context = worker.num_active, worker.active_context
    step_s = sum_s(state, worker, num_rows, num_rows, decode_attention_s(worker, num_context + num_rows, num_rows))
    growth_s, num_linear = num_rows * worker.decode_token_s, worker.first_last_step - worker.num_steps
    if num_context + num_rows > num_rows * worker.window:
        growth_s *= 1 - worker.window_share
    else:
        num_linear = min(num_linear, worker.window - (num_context + num_rows - 1) // num_rows)
    step, last_step, num_free = worker.num_steps, worker.first_last_step, worker.num_free
    end_s, next_end_s = worker.end_s, worker.next_end_s
    slot = step % cluster.block_size
    linear_end = step + num_linear
    while end_s <= until_s and step < linear_end and growth[slot] - ahead[slot] <= num_free:
        num_free -= growth[slot] - ahead[slot]
        ahead[slot] = 0
        if worker.depth == 1:
            end_s += cluster.turn_s + step_s
        else:
            end_s, next_end_s = next_end_s, next_end_s + step_s
        step_s += growth_s
        step += 1
        slot = slot + 1 if slot + 1 < cluster.block_size else 0
    num_rows *= step - worker.num_steps
    worker.active_context += num_rows
    worker.num_decoded += num_rows
    worker.num_steps, worker.num_free = step, num_free
    evict(state, w)
    worker.end_s, worker.next_end_s = end_s, next_end_s
    worker.free_at_s = end_s if worker.depth == 1 else next_end_s
    state.turn_at_s[w] = end_s
    state.quiet_until_s[w] = end_s + (last_step - step) * step_s


@njit(**INLINED)
def enter_stage(state, worker, from_s, step_s):
    """`Stage.enter`; returns when the step ends."""
    first = state.workers[worker.first_of_pipeline]
    begins_s = max(from_s, first.stage_free_at_s)
    first.stage_free_at_s = begins_s + step_s / worker.num_stages
    return begins_s + step_s


@njit(**INLINED)
def handle(state, w, kind, index, now_s):
    worker, request = state.workers[w], state.requests[index]
    if kind == ADD:
        take_ticket(worker, request)
        request.num_known = request.num_prompt
        request.num_computed = 0
        worker.waiting_tokens += request.num_known
        state.lists[w, WAITING, worker.waiting_tail & (state.lists.shape[2] - 1)] = index
        worker.waiting_tail += 1
    elif kind == PREPARE:
        take_ticket(worker, request)
        state.lists[w, RESERVED, worker.reserved_tail & (state.lists.shape[2] - 1)] = index
        worker.reserved_tail += 1
    elif kind == PULLED:
        worker.num_pulling -= 1
        worker.pulling_context -= request.num_prompt
        worker.soon_blocks -= expected_blocks(state, request, request.num_prompt)
        if has_path(request):
            store(state, w, index, request.num_prompt)
        if request.num_output > 1:
            join(state, w, index, worker.num_steps, request.num_output - 1)
        else:
            worker.most_blocks -= final_blocks(state, request)
            worker.num_free += held_blocks(state, request, request.num_prompt) + request.num_ahead
            worker.refused_blocks = NEVER
            if has_path(request):
                release(state, w, index, request.num_shared, 0)
    elif kind == CANCEL:
        if isnan(request.pull_begun_s):
            drop_reservation(state, w, index)
    else:
        release_prompt(state, w, index)


@njit(**COMPILED)
def drop_reservation(state, w, index):
    worker, reserved, mask = state.workers[w], state.lists[w, RESERVED], state.lists.shape[2] - 1
    position = worker.reserved_head
    while reserved[position & mask] != index:
        position += 1
    for later in range(position + 1, worker.reserved_tail):
        reserved[(later - 1) & mask] = reserved[later & mask]
    worker.reserved_tail -= 1


@njit(**INLINED)
def take_ticket(worker, request):
    request.ticket = worker.num_tickets
    worker.num_tickets += 1


@njit(**INLINED)
def release_prompt(state, w, index):
    worker, request = state.workers[w], state.requests[index]
    num_blocks = blocks_for(state, request.num_prompt)
    worker.num_free += num_blocks - request.num_parked_shared
    worker.handoff_blocks -= num_blocks
    if has_path(request):
        release(state, w, index, request.num_parked_shared, 0)


@njit(**INLINED)
def complete(state, w, now_s):
    """The oldest step in flight has ended."""
    worker, cluster = state.workers[w], state.cluster[0]
    step = worker.num_steps - worker.num_in_flight
    worker.num_in_flight -= 1
    worker.end_s, worker.chunk_tokens, worker.next_chunk_tokens = worker.next_end_s, worker.next_chunk_tokens, 0
    seen_s = now_s + cluster.message_s + cluster.answer_s
    if len(state.paths) > 0:
        store_chunks(state, w, step)
    while worker.computed_head < worker.computed_tail:
        index = state.lists[w, COMPUTED, worker.computed_head & (state.lists.shape[2] - 1)]
        request = state.requests[index]
        if request.chunk_step != step:
            break
        worker.computed_head += 1
        if isnan(request.first_token_s):
            request.first_token_s = seen_s
        if worker.role == PREFILL:
            if request.num_output == 1:
                request.last_token_s = seen_s
                request.num_last_blocks = 0
                release_prompt(state, w, index)
                report(state, FINISHED, index, now_s)
            request.granted_s = now_s
            carry(state, index, now_s)
    if worker.num_ending > 0:
        end_sequences(state, w, step, seen_s, now_s)


@njit(**INLINED)
def end_sequences(state, w, step, seen_s, now_s):
    worker = state.workers[w]
    running, last_steps = state.lists[w, RUNNING], state.lists[w, LAST_STEP]
    slot = 0
    while slot < worker.num_running:
        if last_steps[slot] > step:
            slot += 1
            continue
        index = running[slot]
        request = state.requests[index]
        request.last_token_s = seen_s
        report(state, FINISHED, index, now_s)
        num_context = request.num_prompt + request.num_output - 1
        worker.ending_context -= num_context
        worker.num_ending -= 1
        worker.num_free += held_blocks(state, request, num_context) + request.num_ahead
        worker.most_blocks -= final_blocks(state, request)
        if has_path(request):
            release(state, w, index, request.num_shared, request.num_output - 1)
        worker.num_running -= 1
        running[slot] = running[worker.num_running]
        last_steps[slot] = last_steps[worker.num_running]
    worker.refused_blocks = NEVER


# `pdserve.engine.worker.scheduler` and its parts


@njit(**INLINED)
def blocks_for(state, num_tokens):
    block_size = state.cluster[0].block_size
    return (num_tokens + block_size - 1) // block_size


@njit(**INLINED)
def held_blocks(state, request, num_tokens):
    """Blocks of the request's own where it decodes, when ``num_tokens`` are written."""
    return blocks_for(state, num_tokens) - request.num_shared


@njit(**INLINED)
def hold_with_headroom(state, worker, request, num_tokens):
    """`Sequence.num_blocks_with_headroom`, taken for ``num_tokens`` known ones."""
    num_most = request.num_prompt + request.max_output - 1
    num_blocks = held_blocks(state, request, min(num_tokens + state.cluster[0].block_size, num_most))
    request.num_ahead = num_blocks - held_blocks(state, request, num_tokens)
    worker.num_free -= num_blocks


@njit(**INLINED)
def final_blocks(state, request):
    """Blocks that the sequence is expected to need when its last token is planned: the most ever."""
    return expected_blocks(state, request, request.num_prompt + request.num_output - 1)


@njit(**INLINED)
def expected_blocks(state, request, num_known):
    """`Sequence.num_blocks_expected`."""
    block_size = state.cluster[0].block_size
    num_tokens = num_known + max(LOOKAHEAD_TOKENS, block_size, num_known - request.num_prompt)
    return held_blocks(state, request, min(num_tokens, request.num_prompt + request.max_output - 1))


@njit(**INLINED)
def fits(state, w, num_expected, num_final):
    """Whether one more sequence fits, by `Scheduler._budget`. Sequences can only grow until one ends, so that what
    did not fit does not until then."""
    worker = state.workers[w]
    if worker.most_blocks + num_final <= worker.num_blocks:
        return True
    if num_expected >= worker.refused_blocks:
        return False
    spare = worker.num_blocks - worker.soon_blocks
    for slot in range(worker.num_running):
        request = state.requests[state.lists[w, RUNNING, slot]]
        num_left = state.lists[w, LAST_STEP, slot] - worker.num_steps + worker.depth
        num_known = request.num_prompt + request.num_output - num_left
        spare -= expected_blocks(state, request, max(num_known, request.num_prompt + 1))
    if num_expected <= spare:
        return True
    worker.refused_blocks = num_expected
    return False


@njit(**INLINED)
def join(state, w, index, first_step, num_rows):
    """The sequence decodes from ``first_step`` on."""
    worker, request = state.workers[w], state.requests[index]
    num_context = request.num_prompt + request.num_output - 1 - num_rows
    last_step = first_step + num_rows - 1
    state.lists[w, RUNNING, worker.num_running] = index
    state.lists[w, LAST_STEP, worker.num_running] = last_step
    worker.num_running += 1
    if num_rows == 0:
        worker.num_ending += 1
        worker.ending_context += num_context
        return
    worker.num_active += 1
    worker.active_context += num_context
    worker.first_last_step = min(worker.first_last_step, last_step)
    slot = (first_step - num_context) % state.cluster[0].block_size
    state.lists[w, GROWTH, slot] += 1
    state.lists[w, AHEAD, slot] += request.num_ahead
    request.first_step = first_step


@njit(**INLINED)
def leave(state, worker, w, request, last_step, next_step):
    """The sequence has no rows from ``next_step`` on; returns its context when its last row is written."""
    num_context, block_size = request.num_prompt + request.num_output - 1, state.cluster[0].block_size
    worker.num_active -= 1
    slot = (last_step + 1 - num_context) % block_size
    state.lists[w, GROWTH, slot] -= 1
    if request.first_step + (slot - request.first_step) % block_size < next_step:
        request.num_ahead = 0
    state.lists[w, AHEAD, slot] -= request.num_ahead
    return num_context


@njit(**INLINED)
def find_first_last_step(state, w, step):
    worker = state.workers[w]
    last_steps = state.lists[w, LAST_STEP]
    first = NEVER
    for slot in range(worker.num_running):
        if step <= last_steps[slot] < first:
            first = last_steps[slot]
    worker.first_last_step = first


@njit(**COMPILED)
def preempt_latest(state, w, step):
    """`Scheduler._preempt` the last arrival; returns the blocks to copy to the host."""
    worker = state.workers[w]
    running, last_steps = state.lists[w, RUNNING], state.lists[w, LAST_STEP]
    latest, slot_of_latest = -1, -1
    for slot in range(worker.num_running):
        if last_steps[slot] >= step and state.requests[running[slot]].ticket > latest:
            latest, slot_of_latest = state.requests[running[slot]].ticket, slot
    index, last_step = running[slot_of_latest], last_steps[slot_of_latest]
    request = state.requests[index]
    worker.num_running -= 1
    running[slot_of_latest] = running[worker.num_running]
    last_steps[slot_of_latest] = last_steps[worker.num_running]
    num_left = last_step - step + 1
    num_context = leave(state, worker, w, request, last_step, step) - num_left
    worker.active_context -= num_context
    worker.most_blocks -= final_blocks(state, request)
    worker.num_free += held_blocks(state, request, num_context) + request.num_ahead
    worker.num_preemptions += 1
    find_first_last_step(state, w, step)
    request.num_left = num_left
    num_blocks = blocks_for(state, num_context)
    copies_s = 2 * num_blocks * worker.swap_block_s
    if num_blocks <= worker.num_swap_slots and copies_s < prompt_s(state, worker, num_context, 0):
        worker.num_swap_slots -= num_blocks
        state.lists[w, SWAPPED, worker.num_swapped] = index
        worker.num_swapped += 1
        return num_blocks
    request.num_left -= 1  # the last chunk samples
    request.num_known = num_context + 1
    request.num_computed = 0
    request.is_preempted = 1
    worker.waiting_tokens += request.num_known
    worker.waiting_head -= 1
    state.lists[w, WAITING, worker.waiting_head & (state.lists.shape[2] - 1)] = index
    return 0


@njit(**COMPILED)
def resume_swapped(state, w, step):
    """`Swapping.resume` in order of arrival, each with a row in this step; returns the blocks to copy back, the number
    of rows, their context, and whether one is left that lacks room."""
    worker = state.workers[w]
    num_copied, num_rows, num_seen = 0, 0, 0
    while worker.num_swapped > 0:
        position = 0
        for other in range(1, worker.num_swapped):
            first = state.requests[state.lists[w, SWAPPED, position]]
            if state.requests[state.lists[w, SWAPPED, other]].ticket < first.ticket:
                position = other
        index = state.lists[w, SWAPPED, position]
        request = state.requests[index]
        num_context = request.num_prompt + request.num_output - 1 - request.num_left
        num_final = final_blocks(state, request)
        if num_places(worker) <= 0 or not fits(state, w, expected_blocks(state, request, num_context + 1), num_final):
            return num_copied, num_rows, num_seen, True
        worker.num_swapped -= 1
        state.lists[w, SWAPPED, position] = state.lists[w, SWAPPED, worker.num_swapped]
        hold_with_headroom(state, worker, request, num_context + 1)
        worker.most_blocks += num_final
        worker.num_decoded += 1
        num_rows += 1
        num_seen += num_context
        join(state, w, index, step + 1, request.num_left - 1)
        num_blocks = blocks_for(state, num_context)
        worker.num_swap_slots += num_blocks
        num_copied += num_blocks
    return num_copied, num_rows, num_seen, False


@njit(**INLINED)
def num_places(worker):
    return worker.max_batch_size - worker.num_running - worker.num_pulling - worker.num_admitted


@njit(**INLINED)
def plan(state, w, now_s):
    """Plan a step; returns its seconds, 0 for none, and the prompt tokens in it."""
    worker = state.workers[w]
    step = worker.num_steps
    num_rows, num_context, num_copied = 0, 0, 0
    may_admit = True
    if worker.role != PREFILL:
        block_size = state.cluster[0].block_size
        growth, ahead, slot = state.lists[w, GROWTH], state.lists[w, AHEAD], step % block_size
        while growth[slot] - ahead[slot] > worker.num_free and worker.num_active > 1:
            num_copied += preempt_latest(state, w, step)
        num_rows, num_context = worker.num_active, worker.active_context
        if num_rows > 0:
            worker.num_free -= growth[slot] - ahead[slot]
            ahead[slot] = 0
            worker.active_context += num_rows
            worker.num_decoded += num_rows
            if worker.first_last_step == step:
                for slot in range(worker.num_running):
                    if state.lists[w, LAST_STEP, slot] == step:
                        request = state.requests[state.lists[w, RUNNING, slot]]
                        num_final = leave(state, worker, w, request, step, step + 1)
                        worker.active_context -= num_final
                        worker.ending_context += num_final
                        worker.num_ending += 1
                find_first_last_step(state, w, step + 1)
        if worker.num_swapped > 0:
            num_resumed, num_more, num_seen, is_stuck = resume_swapped(state, w, step)
            num_copied += num_resumed
            num_rows += num_more
            num_context += num_seen
            may_admit = not is_stuck
        if worker.reserved_head < worker.reserved_tail:
            may_admit = may_admit and reserve(state, w, now_s)
    num_tokens, attention = num_rows, decode_attention_s(worker, num_context + num_rows, num_rows)
    num_chunk_tokens = 0
    if worker.num_admitted > 0 or worker.waiting_head < worker.waiting_tail:
        num_chunks, num_chunk_tokens, chunks_s = plan_chunks(state, w, num_rows, may_admit, now_s)
        num_rows += num_chunks
        num_tokens += num_chunk_tokens
        attention += chunks_s
    step_s = sum_s(state, worker, num_tokens, num_rows, attention) + num_copied * worker.swap_block_s
    if step_s > 0.0:
        worker.num_steps += 1
    evict(state, w)
    return step_s, num_chunk_tokens


@njit(**INLINED)
def reserve(state, w, now_s):
    """Reservations in order; returns whether prompts that wait here may start too."""
    worker = state.workers[w]
    mask = state.lists.shape[2] - 1
    while worker.reserved_head < worker.reserved_tail:
        index = state.lists[w, RESERVED, worker.reserved_head & mask]
        request = state.requests[index]
        local = -1
        if worker.waiting_head < worker.waiting_tail:
            local = state.lists[w, WAITING, worker.waiting_head & mask]
        is_local_ahead = local >= 0 and (
            state.requests[local].is_preempted == 1 or state.requests[local].ticket < request.ticket
        )
        is_hungry = worker.is_held_up == 1 or (local >= 0 and state.requests[local].is_preempted == 1)
        if is_local_ahead and is_hungry:
            return True
        if has_path(request):
            request.num_shared = num_held_by_others(state, w, index)
        num_expected = expected_blocks(state, request, request.num_prompt)
        num_final = final_blocks(state, request)
        if num_places(worker) <= 0 or not fits(state, w, num_expected, num_final):
            return local < 0 or is_local_ahead
        worker.reserved_head += 1
        worker.num_pulling += 1
        worker.pulling_context += request.num_prompt
        worker.soon_blocks += num_expected
        worker.most_blocks += num_final
        if has_path(request):
            request.num_pull_cached = match_prefix(state, w, index)
            hold(state, w, index)
        hold_with_headroom(state, worker, request, request.num_prompt)
        report(state, RESERVED_BLOCKS, index, now_s)
        request.pull_begun_s = now_s
        carry(state, index, now_s)
    return True


@njit(**INLINED)
def admit(state, w, index, may_admit, now_s):
    """`Prompts._try_admit` if there is room; returns whether there was."""
    worker, request = state.workers[w], state.requests[index]
    if worker.role == PREFILL:
        num_blocks = blocks_for(state, request.num_prompt)
        num_held = worker.handoff_blocks
        num_shared = num_held_by_others(state, w, index) if has_path(request) else 0
        if worker.num_admitted >= worker.max_batch_size or num_blocks - num_shared > worker.num_free:
            return False
        if num_held > 0 and 2 * (num_held + num_blocks) > worker.num_blocks:
            return False
        worker.handoff_blocks += num_blocks
        request.num_parked_shared = num_shared
        worker.num_free -= num_blocks - num_shared
    else:
        if request.is_preempted == 0 and has_path(request):
            request.num_shared = num_held_by_others(state, w, index)
        num_expected, num_final = expected_blocks(state, request, request.num_known), final_blocks(state, request)
        if not may_admit or num_places(worker) <= 0 or not fits(state, w, num_expected, num_final):
            return False
        hold_with_headroom(state, worker, request, request.num_known)
        worker.soon_blocks += num_expected
        worker.most_blocks += num_final
    if request.is_preempted == 0 and has_path(request):
        request.num_cached = match_prefix(state, w, index)
        hold(state, w, index)
    worker.waiting_head += 1
    worker.waiting_tokens -= request.num_known
    request.num_computed = request.num_cached
    worker.uncomputed_tokens += request.num_known - request.num_computed
    worker.admitted_context += request.num_computed
    worker.num_admitted += 1
    if request.is_preempted == 0:
        request.started_s = now_s + state.cluster[0].message_s
        report(state, STARTED, index, now_s)
    return True


@njit(**INLINED)
def plan_chunks(state, w, num_rows, may_admit, now_s):
    """Chunks in the rest of the token budget; returns their number, tokens and seconds of attention."""
    worker = state.workers[w]
    mask = state.lists.shape[2] - 1
    admitted = state.lists[w, ADMITTED]
    budget = worker.max_batch_tokens - num_rows
    num_chunks, num_tokens, seconds = 0, 0, 0.0
    worker.is_held_up = 0
    while budget > num_tokens:
        if worker.waiting_head < worker.waiting_tail and worker.is_held_up == 0:
            index = state.lists[w, WAITING, worker.waiting_head & mask]
            if num_chunks == worker.num_admitted or (
                state.requests[index].is_preempted == 1 and state.requests[admitted[num_chunks]].is_preempted == 0
            ):
                if admit(state, w, index, may_admit, now_s):
                    for slot in range(worker.num_admitted - 1, num_chunks, -1):
                        admitted[slot] = admitted[slot - 1]
                    admitted[num_chunks] = index
                else:
                    worker.is_held_up = 1
        if num_chunks == worker.num_admitted:
            break
        request = state.requests[admitted[num_chunks]]
        num_new = min(budget - num_tokens, request.num_known - request.num_computed)
        seconds += attention_s(state, worker, num_new, request.num_computed)
        num_granted = request.num_computed // state.cluster[0].block_size
        request.num_last_blocks = blocks_for(state, request.num_prompt) - num_granted
        request.chunk_step, request.num_before_chunk = worker.num_steps, request.num_computed
        request.num_computed += num_new
        worker.uncomputed_tokens -= num_new
        worker.admitted_context += num_new
        num_tokens += num_new
        num_chunks += 1
    hand_over(state, w, now_s)
    return num_chunks, num_tokens, seconds


@njit(**INLINED)
def hand_over(state, w, now_s):
    """Prompts whose last chunk is planned are offered, or decode here from the next step on."""
    worker = state.workers[w]
    mask = state.lists.shape[2] - 1
    admitted = state.lists[w, ADMITTED]
    num_kept = 0
    for slot in range(worker.num_admitted):
        index = admitted[slot]
        request = state.requests[index]
        if request.num_computed < request.num_known:
            admitted[num_kept] = index
            num_kept += 1
            continue
        worker.admitted_context -= request.num_known
        state.lists[w, COMPUTED, worker.computed_tail & mask] = index
        worker.computed_tail += 1
        if worker.role == PREFILL:
            report(state, LAST_CHUNK, index, now_s)
        else:
            num_left = request.num_left if request.is_preempted == 1 else request.num_output - 1
            worker.soon_blocks -= expected_blocks(state, request, request.num_known)
            worker.num_decoded += request.is_preempted
            request.is_preempted = 0
            join(state, w, index, worker.num_steps + 1, num_left)
    worker.num_admitted = num_kept


@njit(**INLINED)
def first_turn(turn_at_s):
    """The worker whose turn is next."""
    first = 0
    for w in range(1, len(turn_at_s)):
        if turn_at_s[w] < turn_at_s[first]:
            first = w
    return first


@njit(cache=True, **COMPILED)
def run(state):
    """Serve all requests."""
    cluster, requests, turn_at_s = state.cluster[0], state.requests, state.turn_at_s
    mask = len(state.messages) - 1
    num_arrived = num_placed = 0
    while True:
        at_s, event = inf, -1
        if num_arrived < cluster.num_first:
            at_s, event = requests[num_arrived].arrived_s, 4
        if num_placed < num_arrived and requests[num_placed].arrived_s + cluster.arrival_s < at_s:
            at_s, event = requests[num_placed].arrived_s + cluster.arrival_s, 3
        if cluster.message_head < cluster.message_tail and state.messages[cluster.message_head & mask].at_s < at_s:
            at_s, event = state.messages[cluster.message_head & mask].at_s, 2
        if cluster.num_timers > 0 and state.timers[0].at_s < at_s:
            at_s, event = state.timers[0].at_s, 1
        w = first_turn(turn_at_s)
        if turn_at_s[w] < at_s:
            turn_s = turn_at_s[w]
            coast(state, w, at_s)
            if turn_at_s[w] == turn_s:
                turn(state, w, turn_s)
            continue
        index = num_placed
        if event == 1:
            kind, index = pop(state)
            if kind == PULL_ENDED:
                tell(state, requests[index].decode, PULLED, index, at_s)
                if requests[index].num_output > 1:
                    tell(state, requests[index].prefill, RELEASED, index, at_s)
            elif kind == ARRIVED:
                requests[index].arrived_s = at_s
                arrive(state, index)
                push(state, at_s + cluster.arrival_s, ROUTED, index)
            else:
                event = 3
        elif event == 2:
            message = state.messages[cluster.message_head & mask]
            cluster.message_head += 1
            receive(state, message.kind, message.request, at_s)
        elif event == 3:
            num_placed += 1
        elif event == 4:
            arrive(state, num_arrived)
            num_arrived += 1
        else:
            return
        if event == 3 and requests[index].is_rejected == 0:
            place(state, index, at_s)
