"""Anthropic's messages: the body as an Ask. Pure."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from coordinator.resident.ask import Ask, Calls, Conversation
from coordinator.resident.channels import ToolCall
from coordinator.resident.grammars import json_grammar
from coordinator.shapes.body import OF_OPENAI, UNSUPPORTED, Sampled, Section, Texts, Unsupported
from coordinator.shapes.turns import Said, as_messages, function_tool, one_if_text
from worker.errors import InputError

Json = dict[str, Any]


class TextBlock(Section):
    type: Literal["text"]
    text: str


class ThinkingBlock(Section):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Section):
    """Thoughts of another server's, which only that one can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Section):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


TextBlocks = Annotated[list[TextBlock], BeforeValidator(one_if_text(lambda text: {"type": "text", "text": text}))]


class ToolResultBlock(Section):
    """Whether it `is_error` no template can be told: the content says so."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field(default_factory=list)


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
Blocks = Annotated[list[Block], BeforeValidator(one_if_text(lambda text: {"type": "text", "text": text}))]


class Turn(Section):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    def said(self) -> Iterator[Said]:
        for block in self.content:
            match block:
                case TextBlock():
                    yield Said(self.role, text=block.text)
                case ThinkingBlock():
                    yield Said(self.role, thought=block.thinking)
                case ToolUseBlock():
                    yield Said(self.role, call=ToolCall(block.id, block.name, json.dumps(block.input)))
                case ToolResultBlock():
                    yield Said("tool", text="\n".join(part.text for part in block.content), call_id=block.tool_use_id)


class Tool(Section):
    """One that the client runs. Those that Anthropic runs have types of their own."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Json


class ToolChoice(Section):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None  # of the tool that must be called, with the type `tool`
    disable_parallel_tool_use: bool = False

    def calls(self) -> Calls:
        """Raises InputError for a tool without a name."""
        if self.type == "tool" and self.name is None:
            raise InputError("tool_choice.name", "expected the name of the tool that must be called, found none")
        only = self.name if self.type == "tool" else None
        return Calls(self.type in ("any", "tool"), only, not self.disable_parallel_tool_use)


class Thinking(Section):
    """A budget is no more than a wish: nothing here could keep it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Section):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Section):
    format: OutputFormat | None = None

    def grammar(self) -> str | None:
        """What the answer must be. Raises InputError for a schema that cannot be enforced."""
        return None if self.format is None else json_grammar(self.format.schema_, field="output_config.format")


class CountBody(Sampled):
    """What makes a prompt: what `/v1/messages/count_tokens` takes."""

    unsupported: ClassVar[Unsupported] = (
        UNSUPPORTED | OF_OPENAI | {"frequency_penalty": (0,), "output_format": (), "presence_penalty": (0,)}
    )
    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: TextBlocks = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: Json = Field(default_factory=dict)

    def conversation(self) -> Conversation:
        """Raises InputError for what is not supported and would change the answer."""
        if self.messages[-1].role == "assistant":
            raise InputError(
                "messages", "expected the last one to be the user's: an answer cannot be begun for the model"
            )
        system = (Said("system", text=block.text) for block in self.system)
        pieces = [*system, *(piece for turn in self.messages for piece in turn.said())]
        return Conversation(as_messages(pieces), self._tools(), self._thinking() | self.chat_template_kwargs)

    def _tools(self) -> tuple[Json, ...]:
        if self.tool_choice.type == "none":
            return ()
        return tuple(function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools)

    def _thinking(self) -> Json:
        """By the name that most templates know; what they do without it is the model's own choice."""
        if self.thinking is None or self.thinking.type not in ("enabled", "disabled"):
            return {}
        return {"enable_thinking": self.thinking.type == "enabled"}


class MessagesBody(CountBody):
    """What `/v1/messages` takes."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Texts = Field(default_factory=list)
    stream: bool = False

    def ask(self) -> Ask:
        """Raises InputError as `conversation` does."""
        return self.asking(
            self.conversation(),
            max_tokens=self.max_tokens,
            stops=tuple(self.stop_sequences),
            grammar=self.output_config.grammar(),
            calls=self.tool_choice.calls(),
        )
