"""Vocabulary of the demo model, and grammars compiled for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import xgrammar
from tokenizers import Tokenizer

from pdserve.contracts.request import Grammar, GrammarKind
from pdserve.contracts.step import ModelLimits
from pdserve.engine.worker.grammar_compiler import CompilerConfig, compile_grammar, read_vocabulary
from pdserve.model.config.decoder_config import DecoderConfig

DEMO_FOLDER = Path(__file__).parents[1] / "model" / "demo" / "pdserve-demo"
LIMITS: ModelLimits = DecoderConfig.from_folder(DEMO_FOLDER).limits(0)

PERSON = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"name": {"type": "string"}, "colour": {"enum": ["red", "green"]}, '
    '"age": {"type": "integer"}}, "required": ["name", "colour", "age"], "additionalProperties": false}',
)


@cache
def demo_vocabulary() -> xgrammar.TokenizerInfo:
    return read_vocabulary(CompilerConfig(str(DEMO_FOLDER), LIMITS.vocab_size, LIMITS.eos_token_ids, 0))


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))


def encoded(text: str) -> list[int]:
    tokens: list[int] = demo_tokenizer().encode(text, add_special_tokens=False).ids
    return tokens


@cache
def compiled(grammar: Grammar) -> xgrammar.CompiledGrammar:
    """
    Raises:
        RuntimeError: it cannot be compiled.
    """
    return compile_grammar(demo_vocabulary(), grammar)
