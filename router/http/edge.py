"""Handlers of the routes that generate or tokenise, from a request's body to its response.

Chats, responses and messages are read as one kind of body, a chat; text completions have prompts. Each API has its
writer. `pdserve.router.http.app` routes to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import msgspec
from starlette.responses import JSONResponse, Response

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.router.cluster.cluster import Cluster
from pdserve.router.http.anthropic import MessagesBody, MessageWriter
from pdserve.router.http.asgi import cancel_on_disconnect
from pdserve.router.http.errors import ApiError, refusal
from pdserve.router.http.exchange import Exchange
from pdserve.router.http.grammars import after_reasoning, grammar_of, in_harmony
from pdserve.router.http.json_body import LARGE_BYTES
from pdserve.router.http.keys import Caller
from pdserve.router.http.messages import forms_of
from pdserve.router.http.responses import ResponsesBody, ResponseWriter
from pdserve.router.http.sampling import check_prompt_length, check_token_ids, sampling_params
from pdserve.router.http.schema import (
    ChatBody,
    CompletionBody,
    ConvertedBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
)
from pdserve.router.http.sse import EventStream, Writer
from pdserve.router.http.tools import Tools, check_tools, new_call_id, template_options, tools_of
from pdserve.router.http.writer import AnswerWriter
from pdserve.router.off_loop import Result, off_loop
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.text.answer import (
    Answer,
    AnswerEnd,
    AnswerParts,
    AnswerToken,
    Choice,
    Generation,
    Outbox,
    TextDelta,
)
from pdserve.router.text.answer_text import StopStrings
from pdserve.router.text.chat_template import PromptEnd
from pdserve.router.text.harmony import HarmonyParts
from pdserve.router.text.reasoning import CLOSING, OPENING, ReasoningParser
from pdserve.router.text.tokenizer import ChatTokenizer, TooLongError
from pdserve.router.text.tool_calls import whole_text
from pdserve.router.text.xml_calls import call_parser

PIECE_TOKENS = 64
"""Tokens decoded together where no reader needs them one by one."""

SALT_BYTES = 32
TOKEN_BYTES = 40
"""Memory of a prompt's token."""
SHOWN_BYTES = 256
"""Memory of each entry about such a token in an answer that shows the prompt."""
MAX_TOKENIZED_CHARS = 2**20
"""Longest text for ``/tokenize``."""
TOKENIZER_S = 10.0
"""Limit for a request for the tokenizer alone."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Handlers of the routes that generate or tokenise.

    Each raises `ApiError` if the request cannot be served as it is, `GenerationError` if the cluster cannot serve it,
    and `ClientDisconnect` if the client left before a whole answer was complete.
    """

    cluster: Cluster
    tokenizer: ChatTokenizer
    served_name: str
    keep_alive_s: float
    """Seconds between comments of a stream before token 0; 0 for none."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters of requests that do not say, by name; ``max_new_tokens`` limits answers without a limit."""
    tokenizer_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the request that has the tokenizer's turn."""
    outbox: Outbox = field(default_factory=Outbox)

    async def create_chat_completion(self, body: ChatBody, exchange: Exchange) -> Response:
        """Answer a conversation with the assistant's turn."""
        answer = await self._chat(body, exchange)
        writer = AnswerWriter(self.tokenizer, body, [answer], exchange.record.id, self.served_name)
        return await self._respond(body, exchange, [answer], writer)

    async def create_response(self, body: ResponsesBody, exchange: Exchange) -> Response:
        """Answer as the responses API does."""
        self._fill(body)  # the response tells
        chat, answer = await self._converted(body, exchange)
        writer = ResponseWriter(body, answer, exchange.record.id, self.served_name)
        return await self._respond(chat, exchange, [answer], writer)

    async def create_message(self, body: MessagesBody, exchange: Exchange) -> Response:
        """Answer as Anthropic's API does."""
        chat, answer = await self._converted(body, exchange)
        writer = MessageWriter(answer, chat.token_limit, exchange.record.id, self.served_name)
        return await self._respond(chat, exchange, [answer], writer)

    async def count_tokens(self, body: MessagesBody, exchange: Exchange) -> JSONResponse:
        """Tokens of the prompt that a message would have."""
        with body.naming_its_fields():
            chat = await self._aside(exchange, body.as_chat)
            self.check_model(chat.model)
            tools = await self._aside(exchange, partial(tools_of, chat, self.tokenizer.tool_format))
            tokens = await self._tokens(chat, exchange, tools.offered if tools else ())
        return JSONResponse({"input_tokens": len(tokens)})

    async def _converted(self, body: ConvertedBody, exchange: Exchange) -> tuple[ChatBody, Answer]:
        """The chat that a body of another API is, and its answer."""
        with body.naming_its_fields():
            chat = await self._aside(exchange, body.as_chat)
            return chat, await self._chat(chat, exchange)

    async def _chat(self, body: ChatBody, exchange: Exchange) -> Answer:
        max_model_len = await self._admit(body, exchange)
        tools = await self._aside(exchange, partial(tools_of, body, self.tokenizer.tool_format, exchange.grammar))
        if tools is not None:
            exchange.grammar = tools.grammar
        text = await self._aside(exchange, partial(self._chat_text, body, tools.offered if tools else ()))
        with _too_long(body, max_model_len):
            tokens = await self.tokenizer.encode_chat(text, most_tokens=max_model_len)
        new_parts = await self._aside(exchange, partial(self._new_parts, body, exchange, text, tokens, tools))
        spec = self._spec(body, exchange, max_model_len, tokens)
        context = tokens if body.prompt_end is PromptEnd.LAST_MESSAGE else ()
        return self._answer(body, spec, context=context, new_parts=new_parts)

    async def create_completion(self, body: CompletionBody, exchange: Exchange) -> Response:
        """Continue texts or token ids, one answer or more for each."""
        max_model_len = await self._admit(body, exchange)
        answers: list[Answer] = []
        for prompt in body.prompt:
            await asyncio.sleep(0)  # several are as long as a text that is tokenised in a thread
            if isinstance(prompt, str):
                with _too_long(body, max_model_len):
                    tokens = await self.tokenizer.encode(prompt, most_tokens=max_model_len)
            else:
                tokens = prompt
            spec = self._spec(body, exchange, max_model_len, tokens)
            echo = await off_loop(len(tokens), partial(self._echo, body, prompt, tokens)) if body.echo else None
            first_index = len(answers) * body.num_choices
            answers.append(self._answer(body, spec, first_index=first_index, context=tokens, echo=echo))
        writer = AnswerWriter(self.tokenizer, body, answers, exchange.record.id, self.served_name)
        return await self._respond(body, exchange, answers, writer)

    async def tokenize(self, body: TokenizeBody, exchange: Exchange) -> Response:
        """Token ids of a prompt, or of a chat as the model would be asked it."""
        body.check()
        self.check_model(body.model)
        await self._aside(exchange, partial(check_tools, body.tools or ()))
        tokens = await self._tokens(body, exchange, body.tools or ())
        texts = None
        if body.return_token_strs:
            texts = await off_loop(len(tokens), lambda: list(map(self.tokenizer.token_text, tokens)))
        counts = {"count": len(tokens), "max_model_len": self.cluster.max_model_len}
        content = msgspec.json.encode({**counts, "tokens": tokens, "token_strs": texts})
        return Response(content, media_type="application/json")

    async def tokenizer_info(self) -> JSONResponse:
        """Chat template and special tokens, for clients that render chats themselves (vLLM)."""
        if (template := self.tokenizer.template) is None:
            return JSONResponse({"chat_template": None})
        return JSONResponse({**template.special_tokens, "chat_template": template.source})

    async def detokenize(self, body: DetokenizeBody, exchange: Exchange) -> JSONResponse:
        """Text of token ids, special tokens included."""
        self.check_model(body.model)
        check_token_ids("tokens", body.tokens, self.tokenizer.vocab_size)
        async with asyncio.timeout(TOKENIZER_S), self._tokenizer_turn(exchange):
            text = await off_loop(len(body.tokens), partial(self.tokenizer.decode, body.tokens))
        return JSONResponse({"prompt": text})

    async def _tokens(
        self, body: ChatBody | TokenizeBody, exchange: Exchange, tools: Sequence[Mapping[str, object]] = ()
    ) -> list[int]:
        """Tokens of a prompt that nobody answers."""
        async with asyncio.timeout(TOKENIZER_S), self._tokenizer_turn(exchange):
            if isinstance(body, ChatBody) or body.messages is not None:
                text = await self._aside(exchange, partial(self._chat_text, body, tools))
                return await self.tokenizer.encode_chat(_tokenized(text, "messages"))
            text = _tokenized(body.prompt or "", "prompt")
            return await self.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)

    def _tokenizer_turn(self, exchange: Exchange) -> asyncio.Lock:
        """Count a request for the tokenizer alone to its key as others are; return what it holds meanwhile. They go one
        at a time, so that a prompt waits for one at most.

        Raises:
            ApiError: the key has nothing left.
        """
        if exchange.caller is not None:
            exchange.caller.check_left()
            exchange.caller.begin(1)
        return self.tokenizer_lock

    async def _aside(self, exchange: Exchange, work: Callable[[], Result]) -> Result:
        """Return ``work()``, run in a thread if the body is large."""
        return await off_loop(exchange.num_body_bytes, work, LARGE_BYTES)

    async def _admit(self, body: GenerationBody, exchange: Exchange) -> int:
        """Check the request as far as possible before reading the prompt; return the model's maximum length."""
        await self._aside(exchange, body.check)
        self._fill(body)
        exchange.grammar = await self._aside(exchange, partial(grammar_of, body))
        check_token_ids("logit_bias", map(int, body.logit_bias or ()), self.tokenizer.vocab_size)
        check_token_ids("stop_token_ids", body.stop_token_ids or (), self.tokenizer.vocab_size)
        self.check_model(body.model)
        max_model_len = self.cluster.max_model_len
        if max_model_len is None:
            raise ApiError(503, "no worker has joined the cluster yet; try again soon", headers={"Retry-After": "1"})
        caller = exchange.caller
        record = exchange.record
        record.tier = self._tier(body, caller)
        try:
            self.cluster.dispatcher.check_room(
                body.num_answers, tenant=record.tenant, tier=record.tier, arrived_s=record.arrived_s
            )
        except GenerationError as error:
            if error.status != 400:
                self.cluster.metrics.tenant_served(record.tenant, is_good=False)
            raise
        if caller is not None:
            caller.admit(body)
        return max_model_len

    def _fill(self, body: GenerationBody | ResponsesBody) -> None:
        for name, value in self.defaults.items():
            if getattr(body, name, 0) is None:
                setattr(body, name, value)

    def _tier(self, body: GenerationBody, caller: Caller | None) -> str:
        """Tier that the request names, or that of its key."""
        tiers = self.cluster.dispatcher.tiers
        allowed = tiers if caller is None else caller.key.tiers or (DEFAULT_TIER,)
        if len(tiers) == 1 or body.service_tier in (None, "auto", "standard_only"):
            return allowed[0]
        if body.service_tier not in allowed:
            remedy = f"use {', '.join(allowed)} or auto"
            raise refusal("service_tier", f"{body.service_tier!r} is not open to this request; {remedy}")
        return body.service_tier

    def check_model(self, name: str | None) -> None:
        """Check that requests may name the model so."""
        if name not in (None, "", self.served_name):
            message = f"the model `{name}` does not exist; this server has `{self.served_name}`"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _chat_text(self, body: ChatBody | TokenizeBody, tools: Sequence[Mapping[str, object]]) -> str:
        assert body.messages is not None
        options, refusals = template_options(body, self.tokenizer.template), list[ValueError]()
        for messages in forms_of(body.messages):
            try:
                text = self.tokenizer.chat_text(messages, tools=tools, options=options, end=body.prompt_end)
            except ValueError as error:
                refusals.append(error)
            else:
                return whole_text(text)  # arguments of calls are JSON of their own
        raise ApiError(400, str(refusals[0]), param="messages") from refusals[0]

    def _new_parts(
        self, body: ChatBody, exchange: Exchange, prompt: str, prompt_tokens: Sequence[int], tools: Tools | None
    ) -> Callable[[], AnswerParts | HarmonyParts] | None:
        """Parsers of a chat's answers; None if all of an answer is text. The grammar of the exchange gets room for what
        is no text."""
        harmony = self.tokenizer.harmony
        if harmony is None:
            reasoning = self._reasoning(body, prompt)
            if exchange.grammar is not None and reasoning is not None:
                exchange.grammar = after_reasoning(exchange.grammar, is_open=reasoning)
            return None if reasoning is None and tools is None else partial(_parts, reasoning, tools)
        begun = harmony.begun(prompt_tokens, self.tokenizer.token_text)
        has_tool_grammar = tools is not None and tools.grammar is not None
        if begun and has_tool_grammar:
            raise refusal("continue_final_message", "contradicts forced and strict tools with this model; leave it out")
        if exchange.grammar is not None and not begun and not has_tool_grammar:
            exchange.grammar = in_harmony(exchange.grammar, harmony)
        return partial(
            HarmonyParts,
            begun,
            new_call_id,
            tools and tools.offered,
            may_call_several=tools is None or tools.may_call_several,
        )

    def _reasoning(self, body: ChatBody, prompt: str) -> bool | None:
        """Whether an answer to the prompt begins inside reasoning; None if it has none."""
        template = self.tokenizer.template
        if template is None or CLOSING not in template.source or prompt.rstrip().endswith(CLOSING):
            return None
        if body.prompt_end is PromptEnd.LAST_MESSAGE:
            begun = str(body.messages[-1]["content"] or "")
            return True if begun.rfind(OPENING) > begun.rfind(CLOSING) else None
        return prompt.rstrip().endswith(OPENING)

    def _spec(
        self, body: GenerationBody, exchange: Exchange, max_model_len: int, prompt_tokens: Sequence[int]
    ) -> RequestSpec:
        """Check a prompt and combine it with the request's parameters."""
        if not prompt_tokens:
            raise ApiError(400, "the prompt is empty; it needs one token at least", param=body.prompt_field)
        check_token_ids(body.prompt_field, prompt_tokens, self.tokenizer.vocab_size)
        num_shown = body.num_choices * (2 + body.num_prompt_logprobs) if body.shows_prompt else 0
        exchange.hold(len(prompt_tokens) * (TOKEN_BYTES + num_shown * SHOWN_BYTES))
        caller, record = exchange.caller, exchange.record
        salt = body.cache_salt or ""
        grammar = exchange.grammar
        if caller is not None:
            if grammar is not None:
                caller.spend_grammar(grammar)
                grammar = caller.owned(grammar)
            caller.spend_prompt(len(prompt_tokens))
            cache_salt = caller.cache_salt(salt)
        else:
            cache_salt = blake2b(salt.encode(), digest_size=SALT_BYTES).digest() if salt else b""
        limits = (caller.key.max_tokens if caller else 0, int(self.defaults.get("max_new_tokens", 0)))
        return RequestSpec(
            prompt_tokens=tuple(prompt_tokens),
            sampling=sampling_params(
                body,
                len(prompt_tokens),
                max_model_len,
                most_tokens=min(filter(None, limits), default=0),
                grammar=grammar,
            ),
            arrived_s=record.arrived_s,
            request_id=record.id,
            num_choices=body.num_choices,
            cache_salt=cache_salt,
            tenant=record.tenant,
            tier=record.tier,
        )

    def _answer(
        self,
        body: GenerationBody,
        spec: RequestSpec,
        *,
        first_index: int = 0,
        context: Sequence[int] = (),
        echo: TextDelta | None = None,
        new_parts: Callable[[], AnswerParts | HarmonyParts] | None = None,
    ) -> Answer:
        """Build the answer to a prompt, without starting it.

        Args:
            first_index: index of the first choice in the response.
            context: prompt tokens whose text the answer continues.
            echo: prompt to write before the answer.
            new_parts: separates the parts of a choice's text.
        """
        shows_stop = bool(body.include_stop_str_in_output)
        is_read_token_by_token = body.stream or body.stop or body.num_logprobs >= 0 or new_parts
        choices = [
            Choice(
                first_index + index,
                self.tokenizer.detokenizer(
                    skip_special_tokens=body.skip_special_tokens is not False,
                    prompt_tokens=context,
                    piece_tokens=1 if is_read_token_by_token else PIECE_TOKENS,
                    is_marked=new_parts is not None,
                ),
                StopStrings(body.stop or (), are_shown=shows_stop),
                shows_stop_token=shows_stop,
                shows_tokens=body.shows_tokens,
                is_whole=not body.stream,
                min_tokens=spec.sampling.min_tokens,
                offset_chars=0 if echo is None else len(echo.text),
                parts=new_parts() if new_parts else None,
            )
            for index in range(body.num_choices)
        ]
        return Answer(spec, choices, echo)

    def _echo(self, body: CompletionBody, prompt: str | list[int], tokens: list[int]) -> TextDelta:
        """The prompt as the client sent it, with the offset of each token."""
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens is not False)
        echoed = []
        text = ""
        for token in tokens:
            echoed.append(AnswerToken(token, None, len(text)))
            text += detokenizer.push(token)
        text += detokenizer.flush()
        end: AnswerEnd | None = "length" if body.max_tokens == 0 else None
        return TextDelta(0, prompt if isinstance(prompt, str) else text, end, echoed, len(echoed))

    async def _respond(
        self, body: GenerationBody, exchange: Exchange, answers: Sequence[Answer], writer: Writer
    ) -> Response:
        """Run the answers and write them, whole or as a stream."""
        record, metrics = exchange.record, self.cluster.metrics
        record.started(answers)
        if body.stream:
            generation = Generation(self.cluster.dispatcher, answers, self.outbox)
            return EventStream(exchange, generation, writer, metrics, self.keep_alive_s)
        async with cancel_on_disconnect(exchange.receive):
            arrived = partial(metrics.token, record)
            with Generation(self.cluster.dispatcher, answers, self.outbox, arrived) as generation:
                while batch := await generation.next():
                    for delta in batch:
                        num_bytes = await off_loop(delta.num_echoed, partial(writer.add, delta))
                        exchange.hold(num_bytes)
        metrics.answered(record)
        return Response(await writer.whole(), media_type="application/json")


def _tokenized(text: str, field: str) -> str:
    """A text that is not too long for the tokenizer's turn."""
    if len(text) > MAX_TOKENIZED_CHARS:
        raise refusal(field, f"has {len(text)} characters; send {MAX_TOKENIZED_CHARS} at a time")
    return text


@contextmanager
def _too_long(body: GenerationBody, max_model_len: int) -> Iterator[None]:
    """Refuse a prompt that the tokenizer found to be too long."""
    try:
        yield
    except TooLongError as error:
        check_prompt_length(body, error.num_tokens, max_model_len, is_least=True)
        raise


def _parts(reasoning: bool | None, tools: Tools | None) -> AnswerParts:
    """Parsers of an answer. ``reasoning``: whether it begins inside reasoning; None if it has none."""
    return AnswerParts(
        None if reasoning is None else ReasoningParser(is_open=reasoning),
        call_parser(tools.style, new_call_id, tools.offered) if tools else None,
        may_call_several=tools is None or tools.may_call_several,
    )
