"""The demo model's tokenizer: words of the phrasings and numbers are tokens; other text is spelled byte by byte.

So "planet" is six tokens, which the model can reverse and count, and the question around it is short. There are no
merges: a piece of text is in the vocabulary as a whole, or becomes bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from pdserve.demo.corpus import SYSTEM_MESSAGES
from pdserve.demo.facts import FACT_TEXTS
from pdserve.demo.number_tasks import NUMBER_TEXTS
from pdserve.demo.turns import COURTESIES, Turn
from pdserve.demo.word_tasks import WORD_TEXTS

PAD, BOS, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, BOS, END, SYSTEM, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUMBERS = range(1999)
"""Numbers with a token of their own: every sum of two operands."""

_PIECE = r" ?[A-Za-z]+|[0-9]+| ?[^\sA-Za-z0-9]+|\s"
"""A word with the space before it, a number, marks with the space before them, or a space."""


def vocabulary_words() -> list[str]:
    """Pieces of more than one byte of all fixed texts; what fills their fields (words, names, numbers) is left out."""
    texts = [*NUMBER_TEXTS, *WORD_TEXTS, *FACT_TEXTS, *SYSTEM_MESSAGES]
    texts = [re.sub(r"{\w+}", "\n", text) for text in texts]
    texts += [text[0].lower() + text[1:] for text in texts]
    texts += [" " + text for text in texts] + [*COURTESIES]
    pieces = {piece for text in texts for piece in re.findall(_PIECE, text)}
    return sorted(piece for piece in pieces if len(piece) > 1 and not piece.isdigit())


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write tokenizer.json, its configuration and the chat template to ``folder``, and return the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [piece.replace(" ", "Ġ") for piece in vocabulary_words()]
    digits = [str(number) for number in NUMBERS]
    pieces = [*SPECIAL, *(sign for sign in alphabet if sign not in digits), *words, *digits]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": END, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return tokenizer


def render(turns: Sequence[Turn], system: str = "") -> str:
    """The conversation as the chat template writes it, answers included."""
    said = f"{SYSTEM}{system}{END}" if system else ""
    return BOS + said + "".join(f"{USER}{turn.question}{END}{ASSISTANT}{turn.answer}{END}" for turn in turns)
