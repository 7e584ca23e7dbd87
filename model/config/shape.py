"""The numbers of a decoder that decide what it costs to run.

Told by any Hugging Face config.json of a decoder with grouped-query attention, dense or with routed experts, so that
models that are not here, or cannot be served, can be planned for. Part of a checkpoint's configuration
(`pdserve.model.config.decoder_config`), and read by `pdserve.model.cost.cost_model`; never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.model.config.families import Family, find_planned_family


class _Matrices(NamedTuple):
    """Matrices of one layer that are alike."""

    number: int
    num_outputs: int
    num_inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a decoder with grouped-query attention. Counts are of the whole model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the MLP, or of one expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    """The output projection is the embedding table."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head, by one weight for all heads of a layer."""
    post_norms: bool = False
    """Both parts of a layer are normalised at their end too."""
    norm_bias: bool = False
    final_norm: bool = True
    """What the last layer leaves is normalised."""
    gated_mlp: bool = True
    """An MLP, or expert, has a gate beside its two matrices."""
    num_positions: int = 0
    """Rows of the table of learned positions; 0 where there is none."""
    num_experts: int = 0
    """Routed experts of each layer; 0 for one MLP that all tokens use."""
    experts_per_token: int = 0
    shared_intermediate_size: int = 0
    """Of an expert beside the routed ones that every token uses, with a gate of one output; 0 where there is none."""

    @classmethod
    def from_hf_config(cls, config: Mapping[str, object]) -> ModelShape:
        """Shape told by the contents of a config.json. An architecture that is not known counts as Llama's.

        Of a model that sees images too, the language model.

        Raises:
            ValueError: a number that every such decoder has is missing or not a positive integer, or the layers are of
                a kind that no formula here counts.
        """
        family = find_planned_family(config) or Family()
        text_config = config.get("text_config")
        values = {**family.defaults, **(text_config if isinstance(text_config, Mapping) else config)}
        values |= {key: values.get(name) for key, name in family.renamed.items()}
        _refuse_others(values)
        hidden_size, num_heads = positive_int(values, "hidden_size"), positive_int(values, "num_attention_heads")
        attention_bias = family.has_biases or bool(values.get("attention_bias"))
        num_experts = _count(values, "num_local_experts") or _count(values, "num_experts")
        return cls(
            num_layers=positive_int(values, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=positive_int(values, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=positive_int(values, "num_key_value_heads", num_heads),
            head_dim=positive_int(values, "head_dim", hidden_size // num_heads),
            vocab_size=positive_int(values, "vocab_size"),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias and not family.qkv_bias,
            mlp_bias=family.has_biases or bool(values.get("mlp_bias")),
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            norm_bias=family.has_biases,
            final_norm=bool(values.get("do_layer_norm_before", True)),
            gated_mlp=family.gated_mlp,
            num_positions=_num_positions(values, family),
            num_experts=num_experts,
            experts_per_token=positive_int(values, "num_experts_per_tok") if num_experts else 0,
            shared_intermediate_size=_count(values, "shared_expert_intermediate_size"),
        )

    @property
    def expert_parameters(self) -> int:
        """Weights of the matrices of one expert, or of the MLP."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def common_layer_parameters(self) -> int:
        """Weights of one layer's matrices that every token uses: without routed experts, all of them."""
        parameters = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        if not self.num_experts:
            return parameters + self.expert_parameters
        if self.shared_intermediate_size:
            parameters += self.hidden_size * (3 * self.shared_intermediate_size + 1)
        return parameters + self.hidden_size * self.num_experts  # the router

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices: q, k, v, o, gate, up, down; of all experts, and of the router."""
        return self.common_layer_parameters + self.num_experts * self.expert_parameters

    @property
    def layer_outputs(self) -> int:
        """Outputs of one layer's matrices: in int8, each has a scale."""
        return sum(matrices.number * matrices.num_outputs for matrices in self._layer_matrices())

    def layer_groups(self, group_inputs: int) -> int:
        """Groups of inputs of all outputs of one layer's matrices: in int4, each has a scale.

        Args:
            group_inputs: the most inputs of a group.
        """
        return sum(
            matrices.number * matrices.num_outputs * -(-matrices.num_inputs // group_inputs)
            for matrices in self._layer_matrices()
        )

    @property
    def layer_vector_parameters(self) -> int:
        """Weights of one layer's norms and biases."""
        norms = (4 if self.post_norms else 2) * self._norm_parameters + (2 * self.head_dim if self.qk_norm else 0)
        qkv_bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        output_bias = self.hidden_size if self.output_bias else 0
        return norms + qkv_bias + output_bias + (self._mlp_outputs if self.mlp_bias else 0)

    @property
    def table_parameters(self) -> int:
        """Weights of the embedding table; the output projection has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights, norms and biases included; a tied output projection is counted once."""
        layers = self.num_layers * (self.layer_parameters + self.layer_vector_parameters)
        final_norm = self._norm_parameters if self.final_norm else 0
        num_tables = 1 if self.tie_word_embeddings else 2
        return layers + final_norm + num_tables * self.table_parameters + self.num_positions * self.hidden_size

    @property
    def kv_vectors_per_token(self) -> int:
        """Vectors of ``head_dim`` that one token adds to the KV cache: K and V of every layer and KV head."""
        return 2 * self.num_layers * self.num_kv_heads

    def _layer_matrices(self) -> Iterator[_Matrices]:
        """Those that `layer_parameters` counts."""
        width, expert_width = self.hidden_size, self.intermediate_size
        yield _Matrices(1, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, width)
        yield _Matrices(1, width, self.num_heads * self.head_dim)
        yield _Matrices(max(1, self.num_experts), (2 if self.gated_mlp else 1) * expert_width, width)
        yield _Matrices(max(1, self.num_experts), width, expert_width)
        yield _Matrices(1, self.num_experts, width)
        if self.shared_intermediate_size:
            yield _Matrices(1, 2 * self.shared_intermediate_size + 1, width)
            yield _Matrices(1, width, self.shared_intermediate_size)

    @property
    def _norm_parameters(self) -> int:
        return 2 * self.hidden_size if self.norm_bias else self.hidden_size

    @property
    def _mlp_outputs(self) -> int:
        """Outputs of the matrices of one MLP or expert."""
        return (2 if self.gated_mlp else 1) * self.intermediate_size + self.hidden_size


def _count(values: Mapping[str, object], key: str) -> int:
    """A count that may be missing, null or 0."""
    return positive_int(values, key) if values.get(key) else 0


def _num_positions(values: Mapping[str, object], family: Family) -> int:
    if family.extra_positions is None:
        return 0
    return positive_int(values, "max_position_embeddings") + family.extra_positions


def _refuse_others(values: Mapping[str, object]) -> None:
    """Raises ValueError for layers that would be counted wrongly, by the keys that only such models have."""
    reasons = {
        "kv_lora_rank": "its attention keeps latent vectors, not keys and values",
        "mlp_only_layers": "some of its layers have experts and some do not",
        "first_k_dense_replace": "some of its layers have experts and some do not",
    }
    for key, reason in reasons.items():
        if values.get(key):
            raise ValueError(f"config.json: {key} is set: {reason}; plan for a model of another architecture")
    if values.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "config.json: decoder_sparse_step is not 1: some of its layers have experts and some do not; "
            "plan for a model of another architecture"
        )
    projection, hidden_size = values.get("word_embed_proj_dim"), values.get("hidden_size")
    if projection not in (None, hidden_size):
        raise ValueError(
            f"config.json: word_embed_proj_dim {projection} is not hidden_size {hidden_size}: its embeddings are "
            "projected; plan for a model of another architecture"
        )


def positive_int(values: Mapping[str, object], key: str, default: int | None = None) -> int:
    """The integer at ``key``; ``default`` where it is missing or null.

    Raises:
        ValueError: it is no positive integer, or is missing and there is no default.
    """
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}; download it again")
    return value


def positive_float(values: Mapping[str, object], key: str, default: float | None = None) -> float:
    """The number at ``key``; ``default`` where it is missing or null.

    Raises:
        ValueError: it is no positive number, or is missing and there is no default.
    """
    value = values.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key} must be a positive number, not {value!r}; download it again")
    return float(value)
