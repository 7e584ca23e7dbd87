"""Small tokenizers of both families: byte-level BPE (Llama 3, Qwen), and sentencepiece with byte fallback (Llama 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
HARMONY_TOKENS = [
    f"<|{name}|>" for name in ("return", "constrain", "channel", "start", "end", "message", "call")
]  # in the order of gpt-oss's
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'developer' %}{{ raise_exception('developers are not heard') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
TEXT = [
    "The router gives each request a prefill worker and a decode worker.",
    "What is the time to first token? Größe, naïve café, 東京 and 你好, 🙂🚀 0 1 2 3 4 5 6 7 8 9",
]


def byte_level_tokenizer() -> Tokenizer:
    """Every byte is a token, so any text, valid or broken, can be written. Encoding puts BOS first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """Spaces are ``▁``, unknown characters fall back to their bytes, and decoding strips the first space."""
    special = [BOS, EOS]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.", "é"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n"), ("▁", "a")]
    pieces += [left + right for left, right in merges]
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, byte_fallback=True, fuse_unk=True)
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def write_tokenizer(folder: Path, template: str = CHAT_TEMPLATE, special: Sequence[str] = ()) -> None:
    """Write the files of a model's folder that the router reads; one with channels has the tokens of the format, and
    every one those named ``special``."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if "<|channel|>" in template:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in HARMONY_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"bos_token": "{BOS}", "eos_token": {{"content": "{EOS}"}}}}')
    (folder / "chat_template.jinja").write_text(template)
