"""The numbers of a decoder that decide what it costs to run.

Told by a checkpoint's configuration (`pdserve.model.config`), or by any Hugging Face config.json of a Llama-like
decoder, so that models that are not here can be planned for. Read by `pdserve.model.cost`; never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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

    @classmethod
    def from_hf_config(cls, config: Mapping[str, object]) -> ModelShape:
        """Shape told by the contents of a config.json.

        Raises:
            ValueError: a number that every Llama-like decoder has is missing or not a positive integer.
        """

        def number(key: str, default: int | None = None) -> int:
            value = config.get(key) or default
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}")
            return value

        hidden_size, num_heads = number("hidden_size"), number("num_attention_heads")
        return cls(
            num_layers=number("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=number("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=number("num_key_value_heads", num_heads),
            head_dim=number("head_dim", hidden_size // num_heads),
            vocab_size=number("vocab_size"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices: q, k, v, o, gate, up, down."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def table_parameters(self) -> int:
        """Weights of the embedding table; the output projection has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights, norms included; a tied output projection is counted once."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        num_tables = 1 if self.tie_word_embeddings else 2
        return self.num_layers * self.layer_parameters + norms + num_tables * self.table_parameters

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token adds to the KV cache: K and V of every layer and KV head."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
