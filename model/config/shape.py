"""Shape of a decoder: the sizes that determine its cost.

Parsed from the config.json of any decoder with grouped-query or latent attention, dense or with routed experts, so
that models that are not downloaded or cannot be served can be planned for. Part of
`pdserve.model.config.decoder_config`, read by `pdserve.model.cost.cost_model`. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from pdserve.model.config.families import FAMILIES, PLANNED_FAMILIES, SLIDING, Family, find_family, text_values
from pdserve.model.config.quantisation import Scheme, parse_scheme


class LatentAttention(NamedTuple):
    """Keys and values of all heads are projected from one vector, which the KV cache holds in their place, beside one
    rotated key (DeepSeek-AI 2024, DeepSeek-V2)."""

    query_rank: int
    """Width of the vector that queries are projected from; 0: the hidden state."""
    kv_rank: int
    """Width of the vector that keys and values are projected from."""
    key_dim: int
    """Part of a head's key that is not rotated."""
    rotated_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with grouped-query attention, or latent attention. Counts are for the whole model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP, or of one routed expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a vector in KV."""
    vocab_size: int
    tie_word_embeddings: bool = False
    """The output projection is the embedding table."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head, with one weight for all heads of a layer."""
    post_norms: bool = False
    """Outputs of attention and MLP are normalised too."""
    sinks: bool = False
    """The softmax of each query head has one more score, a weight of the model."""
    norm_bias: bool = False
    final_norm: bool = True
    """The last layer's output is normalised."""
    gated_mlp: bool = True
    """An MLP or expert has a gate and two matrices."""
    num_positions: int = 0
    """Rows of the learned position table; 0 without one."""
    num_experts: int = 0
    """Routed experts of each layer; 0 for a dense MLP."""
    experts_per_token: int = 0
    stacked_experts: bool = False
    """A layer's experts are stacked in one tensor, and they and the router have biases."""
    shared_intermediate_size: int = 0
    """Width of the shared expert, which every token uses; 0 without one."""
    shared_gate: bool = True
    """The shared expert has a gate of one output."""
    dense_layers: tuple[int, ...] = ()
    """Indices of layers without experts, in a model that has them."""
    dense_intermediate_size: int = 0
    """Width of their MLP."""
    latent: LatentAttention | None = None
    windows: tuple[int, ...] = ()
    """Tokens that a token of each layer attends to, itself included; 0 for all. Empty: all, in every layer. A model has
    one window at most, as config.json does."""
    scheme: Scheme | None = None
    """How the checkpoint's matrices are quantised."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, object]) -> ModelShape:
        """Parse config.json: of a multimodal model, its language model. Unknown architectures count as Llama's.

        Raises:
            ValueError: a required number is missing or not a positive integer, or no formula here counts the layers.
        """
        family = find_family(config, {**FAMILIES, **PLANNED_FAMILIES}) or Family()
        values = text_values(config, family)
        values |= {key: values.get(name) for key, name in family.renamed.items()}
        _refuse_others(values)
        hidden_size, num_heads = positive_int(values, "hidden_size"), positive_int(values, "num_attention_heads")
        attention_bias = family.has_biases or bool(values.get("attention_bias"))
        num_experts = next(filter(None, (_count(values, key) for key in _NUM_EXPERTS)), 0)
        latent = _latent(values)
        num_layers = positive_int(values, "num_hidden_layers")
        dense_layers = _dense_layers(values, num_layers) if num_experts else ()
        return cls(
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=positive_int(values, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=1 if latent else positive_int(values, "num_key_value_heads", num_heads),
            head_dim=(
                latent.kv_rank + latent.rotated_dim
                if latent
                else positive_int(values, "head_dim", hidden_size // num_heads)
            ),
            vocab_size=positive_int(values, "vocab_size"),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=bool(values.get("qkv_bias", True)) if family.qkv_bias else attention_bias,
            output_bias=attention_bias and not family.qkv_bias,
            mlp_bias=family.has_biases or (bool(values.get("mlp_bias")) and not num_experts),
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            sinks=family.sinks,
            norm_bias=family.has_biases,
            final_norm=bool(values.get("do_layer_norm_before", True)),
            gated_mlp=family.gated_mlp,
            num_positions=_num_positions(values, family),
            num_experts=num_experts,
            experts_per_token=_experts_per_token(values, num_experts) if num_experts else 0,
            stacked_experts=family.stacked_experts,
            shared_intermediate_size=_count(values, "shared_expert_intermediate_size")
            or _count(values, "n_shared_experts") * _count(values, "moe_intermediate_size"),
            shared_gate=not values.get("n_shared_experts"),
            dense_layers=dense_layers,
            dense_intermediate_size=positive_int(values, "dense_intermediate_size") if dense_layers else 0,
            latent=latent,
            windows=_windows(values, layer_types(values, family, num_layers)),
            scheme=_scheme(config, values, family),
        )

    @property
    def num_dense_layers(self) -> int:
        return sum(index < self.num_layers for index in self.dense_layers)

    @property
    def expert_parameters(self) -> int:
        """Matrix weights of one expert, or of the MLP."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def common_layer_parameters(self) -> int:
        """Matrix weights of one layer that every token uses: all except routed experts."""
        return self.layer_parameters - self.num_experts * self.expert_parameters

    @property
    def layer_parameters(self) -> int:
        """Matrix weights of one layer: q, k, v, o, gate, up, down; of all experts, and of their router."""
        return self.layer_groups(1) + self.router_parameters

    @property
    def router_parameters(self) -> int:
        """Weights of one layer that choose and weigh experts. Never quantised."""
        num_gates = self.shared_gate if self.shared_intermediate_size else 0
        return (self.num_experts + num_gates) * self.hidden_size

    @property
    def dense_layer_parameters(self) -> int:
        """Matrix weights of one layer without experts, in a model that has them."""
        return self.layer_groups(1, is_dense=True)

    @property
    def matrix_parameters(self) -> int:
        """Matrix weights of all layers."""
        num_dense = self.num_dense_layers
        return (self.num_layers - num_dense) * self.layer_parameters + num_dense * self.dense_layer_parameters

    @property
    def token_parameters(self) -> int:
        """Matrix weights of all layers that one token is multiplied by."""
        num_unused = (self.num_experts - self.experts_per_token) * self.expert_parameters
        return self.matrix_parameters - (self.num_layers - self.num_dense_layers) * num_unused

    @property
    def pair_operations(self) -> int:
        """Operations of one token that attends to one other in a layer, in a prompt."""
        dims = 2 * self.head_dim if self.latent is None else sum(self.latent[2:])
        return 2 * self.num_heads * dims

    @property
    def decode_pair_operations(self) -> int:
        """Operations of one token that attends to one other in a layer, in decode: there, heads attend to the vectors
        in KV themselves, and what projects these is applied to queries and outputs."""
        dims = 2 * self.head_dim if self.latent is None else self.head_dim + self.latent.kv_rank
        return 2 * self.num_heads * dims

    def layer_groups(self, group_inputs: int, *, is_dense: bool = False) -> int:
        """Groups of up to ``group_inputs`` inputs of each output of one layer's matrices but for the router: in int4,
        each has a scale, and in int8 each output.

        Args:
            is_dense: of a layer without experts, in a model that has them.
        """
        return sum(
            number * num_outputs * -(-num_inputs // group_inputs)
            for number, num_outputs, num_inputs in self._layer_matrices(is_dense=is_dense)
        )

    def expert_groups(self, group_inputs: int) -> int:
        """As `layer_groups`, of one routed expert, or of the MLP."""
        hidden, width = self.hidden_size, self.intermediate_size
        outputs = 2 * width if self.gated_mlp else width
        return outputs * -(-hidden // group_inputs) + hidden * -(-width // group_inputs)

    @property
    def layer_vector_parameters(self) -> int:
        """Norm and bias weights, and sinks, of one layer."""
        norms = (4 if self.post_norms else 2) * self._norm_parameters + (2 * self.head_dim if self.qk_norm else 0)
        norms += self.latent.query_rank + self.latent.kv_rank if self.latent else 0
        qkv_bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        output_bias = self.hidden_size if self.output_bias else 0
        mlp_bias = self._mlp_outputs if self.mlp_bias else 0
        if self.stacked_experts:
            mlp_bias = self.num_experts * (self._mlp_outputs + 1)
        return norms + qkv_bias + output_bias + mlp_bias + (self.num_heads if self.sinks else 0)

    @property
    def table_parameters(self) -> int:
        """Weights of the embedding table, and of the output projection."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights, norms and biases included; a tied output projection is counted once."""
        layers = self.matrix_parameters + self.num_layers * self.layer_vector_parameters
        final_norm = self._norm_parameters if self.final_norm else 0
        num_tables = 1 if self.tie_word_embeddings else 2
        return layers + final_norm + num_tables * self.table_parameters + self.num_positions * self.hidden_size

    @property
    def kv_vectors_per_token(self) -> int:
        """Vectors of ``head_dim`` in the KV of one token: K and V of every layer and KV head, or one of every layer."""
        return (1 if self.latent else 2) * self.num_layers * self.num_kv_heads

    def _attention_matrices(self) -> Iterator[tuple[int, int, int]]:
        hidden, heads, latent = self.hidden_size, self.num_heads, self.latent
        if latent is None:
            yield 1, (heads + 2 * self.num_kv_heads) * self.head_dim, hidden
            yield 1, hidden, heads * self.head_dim
            return
        if latent.query_rank:
            yield 1, latent.query_rank, hidden
        yield 1, heads * (latent.key_dim + latent.rotated_dim), latent.query_rank or hidden
        yield 1, latent.kv_rank + latent.rotated_dim, hidden
        yield 1, heads * (latent.key_dim + latent.value_dim), latent.kv_rank
        yield 1, hidden, heads * latent.value_dim

    def _layer_matrices(self, *, is_dense: bool = False) -> Iterator[tuple[int, int, int]]:
        """Yield (number, outputs, inputs) of equal matrices of one layer."""
        hidden, expert, shared = self.hidden_size, self.intermediate_size, self.shared_intermediate_size
        yield from self._attention_matrices()
        if is_dense:
            yield 1, (2 if self.gated_mlp else 1) * self.dense_intermediate_size, hidden
            yield 1, hidden, self.dense_intermediate_size
            return
        yield max(1, self.num_experts), (2 if self.gated_mlp else 1) * expert, hidden
        yield max(1, self.num_experts), hidden, expert
        if shared:
            yield 1, 2 * shared, hidden
            yield 1, hidden, shared

    @property
    def _norm_parameters(self) -> int:
        return 2 * self.hidden_size if self.norm_bias else self.hidden_size

    @property
    def _mlp_outputs(self) -> int:
        """Outputs of the matrices of one MLP or expert."""
        return (2 if self.gated_mlp else 1) * self.intermediate_size + self.hidden_size


def layer_types(values: Mapping[str, object], family: Family, num_layers: int) -> list[Any]:
    """Type of each layer, as config.json names it.

    Raises:
        ValueError: another number of them.
    """
    types = values.get("layer_types") or family.layer_types(values, num_layers)
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(f"config.json: layer_types is not a list of {num_layers} types; download config.json again")
    return types


def _windows(values: Mapping[str, object], types: list[Any]) -> tuple[int, ...]:
    if SLIDING not in types:
        return ()
    if not values.get("use_sliding_window", True):
        raise ValueError(
            f"config.json: layer_types has {SLIDING} and use_sliding_window is false; remove one of the two"
        )
    window = positive_int(values, "sliding_window")
    return tuple(window if layer_type == SLIDING else 0 for layer_type in types)


def _scheme(config: Mapping[str, object], values: Mapping[str, object], family: Family) -> Scheme | None:
    if (scheme := parse_scheme(config)) is None:
        return None
    if (scheme.layout == "blocks") != family.stacked_experts:
        raise ValueError(
            f"config.json: quantization_config has {scheme}, which is not served of {config.get('architectures')}; "
            f"serve a checkpoint {'in mxfp4' if family.stacked_experts else 'of another format'}, or one in 16 bits"
        )
    for key in ("hidden_size", "intermediate_size"):
        if scheme.layout == "blocks" and positive_int(values, key) % scheme.group_inputs:
            raise ValueError(
                f"config.json: {key} {values[key]} is no multiple of the {scheme.group_inputs} inputs of a group of "
                f"{scheme}; serve a checkpoint in 16 bits"
            )
    return scheme


def _count(values: Mapping[str, object], key: str) -> int:
    """Read a count that may be missing, null or 0."""
    return positive_int(values, key) if values.get(key) else 0


_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _experts_per_token(values: Mapping[str, object], num_experts: int) -> int:
    number = positive_int(values, "num_experts_per_tok")
    if number > num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok {number} is more than its {num_experts} experts; download it again"
        )
    return number


def _dense_layers(values: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    """Layers without experts: the first ones (DeepSeek), those of a list, and all but every ``decoder_sparse_step``-th
    (Qwen)."""
    step, num_first = positive_int(values, "decoder_sparse_step", 1), _count(values, "first_k_dense_replace")
    listed = values.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise ValueError(f"config.json: mlp_only_layers must be a list of layers, not {listed!r}; download it again")
    return tuple(i for i in range(num_layers) if i < num_first or i in listed or (i + 1) % step)


def _latent(values: Mapping[str, object]) -> LatentAttention | None:
    if not values.get("kv_lora_rank"):
        return None
    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentAttention(_count(values, "q_lora_rank"), *(positive_int(values, key) for key in keys))


def _num_positions(values: Mapping[str, object], family: Family) -> int:
    if family.extra_positions is None:
        return 0
    return positive_int(values, "max_position_embeddings") + family.extra_positions


def _refuse_others(values: Mapping[str, object]) -> None:
    """Raise ValueError for layers that would be counted wrongly, by the keys that only such models have."""
    if values.get("moe_layer_freq", 1) != 1:
        raise ValueError(
            "config.json: moe_layer_freq is not 1: some of its layers have experts and some do not; "
            "plan for a model of another architecture"
        )
    projection, hidden_size = values.get("word_embed_proj_dim"), values.get("hidden_size")
    if projection not in (None, hidden_size):
        raise ValueError(
            f"config.json: word_embed_proj_dim {projection} is not hidden_size {hidden_size}: its embeddings are "
            "projected; plan for a model of another architecture"
        )


def positive_int(values: Mapping[str, object], key: str, default: int | None = None) -> int:
    """Return the integer at ``key``, which may be written as 8192.0; ``default`` if it is missing or null.

    Raises:
        ValueError: not a positive integer, or missing without a default.
    """
    value = default if values.get(key) is None else values[key]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(
            f"config.json: {key} must be a positive integer, not {value!r}; write the model's, or download it again"
        )
    return value


def positive_float(values: Mapping[str, object], key: str, default: float | None = None) -> float:
    """Return the number at ``key``; ``default`` if it is missing or null.

    Raises:
        ValueError: not a positive number, or missing without a default.
    """
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise ValueError(
            f"config.json: {key} must be a positive number, not {value!r}; write the model's, or download it again"
        )
    return float(value)
