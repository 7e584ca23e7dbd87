"""Request bodies of OpenAI's chats and completions, checked by pydantic: supported fields and their ranges.

`pdserve.router.http.unsupported_fields` handles all other fields. Only values are checked here;
`pdserve.router.http.sampling` combines them with the model's limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, PrivateAttr, ValidationError
from pydantic_core import PydanticCustomError

from pdserve.contracts.request import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    REPETITION_PENALTIES,
)
from pdserve.router.http.errors import ApiError, refusal
from pdserve.router.http.json_body import Body, refusal_of
from pdserve.router.http.messages import Messages
from pdserve.router.http.unsupported_fields import CHAT, COMPLETION, Neutral, check_extra_fields
from pdserve.router.text.chat_template import PromptEnd

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024

_MAX_TOKEN_ID = 2**32 - 1
_TOKEN_IDS = list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKEN_ID)]]


def _as_list(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise PydanticCustomError("stop", "Input should be a string or a list of strings")
    if len(value) > MAX_STOP_STRINGS:
        raise PydanticCustomError("stop", f"There may be {MAX_STOP_STRINGS} stop strings at most")
    return [each for each in value if each != ""]  # which some clients send for none


def _prompts(value: object) -> list[str | list[int]]:
    """One text or its token ids, or a list of either."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(several) > MAX_CHOICES:
        raise PydanticCustomError("prompt", f"There may be {MAX_CHOICES} prompts at most")
    return [_prompt(one) for one in several]


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        return value
    try:
        return msgspec.convert(value, _TOKEN_IDS)  # of a million ids: no Python statement per id
    except msgspec.ValidationError:
        message = "Input should be a string, a list of token ids, or a list of either kind"
        raise PydanticCustomError("prompt", message) from None


def _bounded_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("logit_bias", f"There may be {MAX_BIASES} tokens at most")
    return value


def _token_id(name: str) -> str:
    if not (name.isascii() and name.isdigit() and len(name) <= len(str(_MAX_TOKEN_ID))):
        raise PydanticCustomError("logit_bias", "Names should be token ids, such as 42")
    return name


def _biases(value: dict[str, float]) -> dict[str, float]:
    if len({int(token) for token in value}) < len(value):
        raise PydanticCustomError("logit_bias", "Each token id should be there once")
    return value


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]

_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStringList = Annotated[list[_StopString], BeforeValidator(_as_list)]

_TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
TokenIds = Annotated[list[_TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]

_TokenIdText = Annotated[str, AfterValidator(_token_id)]
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
LogitBias = Annotated[dict[_TokenIdText, _Bias], BeforeValidator(_bounded_biases), AfterValidator(_biases)]


DEFAULT_COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of a text completion, as at OpenAI."""

NO_LIMIT = -1
"""Value of ``max_tokens`` for all that the context leaves, as in llama.cpp and LM Studio."""

MAX_DETOKENIZED = 2**17
"""Tokens of a request to ``/detokenize``."""
MAX_TOOLS = 512
"""Agents with several MCP servers offer more than OpenAI's 128."""
_NumLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
_NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
_TokenLimit = Annotated[int, Field(ge=NO_LIMIT, lt=2**31)]
_RepetitionPenalty = Annotated[float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])]
_OpenAiPenalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


class StreamOptions(Body):
    """Additional contents of a stream."""

    include_usage: bool | None = None
    """Send one more chunk, without choices, that holds the usage."""
    continuous_usage_stats: bool | None = None
    """Report usage so far in every chunk (vLLM)."""


class GenerationBody(Body):
    """Fields of both generating routes. Null means the default everywhere, as at OpenAI."""

    prompt_field: ClassVar[str]
    """Name of the field that holds the prompt."""
    may_fill_context: ClassVar[bool] = False
    """A limit of more tokens than the context leaves is no mistake, but none."""

    model: str | None = None
    max_tokens: _TokenLimit | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Tokens before which end-of-sequence tokens, stop tokens and stop strings are ignored (vLLM)."""
    n: _NumChoices | None = None
    best_of: _NumChoices | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: _RepetitionPenalty | None = None
    presence_penalty: _OpenAiPenalty | None = None
    frequency_penalty: _OpenAiPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """-1 is a new one for each request, as if left out."""
    stop: StopStringList | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    """Include the stop string or the stop token's text in the answer (vLLM)."""
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    """Return the ids of each choice's generated tokens in ``token_ids`` (vLLM)."""
    prompt_logprobs: _NumLogprobs | None = None
    """Return log probabilities of the prompt's tokens, and of this many alternatives to each (vLLM)."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    """Objectives of the request (``slo.tiers`` of the deployment); ``auto`` takes those of its key."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Requests share prefix-cache blocks only with requests of the same salt (vLLM)."""
    response_format: dict[str, object] | None = None
    """JSON, of a schema if one is given: see `pdserve.router.http.grammars`."""
    structured_outputs: dict[str, object] | None = None
    """The same, or a regular expression, a choice of texts, or a grammar (vLLM)."""

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_answers(self) -> int:
        """Answers to all prompts."""
        return self.num_choices

    @property
    def limit_field(self) -> str:
        """Name of the field that holds `token_limit`."""
        return "max_tokens"

    @property
    def token_limit(self) -> int | None:
        """Requested maximum tokens of one answer; ``None`` if the request sets none."""
        limit: int | None = getattr(self, self.limit_field)
        return None if limit == NO_LIMIT else limit

    @property
    def default_token_limit(self) -> int | None:
        """Maximum tokens of one answer if the request sets none; ``None`` for all that the context leaves."""
        return None

    @property
    def num_logprobs(self) -> int:
        """As defined in `pdserve.contracts.request.SamplingParams`."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int:
        """As defined in `pdserve.contracts.request.SamplingParams`."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def shows_tokens(self) -> bool:
        """Whether choices include tokens as well as text, so that a token without text needs a chunk, too."""
        return bool(self.return_token_ids) or self.num_logprobs >= 0

    @property
    def shows_prompt(self) -> bool:
        """Whether each answer includes the prompt's tokens."""
        return self.num_prompt_logprobs >= 0

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_usage_everywhere(self) -> bool:
        """Whether each chunk of a stream holds the usage so far."""
        return self.has_usage_chunk and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Check constraints that span several fields.

        Raises:
            ApiError: fields contradict each other, or one is not supported.
        """
        if self.best_of is not None and self.best_of != self.num_choices:
            raise refusal("best_of", "is supported only where it equals n: every answer is returned; leave it out")
        if self.stream and self.prompt_logprobs is not None:
            raise refusal("prompt_logprobs", "are not available in a stream")


_EFFORTS = {"auto": None, "default": None, "disable": "none", "disabled": "none", "off": "none", "on": "medium"}
"""Efforts as LiteLLM, Groq and others name them."""


def _effort(value: object) -> object:
    """Effort that LiteLLM writes as an object, too."""
    value = value["effort"] if isinstance(value, dict) and "effort" in value else value
    return _EFFORTS.get(value.lower(), value.lower()) if isinstance(value, str) else value


_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
ToolList = Annotated[list[dict[str, object]], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _nested(tool: dict[str, object]) -> dict[str, object]:
    """A tool of a chat, which may be written as for the responses API, without ``function`` around, or have no type."""
    if "function" in tool:
        return tool if "type" in tool else {"type": "function", **tool}
    if tool.get("type") == "function" and "name" in tool:
        return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}
    return tool


ChatTools = Annotated[ToolList, AfterValidator(lambda tools: [*map(_nested, tools)])]


class TemplatedBody(Body):
    """Fields that decide how a chat becomes a prompt."""

    chat_template_kwargs: dict[str, object] | None = None
    """Further variables of the chat template (vLLM)."""
    reasoning_effort: Annotated[_Effort, BeforeValidator(_effort)] = None
    add_generation_prompt: bool | None = None
    """False ends the prompt with the messages (vLLM)."""
    continue_final_message: bool | None = None
    """The answer continues the last message (vLLM)."""

    @property
    def prompt_end(self) -> PromptEnd:
        """
        Raises:
            ApiError: the fields contradict each other.
        """
        if not self.continue_final_message:
            return PromptEnd.MESSAGES if self.add_generation_prompt is False else PromptEnd.ANSWER
        if self.add_generation_prompt:
            raise refusal("add_generation_prompt", "contradicts continue_final_message; leave it out")
        return PromptEnd.LAST_MESSAGE


class ChatBody(GenerationBody, TemplatedBody):
    """Body of ``POST /v1/chat/completions``."""

    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: _TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: _NumLogprobs | None = None
    tools: ChatTools | None = None
    """Functions that the model may call; see `pdserve.router.http.tools`."""
    tool_choice: object = None
    """Also checked there."""
    parallel_tool_calls: bool | None = None

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    def check(self) -> None:
        super().check()
        if self.token_limit == 0:
            raise refusal(self.limit_field, "should be 1 at least, or -1 for no limit; or leave it out")
        if self.top_logprobs and self.logprobs is None:
            raise refusal("top_logprobs", "needs logprobs to be true")
        check_extra_fields(self.model_extra, CHAT)


class ConvertedBody(Body):
    """Body of another API, answered as the chat that it becomes. Fields that both have are checked as the chat's."""

    chat_model: ClassVar[type[ChatBody]] = ChatBody
    other_fields: ClassVar[Set[str]]
    """Fields of a chat that this API lacks, or has in another form."""
    neutral: ClassVar[Neutral]
    """Fields that are not supported."""

    _places: dict[str, str] = PrivateAttr(default_factory=dict)
    """Field of this body by that of the chat which has its value."""

    def as_chat(self) -> ChatBody:
        """The same request as a chat.

        Raises:
            ApiError: it has what this server does not support, named as in a chat.
        """
        raise NotImplementedError

    def _chat_of(self, converted: Mapping[str, object]) -> ChatBody:
        extra = self.model_extra or {}
        shared = ChatBody.model_fields.keys() - self.other_fields
        check_extra_fields({name: value for name, value in extra.items() if name not in shared}, self.neutral)
        fields = {name: value for name, value in extra.items() if name in shared}
        try:
            return self.chat_model.model_validate({**fields, **converted})
        except ValidationError as error:
            raise refusal_of(error) from error

    @contextmanager
    def naming_its_fields(self) -> Iterator[None]:
        """Name fields in refusals as the client does, not as the chat that it became."""
        try:
            yield
        except ApiError as error:
            head, tail = error.param or "", ""
            if head in (self.model_extra or {}):  # by its name already
                raise
            while head and head not in self._places:
                head, _, last = head.rpartition(".")
                tail = f".{last}{tail}"
            if head and error.param:
                place = self._places[head] + tail
                if error.detail.startswith(error.param):
                    error.detail = place + error.detail.removeprefix(error.param)
                error.param = place
            raise


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt_field = "prompt"

    prompt: Prompts
    """Prompts, answered as if each came in its own request; choices are numbered prompt by prompt."""
    echo: bool | None = None
    """Write the prompt before the answer, with its log probabilities if those of the answer are requested. With
    ``max_tokens`` 0, write only the prompt."""
    logprobs: _NumLogprobs | None = None

    @property
    def num_answers(self) -> int:
        return len(self.prompt) * self.num_choices

    @property
    def default_token_limit(self) -> int | None:
        return None if self.max_tokens == NO_LIMIT else DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        wanted = super().num_prompt_logprobs
        return max(wanted, self.num_logprobs) if self.echo else wanted

    @property
    def shows_prompt(self) -> bool:
        return bool(self.echo) or super().shows_prompt

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise refusal("max_tokens", "of 0 needs echo to be true; else it is at least 1")
        if self.num_answers > MAX_CHOICES:
            message = f"{len(self.prompt)} prompts with n = {self.num_choices} make more than {MAX_CHOICES} choices"
            raise ApiError(400, f"{message}; send several requests", param="n")
        check_extra_fields(self.model_extra, COMPLETION)


class TokenizeBody(TemplatedBody):
    """Body of ``POST /tokenize`` (vLLM): a prompt, or the messages of a chat."""

    may_be_empty = frozenset({"prompt"})
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: ChatTools | None = None
    """With messages, as in a chat."""
    add_special_tokens: bool | None = None
    """Of a prompt, true by default; a chat template writes them itself."""
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either a prompt or messages", param="prompt")
        check_extra_fields(self.model_extra, CHAT)


class DetokenizeBody(Body):
    """Body of ``POST /detokenize`` (vLLM)."""

    model: str | None = None
    tokens: Annotated[list[_TokenId], Field(max_length=MAX_DETOKENIZED, fail_fast=True)]
