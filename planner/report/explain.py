"""The cost model's formulas with a model's and a device's numbers filled in, to explain a prediction.

`explain` returns plain lines; `pdserve plan --explain` prints them. Each line shows the arithmetic behind its result,
so that readers can check it. Results come from `pdserve.model.cost.cost_model`, which cites the formulas' sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdserve.contracts.kv_layout import DTYPE_BYTES, kv_vector_bytes
from pdserve.model.cost.cost_model import CostModel, StepParts, num_experts_touched
from pdserve.model.weights.bytes import weight_bytes
from pdserve.planner.layout import PlannedModel, Pool

MEMORY_FRACTION = 0.9
"""Share of a device's memory that `CostModel.max_kv_blocks` uses."""


class Explanation(NamedTuple):
    """One line of the explanation."""

    name: str
    formula: str
    """The formula in words."""
    numbers: str
    """The formula with numbers; evaluating it in Python gives ``result``, up to rounding."""
    result: float
    unit: str


def explain(
    model: PlannedModel,
    pool: Pool,
    *,
    prompt_tokens: int = 1024,
    context_tokens: int = 1024,
    batch_size: int = 32,
) -> list[Explanation]:
    """Derive the memory and the times of one worker of ``pool``.

    Args:
        prompt_tokens: length of a prompt that is prefilled in one step, and whose KV is transferred.
        context_tokens: context of each decoding sequence.
        batch_size: sequences that decode together.

    Raises:
        ValueError: the model does not divide by the pool's degrees, or the hardware has no figure for its dtype.
    """
    numbers = _Numbers(model, pool, pool.cost(model))
    return [
        *numbers.weights(),
        *numbers.memory(context_tokens),
        numbers.ridge(),
        *numbers.experts(batch_size),
        *numbers.step("prefill", [(prompt_tokens, 0)], f"a prompt of {prompt_tokens} tokens"),
        *numbers.step(
            "decode", [(1, context_tokens)] * batch_size, f"{batch_size} sequences of {context_tokens} tokens"
        ),
        numbers.transfer(prompt_tokens, same_host=True),
        numbers.transfer(prompt_tokens, same_host=False),
        *numbers.price(),
    ]


class _Numbers:
    """Produces the lines for one model on one pool."""

    def __init__(self, model: PlannedModel, pool: Pool, cost: CostModel) -> None:
        self._model, self._pool, self._cost = model, pool, cost
        self._shape, self._hardware = model.shape, pool.hardware
        self._weights = weight_bytes(model.shape, model.precision.dtype, model.precision.quantization)
        self._value_bytes = DTYPE_BYTES[model.precision.dtype]
        self._bytes_each = self._weights.layers / (model.shape.num_layers * model.shape.layer_parameters)
        self._memory = cost.rank_memory(
            MEMORY_FRACTION, max_batch_tokens=pool.max_batch_tokens, max_batch_size=pool.max_batch_size
        )

    def weights(self) -> Iterator[Explanation]:
        shape = self._shape
        final_norm = shape.num_parameters - shape.num_layers * (shape.layer_parameters + shape.layer_vector_parameters)
        num_tables = 1 if shape.tie_word_embeddings else 2
        final_norm -= num_tables * shape.table_parameters
        yield Explanation(
            "parameters",
            "layers * (matrices + norms and biases) + tables * vocabulary * width + final norm and positions",
            f"{shape.num_layers} * ({shape.layer_parameters} + {shape.layer_vector_parameters})"
            f" + {num_tables} * {shape.vocab_size} * {shape.hidden_size} + {final_norm}",
            shape.num_parameters,
            "",
        )
        num_others = shape.num_parameters - shape.num_layers * shape.layer_parameters
        yield Explanation(
            "weights",
            "layers * matrices * bytes each + other parameters * bytes each",
            f"{shape.num_layers} * {shape.layer_parameters} * {_short(self._bytes_each)}"
            f" + {num_others} * {self._value_bytes}",
            self._weights.total,
            "bytes",
        )
        vector_bytes = kv_vector_bytes(shape.head_dim, self._cost.kv_dtype)
        yield Explanation(
            "KV of a token",
            "K and V * layers * KV heads * bytes of a vector",
            f"2 * {shape.num_layers} * {shape.num_kv_heads} * {vector_bytes}",
            self._cost.kv_bytes_per_token,
            "bytes",
        )

    def memory(self, context_tokens: int) -> Iterator[Explanation]:
        memory, cost, block_size = self._memory, self._cost, self._model.block_size
        ranks, stages = self._pool.tensor_parallel, self._pool.pipeline_parallel
        yield Explanation(
            "memory of the fullest rank",
            "weights of its share + activations of the largest step + reserve",
            f"{_short(memory.weight_bytes)} + {_short(memory.activation_bytes)} + {memory.reserve_bytes}",
            memory.weight_bytes + memory.activation_bytes + memory.reserve_bytes,
            "bytes",
        )
        yield Explanation(
            "KV of the fullest rank",
            "memory * share that is used - what else it holds",
            f"max(0, {self._hardware.memory_bytes} * {MEMORY_FRACTION} - {_short(memory.weight_bytes)}"
            f" - {_short(memory.activation_bytes)} - {memory.reserve_bytes})",
            memory.kv_bytes,
            "bytes",
        )
        num_holders = min(ranks, self._shape.num_kv_heads)
        num_tokens = memory.kv_bytes / cost.rank_kv_bytes_per_token
        yield Explanation(
            "tokens of KV",
            "KV of the fullest rank / (KV of a token / ranks that share heads / stages)",
            f"{_short(memory.kv_bytes)} / ({cost.kv_bytes_per_token} / {num_holders} / {stages})",
            num_tokens,
            "tokens",
        )
        num_blocks = self._pool.kv_blocks(self._model, cost)
        blocks_each = -(-context_tokens // block_size)
        yield Explanation(
            f"largest batch at {context_tokens} tokens",
            "the lesser of blocks of KV // blocks of a sequence, and the limit of the batch",
            f"min({num_blocks} // {blocks_each}, {self._pool.max_batch_size})",
            min(num_blocks // blocks_each, self._pool.max_batch_size),
            "sequences",
        )

    def ridge(self) -> Explanation:
        """Tokens per step above which arithmetic takes longer than reading the weights."""
        hardware = self._hardware
        peak = hardware.peak(self._model.precision.dtype)
        tokens = 1.0
        for _ in range(100):  # converges, because the share grows slower than the tokens
            share = hardware.compute_efficiency.at(tokens)
            tokens = self._bytes_each * peak * share / (2 * hardware.bandwidth)
        return Explanation(
            "ridge point",
            "bytes of a weight * peak * share of it / (2 * bandwidth * share of it)",
            f"{_short(self._bytes_each)} * {_short(peak)} * {_short(share)}"
            f" / (2 * {_short(hardware.memory_bandwidth)} * {_short(hardware.memory_efficiency)})",
            tokens,
            "tokens",
        )

    def experts(self, batch_size: int) -> Iterator[Explanation]:
        shape = self._shape
        if shape.num_experts:
            yield Explanation(
                f"experts that {batch_size} tokens touch",
                "experts * (1 - (1 - experts per token / experts) ** tokens)",
                f"{shape.num_experts} * (1 - (1 - {shape.experts_per_token} / {shape.num_experts}) ** {batch_size})",
                num_experts_touched(batch_size, shape.num_experts, shape.experts_per_token),
                "experts",
            )

    def step(self, phase: str, rows: list[tuple[int, int]], what: str) -> Iterator[Explanation]:
        """The parts of one step, then the step."""
        parts = self._cost.parts(rows)
        num_tokens = sum(num_new for num_new, _ in rows)
        yield Explanation(
            f"{phase}: linear layers",
            "layers * max(2 * tokens * weights / (ranks * peak * share), bytes / (ranks * bandwidth * share))"
            + (", of what all tokens use and of experts" if self._shape.num_experts else ""),
            f"1e3 * {self._layers(num_tokens)}",
            1e3 * parts.layers_s,
            "ms",
        )
        yield Explanation(
            f"{phase}: {what}",
            "linear layers + output projection + attention + all-reduces + sends between stages + overhead",
            " + ".join(_short(1e3 * seconds) for seconds in parts),
            1e3 * sum(parts),
            "ms",
        )
        if self._pool.tensor_parallel > 1:
            yield self._all_reduce(phase, parts)

    def transfer(self, num_tokens: int, *, same_host: bool) -> Explanation:
        """Over the links within a host, or over the network."""
        hardware = self._hardware
        bandwidth = hardware.link_bandwidth if same_host else hardware.network_bandwidth
        return Explanation(
            f"transfer of {num_tokens} tokens {'within a host' if same_host else 'between hosts'}",
            "tokens * KV of a token in a rank / (bandwidth * share of it)",
            f"1e3 * {num_tokens} * {_short(self._cost.rank_kv_bytes_per_token)}"
            f" / ({_short(bandwidth)} * {hardware.link_efficiency})",
            1e3 * self._cost.transfer_s(num_tokens, same_host=same_host),
            "ms",
        )

    def price(self) -> Iterator[Explanation]:
        price = self._hardware.price_per_hour_usd
        if price is not None:
            yield Explanation(
                "price of a worker",
                "ranks * stages * price of a device",
                f"{self._pool.tensor_parallel} * {self._pool.pipeline_parallel} * {price}",
                self._pool.devices_per_worker * price,
                "USD/h",
            )

    def _layers(self, num_tokens: int) -> str:
        """Seconds of all linear layers, as an expression."""
        shape = self._shape
        products = [self._product(num_tokens, shape.common_layer_parameters)]
        if shape.num_experts:
            num_touched = num_experts_touched(num_tokens, shape.num_experts, shape.experts_per_token)
            rows_each = num_tokens * shape.experts_per_token / num_touched
            products.append(self._product(rows_each, num_touched * shape.expert_parameters))
        return f"{shape.num_layers} * ({' + '.join(products)})"

    def _product(self, num_rows: float, num_weights: float) -> str:
        hardware, ranks = self._hardware, self._pool.tensor_parallel
        peak, share = hardware.peak(self._model.precision.dtype), hardware.compute_efficiency.at(num_rows)
        return (
            f"max(2 * {_short(num_rows)} * {_short(num_weights)} / ({ranks} * {_short(peak)} * {_short(share)}), "
            f"{_short(num_weights)} * {_short(self._bytes_each)} / ({ranks} * {_short(hardware.bandwidth)}))"
        )

    def _all_reduce(self, phase: str, parts: StepParts) -> Explanation:
        return Explanation(
            f"{phase}: share of all-reduces",
            "all-reduces / the step",
            f"100 * {_short(parts.all_reduce_s)} / {_short(sum(parts))}",
            100 * parts.all_reduce_s / sum(parts),
            "%",
        )


def _short(number: float) -> str:
    """A number in few digits; integers in full, up to the bytes of a device."""
    return str(int(number)) if number == int(number) and abs(number) < 1e12 else f"{number:.6g}"
