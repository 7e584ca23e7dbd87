"""The compiler of a worker: a real process that survives every grammar, and what is kept of its work."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from random import Random
from threading import Event
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import xgrammar
from tokenizers import AddedToken, Tokenizer

from pdserve.contracts.request import Grammar, GrammarKind
from pdserve.engine.worker import grammar_compiler as compiler
from pdserve.engine.worker import grammars as module
from pdserve.engine.worker.grammar_compiler import (
    COMPILED,
    NICENESS,
    CompilerConfig,
    compile_apart,
    compile_grammar,
    read_vocabulary,
)
from pdserve.engine.worker.grammars import Grammars
from pdserve.engine.worker.loop import Busy
from pdserve.model.config.tokenizer_config import TAGS
from tests.patience import HANG_S
from tests.router.small_tokenizers import (
    BOS,
    BOS_ID,
    EOS_ID,
    HARMONY_TOKENS,
    byte_level_tokenizer,
    metaspace_tokenizer,
)
from tests.shared import shared
from tests.vocabulary import DEMO_FOLDER, LIMITS

SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}')
BOMB = Grammar(GrammarKind.REGEX, f"({'|'.join(f'(a|b|c){{{n}}}' for n in range(1, 400))})*")
SLOW_MASKS = Grammar(GrammarKind.REGEX, "((((((a{1,900}){1,900}){1,900}){1,900}){1,900}){1,900}){1,900}")
"""Compiled at once; a mask takes over a second."""


class Compiled:
    def __init__(self, cpu_cores: tuple[int, ...] = ()) -> None:
        self.grammars = Grammars(DEMO_FOLDER, LIMITS, cpu_cores)
        self.ready: Queue[Grammar] = Queue()
        self.grammars.on_compiled = self.ready.put

    def wait(self, grammar: Grammar) -> xgrammar.CompiledGrammar | str:
        found = self.grammars.find(grammar)
        if found is None:
            assert self.ready.get(timeout=HANG_S) == grammar
            found = self.grammars.find(grammar)
        assert found is not None
        return found


def compilers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if any("grammar_compiler" in word for word in cmdline(child))]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Time for the compiler on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MODULE", "tests.engine.worker.patient_grammar_compiler")
        patch.setattr(module, "MAX_WALL_S", 120.0)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Compiled:
    return shared(request, running)


@contextmanager
def running() -> Iterator[Compiled]:
    compiled = Compiled()
    yield compiled
    compiled.grammars.close()
    deadline_s = time.monotonic() + HANG_S
    while compilers():
        assert time.monotonic() < deadline_s, "the compiler has not ended"
        time.sleep(0.05)


def accepts(compiled: xgrammar.CompiledGrammar | str, text: str) -> bool:
    assert not isinstance(compiled, str), compiled
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_terminated())


@pytest.mark.parametrize(
    ("grammar", "text", "other"),
    [
        (SCHEMA, '{"a": 3}', '{"a": "b"}'),
        (Grammar(GrammarKind.REGEX, "a{2}é"), "aaé", "aé"),
        (Grammar(GrammarKind.EBNF, 'root ::= "yes" | "no"'), "no", "nes"),
    ],
)
def test_what_was_compiled_apart_is_the_grammar(worker: Compiled, grammar: Grammar, text: str, other: str) -> None:
    assert accepts(worker.wait(grammar), text)
    assert not accepts(worker.wait(grammar), other)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(GrammarKind.REGEX, "a(?=b)"), "Regex parsing error at position 4: Lookahead is not supported yet."),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'), "no text of the model's vocabulary follows it"),
        (Grammar(GrammarKind.EBNF, 'start ::= "a"'), "root"),
        (BOMB, "it takes over 10 s or 256 MiB to compile, or 1 s for 32 tokens; simplify it"),
        (SLOW_MASKS, "it takes over 10 s or 256 MiB to compile, or 1 s for 32 tokens; simplify it"),
    ],
)
def test_what_cannot_be_compiled_is_said_and_remembered(worker: Compiled, grammar: Grammar, reason: str) -> None:
    assert reason in str(worker.wait(grammar))
    assert reason in str(worker.grammars.find(grammar)), "it is compiled again"
    assert accepts(worker.wait(SCHEMA), '{"a": 3}')


def test_strings_of_bounded_length_compile_for_a_vocabulary_of_many_tokens() -> None:
    draw = Random(1)
    words = {"".join(draw.choices(" etaoinshr", k=draw.randint(2, 8))) for _ in range(100_000)}
    texts = [*map(chr, range(32, 127)), *sorted(words)]
    vocabulary = xgrammar.TokenizerInfo(texts, vocab_size=len(texts), stop_token_ids=[0])
    answer = compile_apart(vocabulary, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "maxLength": 100}'))
    assert answer.startswith(COMPILED)


def test_what_takes_long_to_compile_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_slowly(vocabulary: xgrammar.TokenizerInfo, grammar: Grammar) -> xgrammar.CompiledGrammar:
        while time.process_time() < 1.1 * compiler.MAX_SERIALISING_S:
            pass
        return compile_grammar(vocabulary, grammar)

    monkeypatch.setattr(compiler, "compile_grammar", compile_slowly)
    vocabulary = xgrammar.TokenizerInfo([*map(chr, range(32, 127))], stop_token_ids=[0])
    answer = compile_apart(vocabulary, Grammar(GrammarKind.REGEX, "a{3}"))
    assert answer.startswith(COMPILED)
    compiled = xgrammar.CompiledGrammar.deserialize_json(answer.removeprefix(COMPILED).decode(), vocabulary)
    assert accepts(compiled, "aaa")
    assert not accepts(compiled, "aa")


def test_what_is_not_serialised_in_its_time_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def serialize_json(self) -> str:
            while True:
                pass

    monkeypatch.setattr(compiler, "compile_grammar", lambda vocabulary, grammar: Endless())
    monkeypatch.setattr(compiler, "_walk", lambda compiled: 1)
    monkeypatch.setattr(compiler, "MAX_SERIALISING_S", 0)
    assert compile_apart(xgrammar.TokenizerInfo(["a"]), SCHEMA) == COMPILED


def test_a_long_schema_compiles_in_its_time_however_long_its_serialised_form(worker: Compiled) -> None:
    names = [[f"field_{number}_{index}" for index in range(8)] for number in range(60)]
    items = [
        {"type": "object", "properties": {name: {"type": "string"} for name in each}, "required": each}
        for each in names
    ]
    arrays = {f"list_{number}": {"type": "array", "items": each} for number, each in enumerate(items)}
    schema = {"type": "object", "properties": arrays, "required": list(arrays), "additionalProperties": False}
    found = worker.wait(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    text = json.dumps({name: [] for name in arrays})
    assert accepts(found, text)
    assert not accepts(found, text.replace("list_59", "list_60"))


def test_compiling_gives_way_to_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Queue[tuple[int, set[int]]]()

    def compile_grammar(vocabulary: object, grammar: Grammar) -> xgrammar.CompiledGrammar:
        threads.put((os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)))
        raise RuntimeError

    monkeypatch.setattr(module, "compile_grammar", compile_grammar)
    core = max(os.sched_getaffinity(0))
    compiled = Compiled(cpu_cores=(core,))
    compiled.wait(SCHEMA)
    compiled.grammars.close()
    assert threads.get(timeout=HANG_S) == (max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)), {core})


def test_a_killed_compiler_is_started_again(worker: Compiled) -> None:
    worker.wait(SCHEMA)
    [child] = compilers()
    os.kill(child.pid, signal.SIGKILL)
    assert accepts(worker.wait(Grammar(GrammarKind.REGEX, "b{3}")), "bbb")


def test_an_error_that_nobody_expects_ends_its_grammar_alone(worker: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "find_spec", {"nothing": 0}.__getitem__)
        broken = worker.wait(Grammar(GrammarKind.REGEX, "x{3}"))
    assert broken == "unexpected KeyError: 'xgrammar'"
    assert not isinstance(broken, Busy)
    assert accepts(worker.wait(Grammar(GrammarKind.REGEX, "y{3}")), "yyy")


def test_grammars_of_live_requests_are_kept_beyond_the_bound(worker: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    live = worker.wait(SCHEMA)
    other = Grammar(GrammarKind.REGEX, "c{4}")
    worker.wait(other)
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 0)
    worker.wait(Grammar(GrammarKind.REGEX, "d{5}"))
    gc.collect()
    assert worker.grammars.compiled(SCHEMA) == live
    with pytest.raises(KeyError):
        worker.grammars.compiled(other)


def test_a_tenant_drops_only_its_own_grammars(worker: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    def words(number: int, owner: str) -> Grammar:
        return Grammar(GrammarKind.EBNF, f'root ::= "{"ab" * number}"', owner)

    first = worker.wait(words(20, "a"))
    assert not isinstance(first, str)
    worker.grammars._kept.clear()
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 4 * first.memory_size_bytes)
    grammars = [words(20, "a"), *(words(20 + number, "b") for number in range(6))]
    for grammar in grammars:
        worker.wait(grammar)
    kept = list(worker.grammars._kept)
    assert kept[0] == grammars[0]
    assert kept[1:] == grammars[-len(kept) + 1 :]
    assert 2 <= len(kept) <= 4


def test_tenants_have_their_grammars_compiled_in_turns() -> None:
    compiled = Compiled()
    monopoly = [Grammar(GrammarKind.REGEX, f"a{{{number}}}", "a") for number in range(1, 5)]
    for grammar in [*monopoly, other := Grammar(GrammarKind.REGEX, "b", "b")]:
        compiled.grammars.find(grammar)
    order = [compiled.ready.get(timeout=HANG_S) for _ in range(5)]
    compiled.grammars.close()
    assert order.index(other) <= 2, "the first may have been taken before the second came"
    assert [each for each in order if each != other] == monopoly


def test_a_grammar_that_waited_for_others_may_be_tried_again(worker: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    worker.grammars.find(Grammar(GrammarKind.REGEX, f"{BOMB.text}x"))
    late = Grammar(GrammarKind.REGEX, "e{6}")
    assert worker.grammars.find(late) is None
    now_s += module.MAX_WAIT_S + 1
    assert [worker.ready.get(timeout=HANG_S) for _ in range(2)][1] == late
    found = worker.grammars.find(late)
    assert isinstance(found, Busy)
    assert "try again" in found
    now_s += module.MAX_WAIT_S + 1
    assert accepts(worker.wait(late), "eeeeee")


def test_the_start_of_the_compiler_is_no_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, are_asked, start = 0.0, Event(), module._Compiler._start

    def start_late(compiler: module._Compiler) -> None:
        nonlocal now_s
        assert are_asked.wait(HANG_S)
        now_s = module.MAX_WAIT_S + 1
        start(compiler)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(module._Compiler, "_start", start_late)
    compiled = Compiled()
    grammars = [Grammar(GrammarKind.REGEX, "c"), Grammar(GrammarKind.REGEX, "cc")]
    for grammar in grammars:
        compiled.grammars.find(grammar)
    are_asked.set()
    assert [compiled.ready.get(timeout=HANG_S) for _ in grammars] == grammars
    assert accepts(compiled.wait(grammars[1]), "cc")
    compiled.grammars.close()


def test_a_compiler_that_did_not_start_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    compiled = Compiled()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere")
        assert "/nowhere" in str(compiled.wait(SCHEMA))
    now_s = module.MAX_WAIT_S + 1
    assert accepts(compiled.wait(SCHEMA), '{"a": 1}')
    compiled.grammars.close()


def test_a_checkpoint_without_a_tokenizer_is_the_reason(
    tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    empty = Grammars(tmp_path_factory.mktemp("model"), LIMITS)
    ready: Queue[Grammar] = Queue()
    empty.on_compiled = ready.put
    empty.find(SCHEMA)
    ready.get(timeout=HANG_S)
    assert empty.find(SCHEMA) == "the grammar compiler has ended; the worker's log has the reason"
    empty.close()


@pytest.mark.parametrize("make_tokenizer", [byte_level_tokenizer, metaspace_tokenizer])
def test_a_tag_that_is_a_special_token_is_written_as_one(
    make_tokenizer: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(TAGS)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(CompilerConfig(str(tmp_path), tokenizer.get_vocab_size(), (EOS_ID,), 0))
    thought = {"type": "any_text", "excludes": ["</think>"]}
    texts = ("</think>", "<tool_call>", "a", "</tool_call>")
    elements = [thought, *({"type": "const_string", "value": text} for text in texts)]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    matcher = xgrammar.GrammarMatcher(compile_grammar(vocabulary, Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))))
    mask = np.zeros((1, -(-vocabulary.vocab_size // 32)), np.int32)
    for text in texts:
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert bits[tokenizer.token_to_id(text)]
        assert not bits[BOS_ID]
        assert matcher.accept_token(tokenizer.token_to_id(text))
    assert matcher.accept_token(EOS_ID)


@pytest.mark.parametrize("has_channels", [False, True])
@pytest.mark.parametrize("make_tokenizer", [byte_level_tokenizer, metaspace_tokenizer])
def test_a_control_token_is_allowed_by_its_id_alone(
    make_tokenizer: Callable[[], Tokenizer], has_channels: bool, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    if has_channels:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in HARMONY_TOKENS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = read_vocabulary(CompilerConfig(str(tmp_path), tokenizer.get_vocab_size(), (EOS_ID,), 0))
    mask = np.zeros((1, -(-vocabulary.vocab_size // 32)), np.int32)
    text, token, end = (
        {"type": "any_text"},
        {"type": "token", "token": BOS_ID},
        {"type": "const_string", "value": "<e>"},
    )
    cases = [([text], False), ([text, token], True)]
    if not has_channels:  # their answers reason, or have text around calls
        tags = [{"type": "tag", "begin": "<c>", "content": text, "end": "</c>"}]
        calls = {"type": "triggered_tags", "triggers": ["<c>"], "tags": tags}
        cases = [([text], False), ([{**text, "excludes": ["<e>"]}, end], False), ([calls], False)]
    for elements, is_allowed in cases:
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
        grammar = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))
        matcher = xgrammar.GrammarMatcher(compile_grammar(vocabulary, grammar))
        matcher.fill_next_token_bitmask(mask)
        assert np.unpackbits(mask.view(np.uint8), bitorder="little")[BOS_ID] == is_allowed
        matcher.accept_string(BOS)
        assert matcher.accept_token(BOS_ID) == is_allowed
