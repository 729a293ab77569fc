"""`POST /tokenize` and `/detokenize`, vLLM's API: texts and conversations as token ids, and back."""

from collections.abc import Sequence

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from coordinator.api.body import Section, require_one
from coordinator.api.errors import HttpError
from coordinator.api.openai import Message
from coordinator.api.server import Server
from coordinator.sessions.request import Conversation
from worker.errors import ContextExceeded
from worker.platform.text import Json

_MIN_LIMIT = 32768  # tokens


class TokenizeBody(Section):
    """A text as it stands, or a conversation in the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True  # around a text; templates add their own
    messages: list[Message] | None = None
    tools: list[Json] = Field(default_factory=list)
    add_generation_prompt: bool = True
    chat_template_kwargs: Json = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _agree(self) -> "TokenizeBody":
        require_one(self, "prompt", "messages")
        return self

    def conversation(self) -> Conversation:
        """Return the conversation. Raises InputError for messages that cannot be served."""
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


async def tokenize(server: Server, body: TokenizeBody) -> Tokenized:
    """Return the token ids of a text or of a conversation."""
    inputs, most = server.inputs, _max_tokens(server)
    field = "messages" if body.prompt is None else "prompt"
    try:
        prompt = body.conversation() if body.prompt is None else body.prompt
        tokens = list(await inputs.prompt_ids(prompt, most=most, special=body.add_special_tokens))
    except ContextExceeded as error:  # the length of the text alone shows that it is too long
        raise HttpError(413, f"{field}: {error.message}", "too_many_tokens", param=field) from None
    _require_at_most(most, tokens, field)
    return {
        "count": len(tokens),
        "max_model_len": server.context,
        "tokens": tokens,
        "token_strs": await inputs.token_texts(tokens) if body.return_token_strs else None,
    }


async def detokenize(server: Server, body: DetokenizeBody) -> Detokenized:
    """Return the text of token ids."""
    _require_at_most(_max_tokens(server), body.tokens, "tokens")
    return {"prompt": await server.inputs.text_of(body.tokens)}


def _max_tokens(server: Server) -> int:
    """Return a limit above the model's context: clients count and cut texts that are a little too long."""
    return max(_MIN_LIMIT, 2 * server.inputs.spec.context)


def _require_at_most(most: int, tokens: Sequence[int], field: str) -> None:
    if len(tokens) > most:
        reason = f"{field}: expected at most {most} tokens, found {len(tokens)}"
        raise HttpError(413, reason, "too_many_tokens", param=field)
