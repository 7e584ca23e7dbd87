"""Special tokens of a checkpoint, as transformers' AutoTokenizer reads them from the files beside tokenizer.json.

Used by the configuration, whose answers end with ``eos_token``, and by `pdserve.router.text.tokenizer`. Never imports
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LFS_POINTER = b"version https://git-lfs"


def read_json(file: Path) -> dict[str, Any]:
    """JSON object of a file; empty if the file does not exist.

    Raises:
        ValueError: it holds none.
    """
    if not file.is_file():
        return {}
    check_pulled(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))  # some editors put a mark before it
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object; download it again")
    return content


def check_pulled(file: Path) -> None:
    """
    Raises:
        ValueError: Git LFS has not fetched it.
    """
    with file.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(f"{file} is a pointer of Git LFS; run git lfs pull in its folder, or download it again")


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, over which special_tokens_map.json goes unless it lists all added tokens itself. Extra
    tokens that have names stand beside ``bos_token``."""
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(folder / "special_tokens_map.json")
    named = config.get("extra_special_tokens")
    return {**config, **named, "extra_special_tokens": None} if isinstance(named, dict) else config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, given as text or as an object with the text in ``content``."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


REASONING_TAGS = ("<think>", "</think>")
CALL_TAGS = ("<tool_call>", "</tool_call>")
TAGS = frozenset(REASONING_TAGS + CALL_TAGS)
"""Around parts of an answer. They are read and written as text, also where they are special tokens."""
CHANNEL = "<|channel|>"
"""Token that only tokenizers with the harmony format (gpt-oss) have."""
_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""End answers in that format, whatever the checkpoint lists."""


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids of the tokenizer's tokens that end an answer; empty without a tokenizer, or if it names none."""
    config = read_tokenizer_config(folder)
    text = special_tokens(config).get("eos_token")
    tokenizer = read_json(folder / "tokenizer.json")
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    ids |= {token["content"]: int(number) for number, token in config.get("added_tokens_decoder", {}).items()}
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    texts = dict.fromkeys([text, *(_HARMONY_ENDS if CHANNEL in ids else ())])
    return tuple(ids[each] for each in texts if each in ids)
