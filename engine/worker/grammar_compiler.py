"""Tries grammars apart from the worker, as some take minutes and gigabytes to compile.

Started by `pdserve.engine.worker.grammars` with the descriptor of a socket. Loads the vocabulary once, then forks for
each grammar. The fork may use `MAX_CPU_S` seconds, then `MAX_WALK_S` for masks, and `MAX_MEMORY_BYTES` more than this
process, after which the kernel or this process ends it, and the next grammar starts from the same clean state. A frame
to this process is the kind and the text of a grammar. A frame from it is `FAILED` or `BUSY` and the reason, or
`COMPILED`. After that comes the grammar as xgrammar serialises it, but only where the worker is sure to have it sooner
so than if it compiles it, too: a schema of 26 kB compiles in 0.3 s, and has 112 MiB in that form. The first frames are
the configuration and the vocabulary.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from pdserve.contracts.codec import from_json
from pdserve.contracts.request import Grammar, GrammarKind
from pdserve.engine.worker.xgrammar_import import import_xgrammar
from pdserve.model.config.tokenizer_config import CHANNEL, TAGS
from pdserve.proto.framing import MAX_FRAME_BYTES, encode_frame, receive_frame
from pdserve.proto.parent_death import die_with_parent

if TYPE_CHECKING:
    import xgrammar

MAX_CPU_S = 10
"""To compile: strings of bounded length take seconds with vocabularies of 100,000 tokens."""
MAX_WALK_S = 1
"""For `_WALK_TOKENS` masks."""
MAX_SERIALISING_S = 1
"""What compiles in less is not serialised."""
MAX_WALL_S = 30.0
"""Longer than all of them, because the steps of the worker go first."""
MAX_MEMORY_BYTES = 256 << 20
MAX_REASON_CHARS = 300
NICENESS = 10

COMPILED, FAILED, BUSY = b"\0", b"\1", b"\2"

_ANY_CHARACTER, _JSON_CHARACTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
"""Characters that xgrammar allows in a JSON string of bounded length, and those of JSON: no control characters."""

_SHORT_ESCAPE = re.compile(r"\\\\|\\x([0-9a-fA-F]{2})")
"""xgrammar writes two digits after an x, and reads as many as there are."""

_CONTROL_TEXTS = {"BYTE_LEVEL": "\u00ff", "BYTE_FALLBACK": "<0xFF>"}
"""By vocabulary, the token of a byte that no text has: xgrammar never allows a token without text. It allows that byte
in text that ends at a tag, so only models with channels, whose grammars have ids in place of tags, get such tokens."""

_WALK_TOKENS = 32
_TOO_BUSY = f"this machine was too busy to compile it within {MAX_WALL_S:g} s; try again"
_OVER_BOUNDS = (
    f"it takes over {MAX_CPU_S} s or {MAX_MEMORY_BYTES >> 20} MiB to compile, or {MAX_WALK_S} s for "
    f"{_WALK_TOKENS} tokens; simplify it"
)


@dataclass(frozen=True, slots=True)
class CompilerConfig:
    """First frame to the compiler, as JSON."""

    folder: str
    """Of the checkpoint."""
    vocab_size: int
    """Logits of the model."""
    eos_token_ids: tuple[int, ...]
    parent_pid: int


def main() -> int:
    sock = socket.socket(fileno=int(sys.argv[1]))
    first = receive_frame(sock)
    if first is None:
        return 1
    config = from_json(CompilerConfig, first.decode(), "the compiler's configuration")
    die_with_parent(parent=config.parent_pid)
    vocabulary = read_vocabulary(config)
    sock.sendall(encode_frame(COMPILED + vocabulary.serialize_json().encode()))
    while (frame := receive_frame(sock)) is not None:
        sock.sendall(encode_frame(compile_apart(vocabulary, Grammar(GrammarKind(frame[0]), frame[1:].decode()))))
    return 0


def read_vocabulary(config: CompilerConfig) -> xgrammar.TokenizerInfo:
    """Read the tokens of the configured checkpoint that grammars may allow: besides tags none whose text has a meaning
    of its own to the model, or, if it has channels, those by their ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(config.folder, "tokenizer.json")))
    import_xgrammar()
    import xgrammar

    detected = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
    texts, vocab = [""] * config.vocab_size, tokenizer.get_vocab(with_added_tokens=True)
    control_text = _CONTROL_TEXTS.get(detected["vocab_type"].name, "") if CHANNEL in vocab else ""
    added = tokenizer.get_added_tokens_decoder()
    special = {token for token, each in added.items() if each.special and each.content not in TAGS}
    for text, token in vocab.items():
        if token < config.vocab_size:  # the text of a control token is not its meaning
            texts[token] = control_text if token in special else text

    return xgrammar.TokenizerInfo(
        texts,
        vocab_type=detected["vocab_type"],
        vocab_size=config.vocab_size,
        stop_token_ids=list(config.eos_token_ids),
        add_prefix_space=detected["add_prefix_space"],
    )


def compile_apart(vocabulary: xgrammar.TokenizerInfo, grammar: Grammar) -> bytes:
    """Try a grammar in a fork; return its frame."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _limit_resources()
            with open(writer, "wb") as pipe:
                for part in _compile(vocabulary, grammar):
                    pipe.write(part)
                    pipe.flush()
                os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb", buffering=0) as pipe:
        answer = _read_until(pipe.fileno(), time.monotonic() + MAX_WALL_S)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if answer is None:
        return BUSY + _TOO_BUSY.encode()
    if status:  # it was ended while it compiled, or later, while it serialised
        return COMPILED if answer.startswith(COMPILED) else FAILED + _OVER_BOUNDS.encode()
    return answer


def give_way() -> None:
    """Let the steps of the worker go before the calling thread from now on."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def _limit_resources() -> None:
    give_way()
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    max_bytes = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
    for kind, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, max_bytes)):
        resource.setrlimit(kind, (limit, limit))
    _limit_cpu(MAX_CPU_S)


def _limit_cpu(seconds: int) -> None:
    """Have the kernel end this process after so much more CPU time; a later call may set another limit."""
    max_s = MAX_CPU_S + MAX_WALK_S + MAX_SERIALISING_S + 2  # each is rounded up
    resource.setrlimit(resource.RLIMIT_CPU, (ceil(time.process_time()) + seconds, max_s))


def compile_grammar(vocabulary: xgrammar.TokenizerInfo, grammar: Grammar) -> xgrammar.CompiledGrammar:
    """
    Raises:
        RuntimeError: it cannot be compiled.
    """
    from xgrammar import Grammar as Rules
    from xgrammar import GrammarCompiler

    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:  # with free white space, some models write nothing else
            rules = Rules.from_json_schema(grammar.text, any_whitespace=False)
        case GrammarKind.REGEX:
            rules = Rules.from_regex(grammar.text)
        case GrammarKind.EBNF:
            rules = Rules.from_ebnf(grammar.text)
        case GrammarKind.STRUCTURAL_TAG:
            rules = Rules.from_structural_tag(grammar.text)
    if grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG) and _ANY_CHARACTER in (text := str(rules)):
        text = text.replace(_ANY_CHARACTER, _JSON_CHARACTER)
        rules = Rules.from_ebnf(_SHORT_ESCAPE.sub(_long_escape, text))
        if str(rules) != text:
            raise RuntimeError("it cannot be kept to JSON; give the strings in it no length")
    return GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False).compile_grammar(rules)


def _long_escape(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] is None else f"\\u00{escape[1]}"


def _compile(vocabulary: xgrammar.TokenizerInfo, grammar: Grammar) -> Iterator[bytes]:
    """Yield the parts of its frame."""
    try:
        compiled = compile_grammar(vocabulary, grammar)
        compiled_s = time.process_time()
        _limit_cpu(MAX_WALK_S)
        if not _walk(compiled):
            raise ValueError("no text of the model's vocabulary follows it")
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        yield FAILED + _reason(error).encode()
        return
    yield COMPILED
    if compiled_s > MAX_SERIALISING_S:
        _limit_cpu(MAX_SERIALISING_S)
        serialised: bytes = compiled.serialize_json().encode()
        if len(serialised) < MAX_FRAME_BYTES:
            yield serialised


def _walk(compiled: xgrammar.CompiledGrammar) -> int:
    """Match a random text of the grammar; returns its tokens. A grammar whose masks take long uses up its time here,
    and not a worker's steps."""
    import numpy as np
    import xgrammar

    matcher, vocabulary = xgrammar.GrammarMatcher(compiled), compiled.tokenizer_info
    mask = np.zeros((1, -(-vocabulary.vocab_size // 32)), np.int32)
    draw = Random(0).choice
    for num_tokens in range(_WALK_TOKENS):
        matcher.fill_next_token_bitmask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocabulary.vocab_size])
        if not len(allowed):
            return num_tokens
        goes_on = allowed[~np.isin(allowed, vocabulary.stop_token_ids)]
        if not len(goes_on):
            break
        matcher.accept_token(int(draw(goes_on)))
    return _WALK_TOKENS


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        return _OVER_BOUNDS
    # xgrammar puts the time and the line of its own source first.
    reason = re.sub(r"^\[[\d:]+\] \S+: ", "", str(error).strip())
    return " ".join(reason.split())[:MAX_REASON_CHARS]


def _read_until(pipe: int, deadline_s: float) -> bytes | None:
    """Read to the end; None if that has not come by the deadline."""
    received = bytearray()
    while select.select([pipe], [], [], max(deadline_s - time.monotonic(), 0))[0]:
        piece = os.read(pipe, 1 << 20)
        if not piece:
            return bytes(received)
        received += piece
    return None


if __name__ == "__main__":
    raise SystemExit(main())
