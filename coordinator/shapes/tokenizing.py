"""Tokenizing, as vLLM's clients ask for it: texts and conversations as token ids, and back. Pure."""

from typing import Any

from pydantic import Field, model_validator

from coordinator.resident.ask import Conversation
from coordinator.shapes.body import Section
from coordinator.shapes.openai_chat import Message, as_template_message

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
        messages = tuple(as_template_message(message) for message in self.messages or ())
        arguments = {"add_generation_prompt": self.add_generation_prompt} | self.chat_template_kwargs
        return Conversation(messages, tuple(self.tools), arguments)


class DetokenizeBody(Section):
    """Token ids."""

    model: str | None = None
    tokens: list[int]
