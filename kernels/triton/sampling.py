"""GPU draws and top-p as `pdserve.kernels.torch.sampling` defines them, in few passes and without copying the logits.

Chosen by `pdserve.kernels.selection`. A draw is one pass: each program finds the best score of a vocabulary tile, and
one more program the best of those. Top-p takes two passes: tokens too light to matter, even if all tokens weighed as
little, are dropped; the rest are packed in order of id, and one program per row bisects for the logit and the id that
end the prefix. Nothing is sorted.

Target: ``bytes / (0.9 bandwidth)`` with ``bytes = 4 D V`` for draws and ``8 R V`` for top-p.

Shape suffixes: B rows of logits, V vocabulary or a tile of it, D draws, R rows with top-p, N tiles, G = V / 4 counters
of Philox.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pdserve.kernels.operations import LAST_ID, DrawTensors, Thresholds, TopPTensors
from pdserve.kernels.torch.sampling import NOISE_RANGE, TOKEN_STREAM

_DRAW_WORDS = tl.constexpr(9)
_TOP_P_WORDS = tl.constexpr(7)
"""32-bit words of a row: the fields of `DrawTensors`; the fields of `TopPTensors` and the least weight."""

_TILE = 1024
_STREAM = tl.constexpr(TOKEN_STREAM)
_NOISE_RANGE = tl.constexpr(NOISE_RANGE)
_LAST_ID = tl.constexpr(LAST_ID)


def draw_tokens(logits_BV: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """See `pdserve.kernels.operations.DrawTokens`: int32 ``[D]``."""
    _check(logits_BV)
    draws_DW = _columns(*draws)
    num_draws, vocab_size = len(draws_DW), logits_BV.shape[1]
    num_tiles = triton.cdiv(vocab_size, _TILE)
    score_DN = logits_BV.new_empty((num_draws, num_tiles), dtype=torch.float64)
    token_DN = logits_BV.new_empty((num_draws, num_tiles), dtype=torch.int32)
    token_D = logits_BV.new_empty(num_draws, dtype=torch.int32)
    _score_kernel[num_draws, num_tiles](
        logits_BV, draws_DW, score_DN, token_DN, logits_BV.stride(0), VOCAB_SIZE=vocab_size, TILE=_TILE, num_warps=4
    )
    _best_kernel[num_draws,](
        score_DN, token_DN, token_D, NUM_TILES=num_tiles, PADDED=triton.next_power_of_2(num_tiles), num_warps=1
    )
    return token_D


def find_top_p(logits_BV: torch.Tensor, rows: TopPTensors) -> Thresholds:
    """See `pdserve.kernels.operations.FindTopP`."""
    _check(logits_BV)
    # The best token weighs 1, so all tokens under this weight together weigh less than top-p may leave out.
    least_weight_R = ((1 - rows.top_p) * (0.5 / logits_BV.shape[1])).float()
    rows_RW = _columns(*rows, least_weight_R)
    num_rows, vocab_size = len(rows_RW), logits_BV.shape[1]
    num_tiles = triton.cdiv(vocab_size, _TILE)
    sum_RN = logits_BV.new_empty((num_rows, num_tiles), dtype=torch.float64)
    count_RN = logits_BV.new_empty((num_rows, num_tiles), dtype=torch.int32)
    logit_RV = logits_BV.new_empty((num_rows, vocab_size))
    weight_RV = torch.empty_like(logit_RV)
    token_RV = torch.empty_like(logit_RV, dtype=torch.int32)
    found_R2 = logits_BV.new_empty((num_rows, 2), dtype=torch.int32)
    padded = triton.next_power_of_2(num_tiles)
    grid = num_rows, num_tiles
    _weigh_kernel[grid](
        logits_BV, rows_RW, sum_RN, count_RN, logits_BV.stride(0), VOCAB_SIZE=vocab_size, TILE=_TILE, num_warps=4
    )
    _pack_kernel[grid](
        logits_BV, rows_RW, count_RN, logit_RV, weight_RV, token_RV, logits_BV.stride(0),
        VOCAB_SIZE=vocab_size, NUM_TILES=num_tiles, PADDED=padded, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    _end_kernel[num_rows,](
        rows_RW, sum_RN, count_RN, logit_RV, weight_RV, token_RV, found_R2,
        VOCAB_SIZE=vocab_size, NUM_TILES=num_tiles, PADDED=padded, TILE=_TILE, num_warps=4,
    )  # fmt: skip
    return Thresholds(found_R2.view(torch.float32)[:, 0], found_R2[:, 1])


def _check(logits_BV: torch.Tensor) -> None:
    assert logits_BV.dtype == torch.float32
    assert logits_BV.stride(1) == 1
    assert logits_BV.shape[1] < 2**31


def _columns(*fields: torch.Tensor) -> torch.Tensor:
    """Pack the fields of N draws or rows into 32-bit words: int32 ``[N, words]``."""
    return torch.cat([field[:, None].view(torch.int32) for field in fields], dim=1)


@triton.jit
def _float(pointer: tl.tensor):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def _score_kernel(
    logits_ptr: tl.tensor,
    draws_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid ``(D, N)``. Pointers: logits ``[B, V]`` of row stride ``row_stride``; draws ``[D, 9]``; score
    ``[D, N]``, float64, and token ``[D, N]``, int32: the best of each tile, -inf where none can win."""
    draw = tl.program_id(0)
    draws_ptr += draw * _DRAW_WORDS
    place = draw * tl.num_programs(1) + tl.program_id(1)
    best, temperature, lowest = _float(draws_ptr + 5), _float(draws_ptr + 6), _float(draws_ptr + 7)
    last_equal = tl.load(draws_ptr + 8)
    token_V = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row_ptr = logits_ptr + tl.load(draws_ptr).to(tl.int64) * row_stride
    logit_V = tl.load(row_ptr + token_V, mask=token_V < VOCAB_SIZE, other=float("-inf"))
    is_kept_V = (logit_V > lowest) | ((logit_V == lowest) & (token_V <= last_equal))
    scaled_V = tl.div_rn(logit_V - best, tl.zeros_like(logit_V) + temperature)
    scaled_V = tl.where(is_kept_V, scaled_V, float("-inf"))
    if tl.max(scaled_V, 0) < -_NOISE_RANGE:
        tl.store(score_ptr + place, float("-inf"))
        return
    # Counters: (position, choice, stream, token / 4), and the seed is the key.
    group_G = tl.program_id(1) * (TILE // 4) + tl.arange(0, TILE // 4)
    zero_G = tl.zeros_like(group_G)
    word_0, word_1, word_2, word_3 = tl.philox_impl(
        (zero_G + tl.load(draws_ptr + 3)).to(tl.uint32, bitcast=True),
        (zero_G + tl.load(draws_ptr + 4)).to(tl.uint32, bitcast=True),
        (zero_G + _STREAM).to(tl.uint32, bitcast=True),
        group_G.to(tl.uint32, bitcast=True),
        (zero_G + tl.load(draws_ptr + 1)).to(tl.uint32, bitcast=True),
        (zero_G + tl.load(draws_ptr + 2)).to(tl.uint32, bitcast=True),
    )
    word_V = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
    uniform_V = (word_V.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    score_V = scaled_V.to(tl.float64) - tl.log(-tl.log(uniform_V))
    score = tl.max(score_V, 0)
    tl.store(score_ptr + place, score)
    tl.store(token_ptr + place, tl.min(tl.where(score_V == score, token_V, _LAST_ID), 0))


@triton.jit
def _best_kernel(
    score_ptr: tl.tensor, token_ptr: tl.tensor, best_ptr: tl.tensor, NUM_TILES: tl.constexpr, PADDED: tl.constexpr
):
    """Grid ``(D,)``. Pointers: as `_score_kernel`; best ``[D]``, int32. Of equals the token of the lowest id."""
    tile_N = tl.arange(0, PADDED)
    is_tile_N = tile_N < NUM_TILES
    place_N = tl.program_id(0) * NUM_TILES + tile_N
    score_N = tl.load(score_ptr + place_N, mask=is_tile_N, other=float("-inf"))
    is_best_N = is_tile_N & (score_N == tl.max(score_N, 0))
    token_N = tl.load(token_ptr + place_N, mask=is_best_N, other=_LAST_ID)
    tl.store(best_ptr + tl.program_id(0), tl.min(token_N, 0))


@triton.jit
def _tile_of_weights(
    logits_ptr: tl.tensor, rows_ptr: tl.tensor, row_stride: tl.tensor, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Ids and logits of this program's tile; their weights, of the best token 1; which may be kept by top-p."""
    token_V = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_token_V = token_V < VOCAB_SIZE
    row_ptr = logits_ptr + tl.load(rows_ptr).to(tl.int64) * row_stride
    logit_V = tl.load(row_ptr + token_V, mask=is_token_V, other=float("-inf"))
    best, temperature, lowest = _float(rows_ptr + 3), _float(rows_ptr + 4), _float(rows_ptr + 5)
    scaled_V = tl.div_rn(logit_V - best, tl.zeros_like(logit_V) + temperature)
    weight_V = tl.where(is_token_V & (logit_V >= lowest), tl.exp(scaled_V), 0.0)
    is_candidate_V = (weight_V > 0.0) & (weight_V >= _float(rows_ptr + 6))
    return token_V, logit_V, weight_V, is_candidate_V


@triton.jit
def _weigh_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    count_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid ``(R, N)``. Pointers: logits ``[B, V]`` of row stride ``row_stride``; rows ``[R, 7]``; sum
    ``[R, N]``, float64, of all weights of a tile; count ``[R, N]``, int32, of its candidates."""
    rows_ptr += tl.program_id(0) * _TOP_P_WORDS
    _, _, weight_V, is_candidate_V = _tile_of_weights(logits_ptr, rows_ptr, row_stride, VOCAB_SIZE, TILE)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sum_ptr + place, tl.sum(weight_V.to(tl.float64), 0))
    tl.store(count_ptr + place, tl.sum(is_candidate_V.to(tl.int32), 0))


@triton.jit
def _pack_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    count_ptr: tl.tensor,
    logit_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    token_ptr: tl.tensor,
    row_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid ``(R, N)``. Pointers: as `_weigh_kernel`; logit, weight and token ``[R, V]``: the candidates, by id."""
    row = tl.program_id(0)
    rows_ptr += row * _TOP_P_WORDS
    token_V, logit_V, weight_V, is_candidate_V = _tile_of_weights(logits_ptr, rows_ptr, row_stride, VOCAB_SIZE, TILE)
    tile_N = tl.arange(0, PADDED)
    count_N = tl.load(count_ptr + row * NUM_TILES + tile_N, mask=tile_N < tl.program_id(1), other=0)
    place_V = tl.sum(count_N, 0) + tl.cumsum(is_candidate_V.to(tl.int32), 0) - 1
    offset_V = row.to(tl.int64) * VOCAB_SIZE + place_V
    tl.store(logit_ptr + offset_V, logit_V, mask=is_candidate_V)
    tl.store(weight_ptr + offset_V, weight_V, mask=is_candidate_V)
    tl.store(token_ptr + offset_V, token_V, mask=is_candidate_V)


@triton.jit
def _end_kernel(
    rows_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    count_ptr: tl.tensor,
    logit_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    token_ptr: tl.tensor,
    found_ptr: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid ``(R,)``. Pointers: as `_pack_kernel`; found ``[R, 2]``, int32: the bits of the lowest logit, and
    the last id that equals it."""
    row = tl.program_id(0)
    rows_ptr += row * _TOP_P_WORDS
    first_place = row.to(tl.int64) * VOCAB_SIZE
    logit_ptr += first_place
    weight_ptr += first_place
    token_ptr += first_place
    tile_N = tl.arange(0, PADDED)
    is_tile_N = tile_N < NUM_TILES
    num_candidates = tl.sum(tl.load(count_ptr + row * NUM_TILES + tile_N, mask=is_tile_N, other=0), 0)
    total = tl.sum(tl.load(sum_ptr + row * NUM_TILES + tile_N, mask=is_tile_N, other=0.0), 0)
    low_bits = tl.load(rows_ptr + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    high_bits = tl.load(rows_ptr + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    wanted = total * (low_bits | (high_bits << 32)).to(tl.float64, bitcast=True)

    last_id = tl.full([], _LAST_ID, tl.int32)
    # The highest order whose tokens, with all above, weigh enough; where rounding lets none do so, the lowest.
    order, highest = _lowest_order(logit_ptr, num_candidates, TILE), _order(_float(rows_ptr + 3))
    while order < highest:
        middle = (order + highest + 1) >> 1
        if _weight_up_to(middle, last_id, logit_ptr, weight_ptr, token_ptr, num_candidates, TILE) >= wanted:
            order = middle
        else:
            highest = middle - 1

    # Of the tokens of this logit, those up to the lowest id that is enough; most often there is but one.
    last_equal = _last_of_order(order, logit_ptr, token_ptr, num_candidates, TILE)
    if _weight_up_to(order, last_equal - 1, logit_ptr, weight_ptr, token_ptr, num_candidates, TILE) < wanted:
        last_equal = last_id
    else:
        first = tl.zeros_like(last_equal)
        while first < last_equal:
            middle_id = (first + last_equal) // 2
            if _weight_up_to(order, middle_id, logit_ptr, weight_ptr, token_ptr, num_candidates, TILE) >= wanted:
                last_equal = middle_id
            else:
                first = middle_id + 1
    bits = tl.where(order >= 0, order, order ^ 0x7FFFFFFF).to(tl.int32)
    tl.store(found_ptr + row * 2, bits)
    tl.store(found_ptr + row * 2 + 1, last_equal)


@triton.jit
def _order(logit: tl.tensor):
    """int64, ordered as the numbers are; both zeros are one."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _candidates(logit_ptr: tl.tensor, start: tl.tensor, num_candidates: tl.tensor, TILE: tl.constexpr):
    """A tile of them: places, which of those there are, logits."""
    place_V = start + tl.arange(0, TILE)
    is_one_V = place_V < num_candidates
    return place_V, is_one_V, tl.load(logit_ptr + place_V, mask=is_one_V, other=float("-inf"))


@triton.jit
def _lowest_order(logit_ptr: tl.tensor, num_candidates: tl.tensor, TILE: tl.constexpr):
    lowest = tl.full([], float("inf"), tl.float32)
    for start in tl.range(0, num_candidates, TILE):
        _, is_one_V, logit_V = _candidates(logit_ptr, start, num_candidates, TILE)
        lowest = tl.minimum(lowest, tl.min(tl.where(is_one_V, logit_V, float("inf")), 0))
    return _order(lowest)


@triton.jit
def _last_of_order(
    order: tl.tensor, logit_ptr: tl.tensor, token_ptr: tl.tensor, num_candidates: tl.tensor, TILE: tl.constexpr
):
    """The highest id of the tokens of this order."""
    last = tl.zeros([], tl.int32)
    for start in tl.range(0, num_candidates, TILE):
        place_V, is_one_V, logit_V = _candidates(logit_ptr, start, num_candidates, TILE)
        is_equal_V = is_one_V & (_order(logit_V) == order)
        last = tl.maximum(last, tl.max(tl.load(token_ptr + place_V, mask=is_equal_V, other=0), 0))
    return last


@triton.jit
def _weight_up_to(
    order: tl.tensor,
    last_id: tl.tensor,
    logit_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    token_ptr: tl.tensor,
    num_candidates: tl.tensor,
    TILE: tl.constexpr,
):
    """Weight of all tokens above an order, and of its own tokens up to an id: float64."""
    total = tl.zeros([], tl.float64)
    for start in tl.range(0, num_candidates, TILE):
        place_V, is_one_V, logit_V = _candidates(logit_ptr, start, num_candidates, TILE)
        order_V = _order(logit_V)
        token_V = tl.load(token_ptr + place_V, mask=is_one_V, other=0)
        is_kept_V = is_one_V & ((order_V > order) | ((order_V == order) & (token_V <= last_id)))
        total += tl.sum(tl.load(weight_ptr + place_V, mask=is_kept_V, other=0).to(tl.float64), 0)
    return total
