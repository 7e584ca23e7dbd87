"""Request bodies of the OpenAI-compatible API, checked by pydantic: the fields that are honoured, and their ranges.

Fields beyond these are judged by `pdserve.router.unsupported_fields`. Values only; what follows from them together with
the model's limits is decided in `pdserve.router.sampling`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, field_validator
from pydantic_core import PydanticCustomError

from pdserve.router.errors import ApiError
from pdserve.router.unsupported_fields import CHAT, CHAT_MESSAGE, COMPLETION, check_extra_fields

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20

DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of a text completion that names none, as at OpenAI."""

_TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _as_list(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("stop", "Input should be a string or a list of strings")
    return value


def _joined_text(value: object) -> object:
    """The text of a message whose content is a string or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "Input should be a string or a list of text parts")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise PydanticCustomError("content", 'Parts should be {"type": "text", "text": "..."}')
        texts.append(text)
    return "\n".join(texts)


def _one_prompt(value: object) -> str | list[int]:
    """A text or its token ids, alone or as the only one in a list."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise PydanticCustomError("prompt", "One prompt a request is supported; send each in its own")
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 2**32 for token in value):
        return value
    raise PydanticCustomError("prompt", "Input should be a string or a list of token ids")


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON can escape half of a surrogate pair, which is no character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: object) -> object:
        texts = value if isinstance(value, list) and value and isinstance(value[0], str) else [value]
        if not all(_is_text(text) for text in texts if isinstance(text, str)):
            raise PydanticCustomError("text", "Input should be Unicode text, without half a surrogate pair")
        return value


class StreamOptions(_Body):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None
    """One more chunk, without choices, that holds the usage."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk (vLLM)."""


class GenerationBody(_Body):
    """What both generating routes take. Null means the default everywhere, as it does at OpenAI."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_as_list)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    """Each choice carries the ids of its generated tokens in ``token_ids`` (vLLM)."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Requests share a prefix cache only with those of the same salt (vLLM)."""

    @property
    def token_limit(self) -> int | None:
        """Tokens to generate at most; ``None`` where the request says nothing."""
        return self.max_tokens

    @property
    def default_token_limit(self) -> int | None:
        """Tokens to generate at most where the request says nothing; ``None`` is all that the context leaves."""
        return None

    @property
    def num_logprobs(self) -> int:
        """As `pdserve.contracts.request.SamplingParams` counts them."""
        raise NotImplementedError

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_usage_everywhere(self) -> bool:
        """Whether each chunk of a stream says the usage so far."""
        return self.has_usage_chunk and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """What no single field can say.

        Raises:
            ApiError: fields contradict each other, or one is not supported.
        """
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")


class ChatMessage(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined_text, json_schema_input_type=str | list[dict[str, str]])]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """What the chat template sees."""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **named}


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        check_extra_fields(self.model_extra, CHAT)
        for index, message in enumerate(self.messages):
            check_extra_fields(message.model_extra, CHAT_MESSAGE, f"messages.{index}.")


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        str | list[int],
        PlainValidator(_one_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def default_token_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    def check(self) -> None:
        super().check()
        check_extra_fields(self.model_extra, COMPLETION)
