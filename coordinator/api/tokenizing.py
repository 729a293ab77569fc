"""`POST /tokenize` and `/detokenize`, as vLLM's clients ask: texts and conversations as token ids, and back."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from coordinator.api.body import Section, read_body
from coordinator.api.errors import JSONResponse, refuse
from coordinator.api.openai import Message
from coordinator.api.server import Server
from coordinator.api.sse import unless_left
from coordinator.sessions.request import Conversation
from worker.errors import ContextExceeded

_MIN_BOUND = 32768  # tokens

Json = dict[str, Any]


class TokenizeBody(Section):
    """A text as it stands, or a conversation in the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True  # around a text; templates have their own
    messages: list[Message] | None = None
    tools: list[Json] = Field(default_factory=list)
    add_generation_prompt: bool = True
    chat_template_kwargs: Json = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _agree(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        return self

    def conversation(self) -> Conversation:
        """Raises InputError for messages that cannot be served."""
        messages = tuple(message.to_template() for message in self.messages or ())
        arguments = {"add_generation_prompt": self.add_generation_prompt} | self.chat_template_kwargs
        return Conversation(messages, tuple(self.tools), arguments)


class DetokenizeBody(Section):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


async def tokenize(request: Request) -> Response:
    """The token ids of a text or of a conversation."""
    server: Server = request.app.state.server
    body = await read_body(request, TokenizeBody, server.limits.body_bytes)
    server.require_name(body.model)
    inputs, most = server.inputs, _max_tokens(server)
    field = "messages" if body.prompt is None else "prompt"
    try:
        if body.prompt is None:
            work = inputs.prompt_ids(body.conversation(), most=most)
            tokens = list(await unless_left(request, work))
        else:
            texts = inputs.text_ids(body.prompt, special=body.add_special_tokens, most=most)
            tokens = await unless_left(request, texts)
    except ContextExceeded as error:  # its length alone shows that it is too long
        raise refuse(413, f"{field}: {error.message}", "too_many_tokens", param=field) from None
    _require_few(tokens, most, field)
    answer: Tokenized = {
        "count": len(tokens),
        "max_model_len": server.context,
        "tokens": tokens,
        "token_strs": await unless_left(request, inputs.token_texts(tokens)) if body.return_token_strs else None,
    }
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """What token ids say."""
    server: Server = request.app.state.server
    body = await read_body(request, DetokenizeBody, server.limits.body_bytes)
    server.require_name(body.model)
    _require_few(body.tokens, _max_tokens(server), "tokens")
    answer: Detokenized = {"prompt": await unless_left(request, server.inputs.text_of(body.tokens))}
    return JSONResponse(answer)


def _max_tokens(server: Server) -> int:
    """Return a bound above the model's context: clients count and cut texts that are a little too long."""
    return max(_MIN_BOUND, 2 * server.inputs.spec.context)


def _require_few(tokens: Sequence[int], most: int, field: str) -> None:
    if len(tokens) > most:
        raise refuse(
            413, f"{field}: expected at most {most} tokens, found {len(tokens)}", "too_many_tokens", param=field
        )
