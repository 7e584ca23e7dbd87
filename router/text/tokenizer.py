"""Tokenizer and chat template of the model, read from its folder without torch or transformers.

Encodes text to token ids; `pdserve.router.text.answer_text` decodes them. Long texts are encoded in a thread so that
other streams do not wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pdserve.kv_transfer.host_limits import usable_cores
from pdserve.model.config.tokenizer_config import TAGS, read_json, read_tokenizer_config, special_tokens
from pdserve.router.off_loop import in_turns, pause
from pdserve.router.text.answer_text import AnyDetokenizer, ByteDetokenizer, Detokenizer, MarkedDetokenizer
from pdserve.router.text.chat_template import MARK, OWN, ChatTemplate, PromptEnd
from pdserve.router.text.harmony import Harmony
from pdserve.router.text.tool_calls import HARMONY, ToolFormat, tool_format

MAX_INLINE_CHARS = 4096
"""Longest text that is encoded faster than it is handed to a thread and back."""

NUM_THREADS = max(1, len(usable_cores()) - 1)
"""Long texts encoded at a time; one core is left to the event loop."""

_CONTEXT_TOKENS = 8
"""Tokens before an answer that can change the text of its first token."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Space as sentencepiece writes it."""

_ANY_MARK = re.compile(f"{MARK}(?![02])(?:[13][0-9]{{0,2}})?")
"""What is left of an opening or closing mark, which stand around text of a special token that is only text and say
which. A template that cuts texts may leave one of them alone, or part of one. One that cuts both ends at fixed places
can leave neither, and the special token is one then: marks inside it would hide it from templates that look for it."""

_SEARCHED_CHARS = 1 << 13
"""Searched at a time: a search lets no other thread run."""

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
"""Byte that is not a character, as sentencepiece writes it."""


class TooLongError(ValueError):
    """A text has more tokens than it may have."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens are too many")
        self.num_tokens = num_tokens
        """At least."""


class ChatTokenizer:
    """Encodes prompts and decodes answers of one model."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int, tools: ToolFormat | None = None
    ) -> None:
        """Most callers want `from_folder`.

        Args:
            vocab_size: rows of the model's embedding; prompt token ids are below it.
            tools: how the model writes calls; None if the template says.

        Raises:
            ValueError: ``tools`` needs special tokens that the tokenizer lacks.
        """
        self._tokenizer = tokenizer
        self.template = template
        self.harmony: Harmony | None = None
        """Format of all answers, if it is that of gpt-oss."""
        if tools is HARMONY or (tools is None and template is not None and template.is_harmony):
            self.harmony = Harmony(tokenizer)
            tools = replace(HARMONY, harmony=self.harmony)
        self.tool_format = None
        """None if the model's template knows no tools."""
        if template is not None and "tools" in template.variables:
            self.tool_format = tools or tool_format(template.for_tools.source)
        self.vocab_size = vocab_size
        added = tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token for token, content in added.items() if content.special)
        self._tag_ids = frozenset(token for token, content in added.items() if content.content in TAGS)
        special_texts = {each.content for each in added.values() if each.special} - {""}
        self._special_text = re.compile(_any_of(special_texts) if special_texts else "(?!)")
        self._special_or_mark = re.compile(f"{self._special_text.pattern}|{_ANY_MARK.pattern}")
        self._marks = {
            text: (f"{MARK}1{number % 100:02}", f"{MARK}3{number % 100:02}")
            for number, text in enumerate(sorted(special_texts))
        }
        self._longest_found = max(map(len, [*special_texts, f"{MARK}100"]))
        self._bytes_of_token: dict[int, bytes] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenizer")
        decoders = _decoder_types(tokenizer)
        self._byte_of_char = _byte_level_alphabet() if "ByteLevel" in decoders else {}
        self._is_byte_level = decoders == {"ByteLevel"}
        self._has_decoder = bool(decoders)
        """Whether the tokenizer has a decoder; without one, text is the tokens joined by spaces."""

    @classmethod
    def from_folder(cls, folder: Path, tools: ToolFormat | None = None) -> ChatTokenizer:
        """Read ``tokenizer.json`` and, if present, the files beside it, as transformers' AutoTokenizer does.

        Raises:
            ValueError: the tokenizer is missing, or a file is broken.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json; save the model's tokenizer there with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{file} is not a tokenizer: {error}; download it again") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config, model_config = read_tokenizer_config(folder), read_json(folder / "config.json")
        _add_tokens(tokenizer, config)
        vocab_size = model_config.get("vocab_size", model_config.get("text_config", {}).get("vocab_size"))
        return cls(tokenizer, _read_template(folder, config), vocab_size or tokenizer.get_vocab_size(), tools)

    def check_ids(self, num_rows: int) -> str:
        """Return a warning about ids that the model's embedding of ``num_rows`` rows lacks; empty if it has all.

        Raises:
            ValueError: it lacks one that every prompt has.
        """
        highest = max(self._tokenizer.get_vocab().values(), default=0)
        if highest < num_rows:
            return ""
        try:
            text = self.chat_text([{"role": "user", "content": "a"}])
        except ValueError:
            text = ""
        said = f"its tokenizer has ids up to {highest}, and the embedding is of {num_rows} rows (vocab_size)"
        if max(self._encode(text, add_special_tokens=True), default=0) >= num_rows:
            raise ValueError(f"{said}; take tokenizer, config.json and weights from one and the same checkpoint")
        return f"{said}: prompts with an id beyond are refused"

    def chat_text(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        end: PromptEnd = PromptEnd.ANSWER,
    ) -> str:
        """Text of a conversation, special tokens included, for `encode_chat`. Special tokens in messages and tools are
        marked as text: only the template may write them.

        Args:
            tools, options, end: as in `ChatTemplate.render`.

        Raises:
            ValueError: the model has no chat template, or it refuses these messages.
        """
        if self.template is None:
            raise ValueError(
                "the model has no chat template; use /v1/completions, or put a chat_template.jinja into its folder"
            )
        return self.template.render(
            [self._marked(message) for message in messages],
            tools=[self._marked(tool) for tool in tools],
            options=self._marked(options or {}),
            end=end,
        )

    def _marked(self, value: Mapping[str, object]) -> dict[str, object]:
        """The same values, with special tokens in them marked as text."""

        def marked(value: object) -> object:
            if isinstance(value, str):
                return self._marked_text(value)
            if isinstance(value, Mapping):
                return {str(marked(key)): marked(each) for key, each in value.items()}
            if isinstance(value, list):
                return [marked(each) for each in value]
            return value

        return {key: each if key == "role" else marked(each) for key, each in value.items()}

    def _marked_text(self, text: str) -> str:
        """The text, with special tokens marked as text. Other threads run between pieces."""
        marked = ""
        done = 0
        for end in range(_SEARCHED_CHARS, len(text) + _SEARCHED_CHARS, _SEARCHED_CHARS):
            pause()
            pieces = []
            # One that begins before `end` is seen whole
            for match in self._special_text.finditer(text, done, end + self._longest_found - 1):
                if match.start() >= end:
                    break
                opening, closing = self._marks[match[0]]
                pieces += [text[done : match.start()].replace(MARK, OWN), opening, match[0], closing]
                done = match.end()
            pieces.append(text[done:end].replace(MARK, OWN))
            done = max(done, end)
            marked += "".join(pieces)  # grows in place, while a join of all would copy all at once
        return marked

    async def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int = sys.maxsize) -> list[int]:
        """Token ids of a text; optionally with the special tokens that the tokenizer adds around it.

        Raises:
            TooLongError: they are more than ``most_tokens``.
        """
        encode = partial(self._encode, text, add_special_tokens=add_special_tokens, most_tokens=most_tokens)
        return encode() if len(text) <= MAX_INLINE_CHARS else await self._in_thread(encode)

    async def encode_chat(self, text: str, *, most_tokens: int = sys.maxsize) -> list[int]:
        """Token ids of a `chat_text`.

        Raises:
            TooLongError: they are more than ``most_tokens``.
        """
        if MARK not in text:
            return await self.encode(text, add_special_tokens=False, most_tokens=most_tokens)
        return await self._in_thread(partial(self._encode_marked, text, most_tokens))

    async def _in_thread(self, encode: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, in_turns, encode)

    def _encode_marked(self, text: str, most_tokens: int) -> list[int]:
        """
        Raises:
            TooLongError: the beginning of the text has more than ``most_tokens``.
        """
        tokens: list[int] = []
        for part, tokenizer in self._parts(text):
            pause()
            goes_on = bool(tokens) and tokens[-1] not in self._added_ids
            left = most_tokens - len(tokens)
            try:
                tokens += self._encode_part(part, left, tokenizer, goes_on=goes_on)
            except TooLongError as error:
                raise TooLongError(len(tokens) + error.num_tokens) from None
            if len(tokens) > most_tokens:  # of many short parts
                raise TooLongError(len(tokens))
        return tokens

    def _parts(self, text: str) -> Iterator[tuple[str, Tokenizer]]:
        """Parts of a marked text, without marks, and what encodes them. A special token is only text where a mark of
        its own is beside it: the other may have been cut off. All between the template's own is joined."""
        literal, start, has_own = "", 0, False
        for match in chain(self._found(text), [None]):
            pause()
            begin, end = match.span() if match else (len(text), len(text))
            special = match[0] if match and match[0] in self._marks else ""
            if special:
                opening, closing = self._marks[special]
                after = _ANY_MARK.match(text, end)
                if not text.endswith(opening, 0, begin) and not (after and closing.startswith(after[0])):
                    has_own = True
                    continue
            if has_own:
                yield from [(literal, self._literal_tokenizer)] if literal else []
                yield text[start:begin], self._tokenizer
                literal = ""
            else:
                literal += text[start:begin]
            literal += special
            start, has_own = end, False
        if literal:
            yield literal, self._literal_tokenizer

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """Texts of special tokens, and marks. Other threads run between pieces."""
        done = 0
        for end in range(_SEARCHED_CHARS, len(text) + _SEARCHED_CHARS, _SEARCHED_CHARS):
            pause()
            for match in self._special_or_mark.finditer(text, done, end + self._longest_found - 1):
                if match.start() >= end:  # the next piece has more of it
                    break
                yield match
                done = match.end()
            done = max(done, end)

    def _encode_part(self, text: str, most_tokens: int, tokenizer: Tokenizer, *, goes_on: bool) -> list[int]:
        """Token ids of a part of a text. One that ``goes_on`` is encoded behind a line break, or behind a letter if it
        begins with white space: sentencepiece puts a space before each text. Where it makes one token of that and what
        follows, the space stays.

        Raises:
            TooLongError: they are more than ``most_tokens``.
        """
        encode = partial(self._encode, add_special_tokens=False, tokenizer=tokenizer)
        if goes_on and not self._is_byte_level:
            char = "a" if text[0].isspace() else "\n"
            before = self._tokens_before[char]
            try:
                tokens = encode(f"{char}{text}", most_tokens=most_tokens + len(before))
            except TooLongError as error:
                raise TooLongError(error.num_tokens - len(before)) from None
            if tokens[: len(before)] == before:
                return tokens[len(before) :]
        return encode(text, most_tokens=most_tokens)

    @cached_property
    def _tokens_before(self) -> dict[str, list[int]]:
        return {char: self._encode(char, add_special_tokens=False) for char in "a\n"}

    @cached_property
    def _literal_tokenizer(self) -> Tokenizer:
        """Knows no special tokens."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool,
        prompt_tokens: Sequence[int] = (),
        piece_tokens: int = 1,
        is_marked: bool = False,
    ) -> AnyDetokenizer:
        """Detokenizer of an answer.

        Args:
            prompt_tokens: prompt whose text the answer continues, if any.
            piece_tokens: as in `Detokenizer`.
            is_marked: whether parsers take parts out of the text, which has all tags then, and marks where the model
                has the format of `HarmonyParts`.
        """
        hidden_ids = self._special_ids if skip_special_tokens else frozenset[int]()
        if is_marked:
            hidden_ids -= self._tag_ids
        context = prompt_tokens[-_CONTEXT_TOKENS:]
        texts: Detokenizer | ByteDetokenizer
        if self._is_byte_level:
            texts = ByteDetokenizer(self.token_bytes, hidden_ids, context)
        else:
            texts = Detokenizer(self._tokenizer, hidden_ids, context, piece_tokens=piece_tokens)
        return MarkedDetokenizer(texts, self.harmony.marks) if is_marked and self.harmony else texts

    def token_text(self, token: int) -> str:
        """Text of a single token, with replacement characters for partial ones."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token, which need not form whole characters; empty for an unknown id."""
        content = self._bytes_of_token.get(token)
        if content is None:
            content = self._bytes_of_token[token] = self._find_bytes(token)
        return content

    def _find_bytes(self, token: int) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added_ids:
            return piece.encode()
        if all(char in self._byte_of_char for char in piece):
            return bytes(self._byte_of_char[char] for char in piece)
        if not self._has_decoder:
            return piece.encode()
        if _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()

    def _encode(
        self, text: str, *, add_special_tokens: bool, most_tokens: int = sys.maxsize, tokenizer: Tokenizer | None = None
    ) -> list[int]:
        """
        Args:
            tokenizer: of a part of a marked text; None for any other text.
        """
        own = OWN if tokenizer else MARK
        tokenizer = tokenizer or self._tokenizer
        if len(text) <= MAX_INLINE_CHARS:
            return tokenizer.encode(text.replace(own, MARK), add_special_tokens=add_special_tokens).ids
        # A text that is too long is refused by its beginning: all of it may take seconds, and hundreds of bytes a token
        length = max(most_tokens // 4, MAX_INLINE_CHARS)
        while True:
            # encode_batch, even for one text, releases the GIL; encode does not
            piece = text[:length].replace(own, MARK)
            (encoding,) = tokenizer.encode_batch_fast([piece], add_special_tokens=add_special_tokens)
            if len(encoding) > most_tokens:  # ids of all would be built at once
                raise TooLongError(len(encoding))
            if length >= len(text):
                return encoding.ids
            # As much as should be too long by a little, if the rest is like the beginning
            length = max(2 * length, length * most_tokens // max(len(encoding), 1) * 9 // 8)


def _any_of(texts: Collection[str]) -> str:
    """Pattern of the longest of these texts that begins at a character. Texts may share long beginnings: each character
    is compared once for all of them."""
    parts = []
    for _, group in groupby(sorted(filter(None, texts)), key=lambda text: text[0]):
        alike = list(group)
        beginning = os.path.commonprefix(alike)  # noqa: RUF071 - character by character
        ends = {text[len(beginning) :] for text in alike}
        parts.append(re.escape(beginning) + (_any_of(ends) if len(ends) > 1 else ""))
    return f"(?:{'|'.join(parts)}){'?' if '' in texts else ''}"


def _decoder_types(tokenizer: Tokenizer) -> set[str]:
    """Types of the decoder and its parts; empty without a decoder."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return {part["type"] for part in [decoder, *decoder.get("decoders", ())] if "type" in part}


def _byte_level_alphabet() -> dict[str, int]:
    """Character for each byte in byte-level BPE (GPT-2): printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only the files beside tokenizer.json have, or flag otherwise, as AutoTokenizer does."""
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokenizer.add_tokens([AddedToken(**token) for _, token in listed])
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    texts = [token["content"] if isinstance(token, dict) else token for token in more]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    wanted = dict.fromkeys([*special_tokens(config).values(), *texts])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in wanted if text not in special])


def _read_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """Chat template of the folder; files of their own come before tokenizer_config.json, as in transformers."""
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    named: Any = {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}
    named = named or config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(named, list):
        named = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
    if isinstance(named, str):
        named = {"default": named}
    if not named:
        return None
    if not isinstance(named, dict) or not all(isinstance(source, str) for source in named.values()):
        raise ValueError(f"the chat template in {folder}/tokenizer_config.json is not text; download it again")
    if "default" not in named:
        raise ValueError(f"no chat template in {folder} is named default; name one of {list(named)} so")
    return ChatTemplate(named["default"], special_tokens(config), named.get("tool_use", ""))
