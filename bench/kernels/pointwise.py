"""Benchmark cases of memory-bound kernels: norm, gate and rotary write, against torch and FlashInfer.

Cases of `pdserve.kernels.triton.norm`, `triton_gate` and `triton_rope`.

Shape suffixes: T tokens, E features, F = 2 I features, N query heads, H KV heads, M = N + 2 H, D head dim, C = D / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import rms_norm, silu

from pdserve.bench.kernels.contest import Contender, Contest, Work, import_peer
from pdserve.kernels.kv_pool import KvPool, vector_bytes
from pdserve.kernels.metadata import AttentionMetadata
from pdserve.kernels.operations import RopeAndWriteKv
from pdserve.kernels.torch import attention as torch_attention
from pdserve.kernels.triton import rope as triton_rope
from pdserve.kernels.triton.configs import dtype_name
from pdserve.kernels.triton.gate import gate
from pdserve.kernels.triton.norm import rms_normalise

_EPS = 1e-5
_BLOCK_SIZE = 16
_TOLERANCE = 0.01
"""Peers round what they compute in between; one step of bfloat16 is 0.4 or 0.8 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormCase:
    """The RMS norm of some tokens."""

    num_tokens: int
    num_features: int = 4096
    dtype: torch.dtype = torch.bfloat16

    @property
    def kernel(self) -> str:
        return "rms_norm"

    @property
    def shape(self) -> str:
        return f"{self.num_tokens} x {self.num_features}"

    @property
    def work(self) -> Work:
        return Work(2 * self.num_tokens * self.num_features * self.dtype.itemsize)

    def contest(self, device: torch.device) -> Contest:
        x_TE = torch.randn(self.num_tokens, self.num_features, device=device).to(self.dtype)
        weight_E = torch.rand(self.num_features, device=device).to(self.dtype)

        def flashinfer() -> Contender:
            return Contender(partial(import_peer("flashinfer").norm.rmsnorm, x_TE, weight_E, _EPS))

        peers = {
            "torch": lambda: Contender(partial(rms_norm, x_TE, weight_E.shape, weight_E, _EPS)),
            "flashinfer": flashinfer,
        }
        return Contest(Contender(partial(rms_normalise, x_TE, weight_E, _EPS)), peers, _TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCase:
    """SiLU of one half of the features times the other half."""

    num_tokens: int
    num_gates: int = 14336
    dtype: torch.dtype = torch.bfloat16

    @property
    def kernel(self) -> str:
        return "gate"

    @property
    def shape(self) -> str:
        return f"{self.num_tokens} x 2 x {self.num_gates}"

    @property
    def work(self) -> Work:
        return Work(3 * self.num_tokens * self.num_gates * self.dtype.itemsize)

    def contest(self, device: torch.device) -> Contest:
        gate_up_TF = torch.randn(self.num_tokens, 2 * self.num_gates, device=device).to(self.dtype)

        def by_torch() -> torch.Tensor:
            gate_TI, up_TI = gate_up_TF.chunk(2, dim=-1)
            return silu(gate_TI) * up_TI

        def flashinfer() -> Contender:
            return Contender(partial(import_peer("flashinfer").activation.silu_and_mul, gate_up_TF))

        peers = {"torch": lambda: Contender(by_torch), "flashinfer": flashinfer}
        return Contest(Contender(partial(gate, gate_up_TF, "silu")), peers, _TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeCase:
    """Queries and keys rotated, keys and values written: of one prompt, or of rows with a new token each."""

    num_tokens: int
    is_prompt: bool
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def kernel(self) -> str:
        return "rope_and_write_kv"

    @property
    def shape(self) -> str:
        rows = f"1 x {self.num_tokens}" if self.is_prompt else f"{self.num_tokens} x 1"
        return f"{self.num_heads}/{self.num_kv_heads} heads D{self.head_dim}, {rows}, KV {dtype_name(self.kv_dtype)}"

    @property
    def work(self) -> Work:
        written = 2 * self.num_kv_heads * self.kv_dtype.itemsize
        rotated = 2 * (self.num_heads + self.num_kv_heads) * self.dtype.itemsize
        return Work(self.num_tokens * self.head_dim * (rotated + written))

    def contest(self, device: torch.device) -> Contest:
        num_all_heads = self.num_heads + 2 * self.num_kv_heads
        qkv_TMD = torch.randn(self.num_tokens, num_all_heads, self.head_dim, device=device).to(self.dtype)
        angle_TC = torch.rand(self.num_tokens, self.head_dim // 2, device=device) * 6
        new = [self.num_tokens] if self.is_prompt else [1] * self.num_tokens
        needed = [-(-count // _BLOCK_SIZE) for count in new]
        ids = iter(torch.randperm(sum(needed)).tolist())
        tables = [[next(ids) for _ in range(count)] for count in needed]
        metadata = AttentionMetadata.build(
            new, [0] * len(new), tables, num_blocks=sum(needed), block_size=_BLOCK_SIZE
        ).to(device)

        def contender(rotate_and_write: RopeAndWriteKv) -> Contender:
            """Works on inputs and a pool of its own: what is rotated is rotated in place."""
            own_TMD, kv_pool = qkv_TMD.clone(), self._pool(sum(needed), device)

            def run() -> tuple[torch.Tensor, KvPool]:
                rotate_and_write(own_TMD, angle_TC.cos(), angle_TC.sin(), kv_pool, 0, metadata)
                return own_TMD, kv_pool

            return Contender(run, _read_rotated)

        peers = {"torch": lambda: contender(torch_attention.rope_and_write_kv)}
        return Contest(contender(triton_rope.rope_and_write_kv), peers, _TOLERANCE)

    def _pool(self, num_blocks: int, device: torch.device) -> KvPool:
        shape = (num_blocks, self.num_kv_heads, 1, 2, _BLOCK_SIZE, self.head_dim)
        num_bytes = num_blocks * self.num_kv_heads * 2 * _BLOCK_SIZE * vector_bytes(self.head_dim, self.kv_dtype)
        return KvPool(torch.zeros(num_bytes, dtype=torch.uint8, device=device), shape, self.kv_dtype)


def _read_rotated(outcome: tuple[torch.Tensor, KvPool]) -> torch.Tensor:
    """What is left of the inputs, and all that the pool holds."""
    qkv_TMD, kv_pool = outcome
    values = kv_pool.values.float()
    if kv_pool.scales is not None:
        values *= kv_pool.scales[..., None]
    return torch.cat((qkv_TMD.float().flatten(), values.flatten()))
