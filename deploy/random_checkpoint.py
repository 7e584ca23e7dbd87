"""Writes a small random Llama checkpoint with a tokenizer and a chat template, through transformers.

It is what `pdserve up` serves when no model is named, and what tests compare against transformers. Its answers are
noise; its files are those of any Hugging Face checkpoint.
"""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
_TRAINING_TEXT = """Prefill computes the key and value cache of a prompt; decode generates tokens from it.
A router assigns each request to a prefill worker and a decode worker so that both latency objectives are met.
Größe, naïve café, 東京 and 你好, emoji 🙂🚀: text is bytes, and a character may take several tokens.
What is the time to first token? How many requests per second does one machine serve? 0 1 2 3 4 5 6 7 8 9
"""


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer of ``vocab_size`` tokens on a fixed text and save it to ``folder``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, EOS, END, "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_random_checkpoint(
    folder: Path,
    *,
    hidden_size: int = 128,
    intermediate_size: int = 352,
    num_layers: int = 4,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    vocab_size: int = 512,
    max_position_embeddings: int = 4096,
    rope_parameters: dict[str, object] | None = None,
    tie_word_embeddings: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "5GB",
) -> Path:
    """Write config.json, safetensors, tokenizer and chat template to ``folder`` and return it.

    Weights are drawn wide enough (standard deviation 0.1) that greedy answers vary with the prompt.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder, vocab_size)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        rope_parameters=rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
