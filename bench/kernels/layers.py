"""Cases of norm, gate, rotary write, quantised product, experts and sampling, against torch, cuBLAS and FlashInfer.

The work of each case is the formula in its kernel's docstring. The peer of a quantised product is torch (cuBLAS) with
the same weights in bfloat16, so that the ratio is the gain of smaller weights. Results of sampling stay on the device,
as in a captured step; peers with another random number generator cannot be compared.

Shape suffixes: T tokens, E features or inputs, F outputs, C = head dim / 2, M query and KV heads, D head dim, B rows, V
vocabulary, K experts of a token, P = T K, Y = number of experts + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf

import torch
from torch.nn.functional import linear, rms_norm, silu

from pdserve.bench.kernels.attention import BLOCK_SIZE, dtype_name, random_pool
from pdserve.bench.kernels.case import OWN, Case, Implementation, Make, Work, import_peer
from pdserve.contracts.precision import INT4_GROUP_INPUTS
from pdserve.kernels.kv_pool import KvPool
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import LAST_ID, DrawTensors, PackExperts, RopeAndWriteKv, Thresholds, TopPTensors
from pdserve.kernels.torch import attention as torch_attention
from pdserve.kernels.torch import experts as torch_experts
from pdserve.kernels.torch import sampling as torch_sampling
from pdserve.kernels.triton import rope as triton_rope
from pdserve.kernels.triton import sampling as triton_sampling
from pdserve.kernels.triton.experts import pack_experts, sort_pairs
from pdserve.kernels.triton.gate import gate
from pdserve.kernels.triton.norm import rms_normalise
from pdserve.kernels.triton.quantized_matmul import pack, quantized_matmul
from pdserve.kernels.weight_quantisation import dequantise, quantise

_BF16 = torch.bfloat16
_EPS = 1e-5
_TOLERANCE = 0.01
"""Peers round between operations; one step of bfloat16 is 0.4 or 0.8 %."""
_PRODUCT_TOLERANCE = 0.02
_PRODUCT_FLOPS_SHARE = 0.7
"""Share of the peak that large products reach."""


def norm_case(num_tokens: int, num_features: int = 4096, dtype: torch.dtype = _BF16) -> Case:
    """RMS norm."""

    def make(device: torch.device) -> Mapping[str, Make]:
        x_TE = torch.randn(num_tokens, num_features, device=device).to(dtype)
        weight_E = torch.rand(num_features, device=device).to(dtype)
        return {
            OWN: lambda: Implementation(partial(rms_normalise, x_TE, weight_E, _EPS)),
            "torch": lambda: Implementation(partial(rms_norm, x_TE, weight_E.shape, weight_E, _EPS)),
            "flashinfer": lambda: Implementation(partial(import_peer("flashinfer").norm.rmsnorm, x_TE, weight_E, _EPS)),
        }

    work = Work(2 * num_tokens * num_features * dtype.itemsize)
    return Case("rms_norm", f"{num_tokens} x {num_features}", work, make, _TOLERANCE)


def gate_case(num_tokens: int, num_gates: int = 14336, dtype: torch.dtype = _BF16) -> Case:
    """SiLU of one half of the features, times the other half."""

    def make(device: torch.device) -> Mapping[str, Make]:
        gate_up_TE = torch.randn(num_tokens, 2 * num_gates, device=device).to(dtype)

        def by_torch() -> torch.Tensor:
            left, right = gate_up_TE.chunk(2, dim=-1)
            return silu(left) * right

        return {
            OWN: lambda: Implementation(partial(gate, gate_up_TE, "silu")),
            "torch": lambda: Implementation(by_torch),
            "flashinfer": lambda: Implementation(
                partial(import_peer("flashinfer").activation.silu_and_mul, gate_up_TE)
            ),
        }

    work = Work(3 * num_tokens * num_gates * dtype.itemsize)
    return Case("gate", f"{num_tokens} x 2 x {num_gates}", work, make, _TOLERANCE)


def rope_case(
    num_tokens: int,
    *,
    is_prompt: bool,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = _BF16,
    kv_dtype: torch.dtype = _BF16,
) -> Case:
    """Queries and keys rotated, keys and values written, for one prompt or rows with a new token each."""

    def make(device: torch.device) -> Mapping[str, Make]:
        qkv_TMD = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
        angle_TC = torch.rand(num_tokens, head_dim // 2, device=device) * 6
        new = [num_tokens] if is_prompt else [1] * num_tokens
        needed = [-(-count // BLOCK_SIZE) for count in new]
        ids = iter(torch.randperm(sum(needed)).tolist())
        tables = [[next(ids) for _ in range(count)] for count in needed]
        metadata = AttentionMetadata.build(
            new, [0] * len(new), tables, num_blocks=sum(needed), block_size=BLOCK_SIZE
        ).to(device)

        def implementation(rotate_and_write: RopeAndWriteKv) -> Implementation:
            """On its own inputs and pool, because it rotates in place."""
            own_TMD = qkv_TMD.clone()
            kv_pool = random_pool((sum(needed), num_kv_heads, 1, 2, BLOCK_SIZE, head_dim), kv_dtype, device)
            kv_pool.blocks.zero_()

            def run() -> tuple[torch.Tensor, KvPool]:
                rotate_and_write(own_TMD, angle_TC.cos(), angle_TC.sin(), kv_pool, 0, metadata)
                return own_TMD, kv_pool

            return Implementation(run, _read_rotated)

        return {
            OWN: partial(implementation, triton_rope.rope_and_write_kv),
            "torch": partial(implementation, torch_attention.rope_and_write_kv),
        }

    written = 2 * num_kv_heads * kv_dtype.itemsize
    rotated = 2 * (num_heads + num_kv_heads) * dtype.itemsize
    rows = f"1 x {num_tokens}" if is_prompt else f"{num_tokens} x 1"
    shape = f"{num_heads}/{num_kv_heads} heads D{head_dim}, {rows}, KV {dtype_name(kv_dtype)}"
    return Case("rope_and_write_kv", shape, Work(num_tokens * head_dim * (rotated + written)), make, _TOLERANCE)


def _read_rotated(outcome: tuple[torch.Tensor, KvPool]) -> torch.Tensor:
    """Queries, keys and values, and the contents of the pool."""
    qkv_TMD, kv_pool = outcome
    values = kv_pool.values.float()
    if kv_pool.scales is not None:
        values *= kv_pool.scales[..., None]
    return torch.cat((qkv_TMD.float().flatten(), values.flatten()))


def product_case(weight: str, num_tokens: int, num_inputs: int, num_outputs: int, dtype: torch.dtype = _BF16) -> Case:
    """Product with an ``int8`` or ``int4`` weight."""

    def make(device: torch.device) -> Mapping[str, Make]:
        x_TE = torch.randn(num_tokens, num_inputs, device=device).to(dtype)
        quantised = quantise(torch.randn(num_outputs, num_inputs, device=device), weight)
        own = Implementation(partial(quantized_matmul, x_TE, pack(quantised)))
        return {
            OWN: lambda: own,
            "torch bf16": lambda: Implementation(partial(linear, x_TE, dequantise(quantised).to(dtype))),
        }

    flops = 2 * num_tokens * num_inputs * num_outputs
    work = Work(_weight_bytes(weight, num_inputs, num_outputs), flops, _PRODUCT_FLOPS_SHARE)
    shape = f"{weight} {num_inputs} -> {num_outputs}, {num_tokens} tokens"
    return Case("quantized_matmul", shape, work, make, _PRODUCT_TOLERANCE)


def experts_case(
    weight: str,
    num_tokens: int,
    *,
    num_experts: int = 128,
    per_token: int = 8,
    num_inputs: int = 2048,
    num_outputs: int = 1536,
) -> Case:
    """Product of a token's experts, drawn at random, with ``bf16``, ``int8`` or ``int4`` weights."""

    def make(device: torch.device) -> Mapping[str, Make]:
        floats = [torch.randn(num_outputs, num_inputs, device=device).to(_BF16) for _ in range(num_experts)]
        weights = floats if weight == "bf16" else [quantise(weight_FE, weight) for weight_FE in floats]
        drawn_TK = torch.rand(num_tokens, num_experts, device=device).argsort(dim=1)[:, :per_token]
        starts_Y = sort_pairs(drawn_TK, range(num_experts)).starts
        x_PE = torch.randn(num_tokens * per_token, num_inputs, device=device).to(_BF16)

        def implementation(pack: PackExperts) -> Implementation:
            return Implementation(partial(pack(weights, dtype=_BF16), x_PE, starts_Y))

        return {
            OWN: partial(implementation, pack_experts),
            "torch loop": partial(implementation, torch_experts.pack_experts),
        }

    num_read = num_experts * (1 - (1 - per_token / num_experts) ** num_tokens)
    flops = 2 * num_tokens * per_token * num_inputs * num_outputs
    work = Work(num_read * _weight_bytes(weight, num_inputs, num_outputs), flops, _PRODUCT_FLOPS_SHARE)
    shape = f"{weight} {num_inputs} -> {num_outputs}, {per_token} of {num_experts}, {num_tokens} tokens"
    return Case("experts", shape, work, make, _PRODUCT_TOLERANCE)


def _weight_bytes(weight: str, num_inputs: int, num_outputs: int) -> float:
    num_weights = num_inputs * num_outputs
    if weight == "bf16":
        return 2.0 * num_weights
    return (
        num_weights / 2 + 4 * num_weights / INT4_GROUP_INPUTS if weight == "int4" else num_weights + 4.0 * num_outputs
    )


def draw_case(num_rows: int, vocab_size: int = 128_256) -> Case:
    """One token per row, drawn from the whole vocabulary."""

    def make(device: torch.device) -> Mapping[str, Make]:
        logits_BV = 3 * torch.randn(num_rows, vocab_size, device=device)
        best_B = logits_BV.amax(dim=1)
        row_B = torch.arange(num_rows, dtype=torch.int32, device=device)
        draws = DrawTensors(
            row=row_B,
            seed=row_B.long() + 1,
            position=torch.full_like(row_B, 7),
            choice=torch.zeros_like(row_B),
            best=best_B,
            temperature=torch.ones_like(best_B),
            lowest=torch.full_like(best_B, -inf),
            last_equal=torch.full_like(row_B, LAST_ID),
        )
        return {
            OWN: lambda: Implementation(partial(triton_sampling.draw_tokens, logits_BV, draws)),
            "torch gumbel": lambda: Implementation(partial(torch_sampling.draw_tokens, logits_BV, draws)),
        }

    return Case("draw_tokens", f"{num_rows} x {vocab_size}", Work(4 * num_rows * vocab_size), make)


def top_p_case(num_rows: int, vocab_size: int = 128_256, top_p: float = 0.9) -> Case:
    """The lowest logit that top-p keeps in each row."""

    def make(device: torch.device) -> Mapping[str, Make]:
        logits_BV = 3 * torch.randn(num_rows, vocab_size, device=device)
        best_B = logits_BV.amax(dim=1)
        rows = TopPTensors(
            row=torch.arange(num_rows, dtype=torch.int32, device=device),
            top_p=torch.full_like(best_B, top_p, dtype=torch.float64),
            best=best_B,
            temperature=torch.ones_like(best_B),
            lowest=torch.full_like(best_B, -inf),
        )

        def by_sorting() -> torch.Tensor:
            """As most samplers do it."""
            sorted_BV = logits_BV.sort(dim=-1, descending=True).values
            ends_B1 = (sorted_BV.softmax(dim=-1).cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True)
            return sorted_BV.gather(1, ends_B1)[:, 0]

        return {
            OWN: lambda: Implementation(partial(triton_sampling.find_top_p, logits_BV, rows), _lowest),
            "sort": lambda: Implementation(by_sorting),
            "torch": lambda: Implementation(partial(torch_sampling.find_top_p, logits_BV, rows), _lowest),
        }

    # A sum in another order may end one token sooner or later, at the next logit.
    work = Work(2 * 4 * num_rows * vocab_size)
    return Case("find_top_p", f"{num_rows} x {vocab_size}, top-p {top_p}", work, make, tolerance=0.001)


def _lowest(thresholds: Thresholds) -> torch.Tensor:
    return thresholds.lowest
