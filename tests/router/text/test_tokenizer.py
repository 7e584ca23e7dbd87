"""The tokenizer reads a model's folder and encodes as transformers does."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from pdserve.model.weights import random_checkpoint
from pdserve.router.text import tokenizer as tokenizer_module
from pdserve.router.text.chat_template import ChatTemplate, PromptEnd
from pdserve.router.text.tokenizer import MAX_INLINE_CHARS, ChatTokenizer, TooLongError
from tests.router.small_tokenizers import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    byte_level_tokenizer,
    metaspace_tokenizer,
    write_tokenizer,
)

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe? 🙂"}]


def encoded_chat(tokenizer: ChatTokenizer, messages: list[dict[str, str]]) -> list[int]:
    return asyncio.run(tokenizer.encode_chat(tokenizer.chat_text(messages)))


def test_agrees_with_transformers_on_a_checkpoint(tmp_path: Path) -> None:
    random_checkpoint.write_tokenizer(tmp_path, 512)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = ChatTokenizer.from_folder(tmp_path)
    prompt = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert encoded_chat(ours, MESSAGES) == prompt["input_ids"]
    assert asyncio.run(ours.encode("a naïve text")) == theirs("a naïve text")["input_ids"]


def test_a_chat_writes_its_own_special_tokens_and_a_text_gets_the_tokenizers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert encoded_chat(tokenizer, MESSAGES).count(BOS_ID) == 1
    assert asyncio.run(tokenizer.encode("hi"))[0] == BOS_ID


@pytest.mark.parametrize("text", [EOS, f"a{BOS}b{EOS}", f"{BOS}{BOS} {EOS[:-1]}"])
def test_special_tokens_in_a_message_are_text(tmp_path: Path, text: str) -> None:
    write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    tokens = encoded_chat(tokenizer, [{"role": "user", "content": text}])
    assert (tokens.count(BOS_ID), tokens.count(EOS_ID)) == (1, 0)
    assert f"[user] {text}\n" in tokenizer.decode(tokens)
    assert BOS_ID in asyncio.run(tokenizer.encode(BOS, add_special_tokens=False)), "a prompt may have them"


def with_special_texts(texts: list[str]) -> ChatTokenizer:
    """A tokenizer whose template is the content of the only message."""
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, "x"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return ChatTokenizer(tokenizer, ChatTemplate("{{ messages[0].content }}", {}), tokenizer.get_vocab_size())


@given(st.lists(st.text("ab", min_size=1, max_size=5), unique=True, max_size=6), st.text("ab", max_size=60))
def test_the_longest_special_text_at_each_place_is_marked_wherever_a_search_ends(texts: list[str], text: str) -> None:
    in_turn = "|".join(sorted(texts, key=len, reverse=True)) or "(?!)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_SEARCHED_CHARS", 7)
        marked = with_special_texts(texts).chat_text([{"role": "user", "content": text}])
    number = {text: f"{number:02}" for number, text in enumerate(sorted(texts))}
    assert marked == re.sub(in_turn, lambda each: f"¦1{number[each[0]]}{each[0]}¦3{number[each[0]]}", text)


@pytest.mark.parametrize("begun", ["<|", "<|reserved_special_token_24", "<|eot_id|>"])
def test_texts_of_begun_special_tokens_are_searched_at_once(begun: str) -> None:
    """Searches let no other thread run. Llama 3 has as many special tokens."""
    names = ["begin_of_text", "end_of_text", "eot_id", *(f"reserved_special_token_{index}" for index in range(253))]
    tokenizer = with_special_texts([f"<|{name}|>" for name in names])
    message = {"role": "user", "content": begun * (2**19 // len(begun))}
    before_s = time.thread_time()
    tokenizer.chat_text([message])
    assert time.thread_time() - before_s < 0.1


PIECES = st.sampled_from(
    [BOS, EOS, EOS[:-1], "<|", "¦", "0", "1", "2", "3", "a the ", "é", "🙂", "\U0010fffe", "\U0010ffff"]
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatTokenizer.from_folder(folder)


@given(st.lists(st.lists(PIECES, max_size=12).map("".join), min_size=1, max_size=3), st.booleans())
@example(["¦", "¦1"], True)
@example([f"¦1{EOS}¦0¦", f"¦{EOS}"], True)
def test_a_message_has_the_same_tokens_whatever_marks_it_has(
    tokenizer: ChatTokenizer, texts: list[str], is_continued: bool
) -> None:
    """Those of its parts between quoted special tokens, and of these as text."""
    template = byte_level_tokenizer()
    quoting = byte_level_tokenizer()
    quoting.encode_special_tokens = True
    end = PromptEnd.LAST_MESSAGE if is_continued else PromptEnd.MESSAGES
    prompt = BOS + "".join(f"[user] {text}\n" for text in texts)
    parts = re.split(f"({re.escape(BOS)}|{re.escape(EOS)})", prompt[: -1 if is_continued else None])
    expected = [BOS_ID]
    for index, part in enumerate(parts[2:]):
        expected += (quoting if index % 2 else template).encode(part, add_special_tokens=False).ids
    for searched_chars in (3, 2**16):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer_module, "_SEARCHED_CHARS", searched_chars)
            chat = tokenizer.chat_text([{"role": "user", "content": text} for text in texts], end=end)
            assert asyncio.run(tokenizer.encode_chat(chat)) == expected


@pytest.mark.parametrize(("ascii", "name"), [("false", "¦é🙂"), ("true", r"\u00a6\u00e9\ud83d\ude42")])
def test_marks_in_json_and_beside_white_space_are_found(ascii: str, name: str) -> None:
    """A template may write messages as JSON and strip white space."""
    model = byte_level_tokenizer()
    source = f"{{{{ tools[0] | tojson(ensure_ascii={ascii}) }}}}{{{{ messages[0].content | trim }}}}"
    tokenizer = ChatTokenizer(model, ChatTemplate(source, {}), model.get_vocab_size())
    tool = {"name": f"{BOS}\n¦é🙂\\u007f1"}
    chat = tokenizer.chat_text([{"role": "user", "content": f" {EOS}¦ "}], tools=[tool])
    tokens = asyncio.run(tokenizer.encode_chat(chat))
    assert not {BOS_ID, EOS_ID} & {*tokens}
    assert tokenizer.decode(tokens) == f'{{"name": "{BOS}\\n{name}\\\\u007f1"}}{EOS}¦'


@pytest.mark.parametrize("written", ["messages", "'' ~ messages", "messages | string"])
@pytest.mark.parametrize(("end", "cut"), [(PromptEnd.MESSAGES, ""), (PromptEnd.LAST_MESSAGE, "'}]")])
def test_marks_in_the_form_that_python_gives_to_messages_are_found(written: str, end: PromptEnd, cut: str) -> None:
    model = byte_level_tokenizer()
    tokenizer = ChatTokenizer(model, ChatTemplate(f"{{{{ {written} }}}}", {}), model.get_vocab_size())
    messages = [{"role": "user", "content": f"¦{EOS}"}]
    tokens = asyncio.run(tokenizer.encode_chat(tokenizer.chat_text(messages, end=end)))
    assert not {BOS_ID, EOS_ID} & {*tokens}
    assert tokenizer.decode(tokens) == str(messages).removesuffix(cut)


@pytest.mark.parametrize(
    ("cut", "text", "left"),
    [
        ("split(bos_token)[-1]", f"x{BOS}y", "y"),
        ("split(bos_token)[0]", f"x{BOS}y", "x"),
        ("split(bos_token) | join(':\n' + bos_token + '\n')", f"x{BOS}y", f"x:\n{BOS}\ny"),
        ("replace(bos_token, '')", f"{EOS[:3]}{BOS}{EOS[3:]}", EOS),
    ],
)
def test_a_text_that_is_cut_at_a_special_token_changes_no_other(cut: str, text: str, left: str) -> None:
    model = byte_level_tokenizer()
    template = f"{{{{ messages[0].content.{cut} }}}}{{{{ eos_token }}}}{{{{ messages[1].content }}}}{{{{ eos_token }}}}"
    tokenizer = ChatTokenizer(
        model, ChatTemplate(template, {"bos_token": BOS, "eos_token": EOS}), model.get_vocab_size()
    )
    tokens = encoded_chat(tokenizer, [{"role": "assistant", "content": text}, {"role": "user", "content": f"a{EOS}"}])
    assert tokenizer.decode(tokens) == f"{left}{EOS}a{EOS}{EOS}"
    assert (tokens.count(BOS_ID), tokens.count(EOS_ID)) == (left.count(BOS), 2)
    assert tokens[-1] == EOS_ID


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        *((f"[:{end}]", f"{'a' * 11}{EOS}and so on") for end in range(30)),
        *((f"[{start}:]", f"a{EOS}bbb") for start in range(20)),
        *((f"[:-{end}]", f"a{EOS}") for end in range(1, 16)),
        *((f"[-{start}:]", f"{EOS}bb") for start in range(1, 20)),
        ("[:-1][1:]", EOS),
        (".split(eos_token)[0]", f"x{EOS}y{BOS}"),
        (".split(eos_token)[-1]", f"{BOS}x{EOS}y"),
        (".split(bos_token)[0]", f"x{BOS}{EOS}"),
        (".split(bos_token)[0]", BOS),
        (".split(bos_token)[-1]", f"{EOS}{BOS}{EOS}"),
        (".split(bos_token)[-1]", BOS),
        (".replace(bos_token, '')", f"{BOS}{EOS}{BOS}"),
    ],
)
def test_a_text_that_is_cut_anywhere_has_no_special_tokens_and_takes_none_from_the_template(
    cut: str, text: str
) -> None:
    model = byte_level_tokenizer()
    special = {"bos_token": BOS, "eos_token": EOS, "turn_token": "<|turn|>"}
    model.add_special_tokens(["<|turn|>"])
    source = (
        f"{{{{ turn_token }}}}{{{{ messages[0].content{cut} }}}}{{{{ turn_token }}}}. {{{{ messages[0].content }}}}"
    )
    tokenizer = ChatTokenizer(model, ChatTemplate(source, special), model.get_vocab_size())
    tokens = encoded_chat(tokenizer, [{"role": "user", "content": text}])
    assert not {BOS_ID, EOS_ID} & {*tokens}
    turn_id = model.token_to_id("<|turn|>")
    assert tokens[0] == turn_id
    assert tokens.count(turn_id) == 2
    assert tokenizer.decode(tokens).endswith(f"<|turn|>. {text}")
    assert "¦" not in tokenizer.decode(tokens)


@pytest.mark.parametrize("scheme", ["prepend", "always", "first", "never"])
@pytest.mark.parametrize("text", [f"print{EOS}now", f"a {EOS} the{EOS}{EOS}\n", f"{EOS} x"])
def test_a_text_has_no_space_around_quoted_special_tokens(scheme: str, text: str) -> None:
    model = metaspace_tokenizer()
    if scheme != "prepend":
        model.normalizer, model.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    model.add_tokens(["<tool>"])
    template = "{{ bos_token }}a{{ messages[0].content }} x{{ bos_token }}the<tool>the{{ messages[0].content }}"
    tokenizer = ChatTokenizer(model, ChatTemplate(template, {"bos_token": BOS}), model.get_vocab_size())
    # Spaces after the template's own tokens, which it knows, are the tokenizer's
    word, expected = "<|xos|>", encoded_chat(tokenizer, [{"role": "user", "content": text.replace(EOS, "<|xos|>")}])
    tokens = encoded_chat(tokenizer, [{"role": "user", "content": text}])
    assert tokenizer.decode(tokens) == tokenizer.decode(expected).replace(word, EOS)
    assert (tokens.count(BOS_ID), tokens.count(EOS_ID)) == (2, 0)


def test_a_text_of_many_quoted_special_tokens_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = metaspace_tokenizer()
    model.add_tokens(["\n\n"])
    source = "{{ bos_token }}a{{ messages[0].content }}{{ bos_token }}a{{ messages[0].content }}\n{{ eos_token }}"
    special = {"bos_token": BOS, "eos_token": EOS}
    tokenizer = ChatTokenizer(model, ChatTemplate(source, special), model.get_vocab_size())
    encode = tokenizer._encode
    seen = []

    def watched(text: str, **others: Any) -> list[int]:
        seen.append(text)
        return encode(text, **others)

    monkeypatch.setattr(tokenizer, "_encode", watched)
    text = f"\n{EOS}{EOS} the {EOS}" * 100
    tokens = encoded_chat(tokenizer, [{"role": "user", "content": text}])
    assert tokenizer.decode(tokens) == f"{BOS} a{text}{BOS} a{text}\n{EOS}"
    assert len("".join(seen)) < len(f"{BOS}a{text}{BOS}a{text}\n{EOS}") + 10
    assert len(seen) < 10


@pytest.mark.parametrize("text", [f"{EOS} the", "¦1 the", "¦", f"é{EOS}"])
def test_quoted_marks_do_not_widen_a_long_text(tokenizer: ChatTokenizer, text: str) -> None:
    """Python's threads wait while a text is copied, for each byte."""
    long = text * 10_000
    chat = tokenizer.chat_text([{"role": "user", "content": long}])
    assert sys.getsizeof(chat) < 3 * len(long)


def test_long_texts_are_encoded_in_another_thread(tmp_path: Path) -> None:
    seen = []

    class Watched(ChatTokenizer):
        def _encode(
            self,
            text: str,
            *,
            add_special_tokens: bool,
            most_tokens: int = sys.maxsize,
            tokenizer: Tokenizer | None = None,
        ) -> list[int]:
            seen.append(threading.current_thread() is threading.main_thread())
            return super()._encode(text, add_special_tokens=add_special_tokens, tokenizer=tokenizer)

    write_tokenizer(tmp_path)
    tokenizer = Watched.from_folder(tmp_path)
    long = "a" * (MAX_INLINE_CHARS + 1)
    for text in ("short", long):
        asyncio.run(tokenizer.encode(text))
    assert seen == [True, False]


def test_the_interpreter_serves_others_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """The event loop runs during the encoding, not only before and after it."""
    write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    text = "the time to first token " * 8_000

    async def run() -> tuple[list[int], int]:
        encoding = asyncio.create_task(tokenizer.encode(text))
        num_turns = 0
        while not encoding.done():
            await asyncio.sleep(0.005)
            num_turns += 1
        return await encoding, num_turns

    tokens, num_turns = asyncio.run(run())
    assert num_turns >= 5
    assert tokens == byte_level_tokenizer().encode(text).ids


def test_texts_with_too_many_tokens_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    text = "the time to first token " * 2_000
    tokens = asyncio.run(tokenizer.encode(text))
    assert asyncio.run(tokenizer.encode(text, most_tokens=len(tokens))) == tokens
    for most_tokens in (len(tokens) - 1, 100):
        with pytest.raises(TooLongError) as raised:
            asyncio.run(tokenizer.encode(text, most_tokens=most_tokens))
        assert most_tokens < raised.value.num_tokens <= len(tokens)
    assert raised.value.num_tokens < len(tokens) // 2, "all of it was encoded"
    marked = tokenizer.chat_text([{"role": "user", "content": f"{EOS}{text}"}])
    with pytest.raises(TooLongError):
        asyncio.run(tokenizer.encode_chat(marked, most_tokens=100))


@pytest.mark.parametrize("most_tokens", [1, 100])
def test_a_chat_is_encoded_up_to_the_token_that_is_too_many(tmp_path: Path, most_tokens: int) -> None:
    """However short the parts between quoted special tokens are."""
    write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    quoted = f"{EOS}x"
    chat = tokenizer.chat_text([{"role": "user", "content": quoted * 1_000}])
    tokens = asyncio.run(tokenizer.encode_chat(chat))
    assert asyncio.run(tokenizer.encode_chat(chat, most_tokens=len(tokens))) == tokens
    with pytest.raises(TooLongError) as raised:
        asyncio.run(tokenizer.encode_chat(chat, most_tokens=most_tokens))
    assert most_tokens < raised.value.num_tokens <= most_tokens + MAX_INLINE_CHARS
    longer = tokenizer.chat_text([{"role": "user", "content": quoted * 1_000 + "the time to first token " * 2_000}])
    with pytest.raises(TooLongError) as raised:
        asyncio.run(tokenizer.encode_chat(longer, most_tokens=len(tokens)))
    assert raised.value.num_tokens > len(tokens), "of all parts together"


@pytest.mark.parametrize("text", ["Größe 東京 🙂", "in the a."])
@pytest.mark.parametrize("make", [byte_level_tokenizer, metaspace_tokenizer])
def test_token_bytes_join_to_the_text(make: object, text: str) -> None:
    assert callable(make)
    model = make()
    tokenizer = ChatTokenizer(model, None, model.get_vocab_size())
    tokens = model.encode(text, add_special_tokens=False).ids
    assert b"".join(tokenizer.token_bytes(token) for token in tokens).decode().removeprefix(" ") == text


def test_token_texts_of_parts_and_special_tokens() -> None:
    model = byte_level_tokenizer()
    tokenizer = ChatTokenizer(model, None, model.get_vocab_size())
    part = model.encode("東", add_special_tokens=False).ids[0]
    assert tokenizer.token_text(part) == "\ufffd"
    assert tokenizer.token_bytes(part) == "東".encode()[: len(tokenizer.token_bytes(part))]
    assert tokenizer.token_text(EOS_ID) == "<|eos|>"
    assert tokenizer.token_bytes(10**6) == b""


def test_special_tokens_are_shown_on_request(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert tokenizer.detokenizer(skip_special_tokens=True).push(EOS_ID) == ""
    assert tokenizer.detokenizer(skip_special_tokens=False).push(EOS_ID) == "<|eos|>"


def test_a_folder_without_a_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json; save"):
        ChatTokenizer.from_folder(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        ChatTokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        ChatTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        ChatTokenizer.from_folder(tmp_path)


def test_without_a_template_only_chat_fails(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    assert asyncio.run(tokenizer.encode("hi"))
    with pytest.raises(ValueError, match=r"no chat template; use /v1/completions"):
        tokenizer.chat_text(MESSAGES)


def chat_text(folder: Path, chat_template: object) -> str:
    """Text rendered by a template of ``tokenizer_config.json``."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    tokens = encoded_chat(ChatTokenizer.from_folder(folder), MESSAGES)
    text: str = byte_level_tokenizer().decode(tokens)
    return text


def test_templates_of_the_tokenizers_configuration(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert chat_text(tmp_path, "one {{ messages[0].role }}") == "one system"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert chat_text(tmp_path, named) == "plain"
    with pytest.raises(ValueError, match="tool_use"):
        chat_text(tmp_path, named[:1])


def test_the_vocabulary_is_the_models_where_it_says_so(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    own_size = byte_level_tokenizer().get_vocab_size()
    assert ChatTokenizer.from_folder(tmp_path).vocab_size == own_size
    (tmp_path / "config.json").write_text('{"vocab_size": 4096}')
    assert ChatTokenizer.from_folder(tmp_path).vocab_size == 4096
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 77}}')
    assert ChatTokenizer.from_folder(tmp_path).vocab_size == 77


@pytest.mark.parametrize("section", ["decoder", "normalizer", "pre_tokenizer", "post_processor"])
@pytest.mark.parametrize("value", [None, {}])
def test_a_section_may_be_empty(tmp_path: Path, section: str, value: object) -> None:
    """Any file that tokenizers accepts is legal; a refused one gets an error with a remedy."""
    content = json.loads(byte_level_tokenizer().to_str())
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content | {section: value}))
    try:
        theirs = Tokenizer.from_file(str(file))
    except Exception:
        with pytest.raises(ValueError, match="download it again"):
            ChatTokenizer.from_folder(tmp_path)
        return
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    tokens = asyncio.run(tokenizer.encode("time to token"))
    assert tokens == theirs.encode("time to token").ids
    assert detokenized(tokenizer, tokens) == theirs.decode(tokens)


def detokenized(tokenizer: ChatTokenizer, tokens: list[int]) -> str:
    """Text of the answer, token by token."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def test_without_a_decoder_words_are_joined_by_spaces(tmp_path: Path) -> None:
    words = ["the", "time", "to", "▁first", "token"]
    theirs = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="the"))
    theirs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer.from_folder(tmp_path)
    tokens = asyncio.run(tokenizer.encode("time to token"))
    assert detokenized(tokenizer, tokens) == "time to token"
    assert [tokenizer.token_text(token) for token in (1, 3)] == ["time", "▁first"]
