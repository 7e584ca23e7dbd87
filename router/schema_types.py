"""Types of single request fields that pydantic has no word for: how each is read and what it may hold.

Used by `pdserve.router.schema` alone. A mistake is a `PydanticCustomError`, which names the field to whoever made it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from pdserve.contracts.request import MAX_BIAS, MAX_BIASES, MAX_CHOICES, MAX_STOP_TOKEN_IDS

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024

_MAX_TOKEN_ID = 2**32 - 1


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


def _prompts(value: object) -> list[str | list[int]]:
    """A text or its token ids, or a list of either."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(several) > MAX_CHOICES:
        raise PydanticCustomError("prompt", f"There may be {MAX_CHOICES} prompts at most")
    return [_prompt(one) for one in several]


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        if not is_text(value):
            raise PydanticCustomError("text", NOT_TEXT)
        return value
    # Millions of ids are checked here: no statement for each
    if isinstance(value, list) and (not value or _are_token_ids(value)):
        return value
    raise PydanticCustomError("prompt", "Input should be a string, a list of token ids, or a list of either kind")


def _are_token_ids(values: list[object]) -> bool:
    numbers = [value for value in values if type(value) is int]
    return len(numbers) == len(values) and min(numbers) >= 0 and max(numbers) <= _MAX_TOKEN_ID


def _biases(value: dict[str, float]) -> dict[str, float]:
    if len({int(token) for token in value}) < len(value):
        raise PydanticCustomError("logit_bias", "Each token id should be there once")
    return value


NOT_TEXT = "Input should be Unicode text, without half a surrogate pair"


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON can escape half of a surrogate pair, which is no character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


MessageText = Annotated[str, BeforeValidator(_joined_text, json_schema_input_type=str | list[dict[str, str]])]

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]

_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStringList = Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_as_list)]

_TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
TokenIds = Annotated[list[_TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)]

_TokenIdText = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
LogitBias = Annotated[dict[_TokenIdText, _Bias], Field(max_length=MAX_BIASES), AfterValidator(_biases)]
