"""The numbers of a decoder that decide what it costs to run.

Told by any Hugging Face config.json of a Llama-like decoder, so that models that are not here can be planned for. Part
of a checkpoint's configuration (`pdserve.model.config`), and read by `pdserve.model.cost`; never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.model.config_values import positive_int
from pdserve.model.families import Family, find_family


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a decoder with grouped-query attention and a gated MLP. Counts are of the whole model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
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

    @classmethod
    def from_hf_config(cls, config: Mapping[str, object]) -> ModelShape:
        """Shape told by the contents of a config.json. An architecture that is not known counts as Llama's.

        Raises:
            ValueError: a number that every Llama-like decoder has is missing or not a positive integer.
        """
        family = find_family(config) or Family()
        values = {**family.defaults, **config}
        hidden_size, num_heads = positive_int(values, "hidden_size"), positive_int(values, "num_attention_heads")
        attention_bias = bool(values.get("attention_bias"))
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
            mlp_bias=bool(values.get("mlp_bias")),
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices: q, k, v, o, gate, up, down."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_outputs(self) -> int:
        """Outputs of one layer's matrices: when quantised, each has a scale."""
        attention = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self.hidden_size
        return attention + 2 * self.intermediate_size + self.hidden_size

    @property
    def layer_vector_parameters(self) -> int:
        """Weights of one layer's norms and biases."""
        norms = (4 if self.post_norms else 2) * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        qkv_bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        output_bias = self.hidden_size if self.output_bias else 0
        mlp_bias = 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        return norms + qkv_bias + output_bias + mlp_bias

    @property
    def table_parameters(self) -> int:
        """Weights of the embedding table; the output projection has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights, norms and biases included; a tied output projection is counted once."""
        layers = self.num_layers * (self.layer_parameters + self.layer_vector_parameters)
        num_tables = 1 if self.tie_word_embeddings else 2
        return layers + self.hidden_size + num_tables * self.table_parameters

    @property
    def kv_vectors_per_token(self) -> int:
        """Vectors of ``head_dim`` that one token adds to the KV cache: K and V of every layer and KV head."""
        return 2 * self.num_layers * self.num_kv_heads
