"""Open Responses: the body as an Ask, and what an answer echoes of it. Pure."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from coordinator.resident.ask import Ask, Calls, Conversation
from coordinator.resident.channels import ToolCall
from coordinator.resident.grammars import json_grammar
from coordinator.shapes.body import OF_OPENAI, UNSUPPORTED, Sampled, Section, Unsupported
from coordinator.shapes.turns import Said, as_messages, function_tool, one_if_text
from protos.brigade_pb2 import Sampling
from worker.errors import InputError

Json = dict[str, Any]

_NOTHING_STORED = "expected none: this server stores nothing; send the whole conversation as input"
_TOLD_BY_CHAT = "log-probabilities are only told by /v1/chat/completions"
_NO_LOGPROBS = f"expected none of message.output_text.logprobs: {_TOLD_BY_CHAT}"
_REFUSED = {
    "previous_response_id": _NOTHING_STORED,
    "conversation": _NOTHING_STORED,
    "prompt": _NOTHING_STORED,
    "background": "expected false: this server answers at once",
    "top_logprobs": f"expected 0: {_TOLD_BY_CHAT}",
}


class TextPart(Section):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ThoughtPart(Section):
    text: str


TextParts = Annotated[list[TextPart], BeforeValidator(one_if_text(lambda text: {"type": "text", "text": text}))]


class MessageItem(Section):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextParts


class CallItem(Section):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Section):
    type: Literal["function_call_output"]
    call_id: str
    output: TextParts


class ReasoningItem(Section):
    """Thoughts of another server's may be encrypted: nobody else can read them."""

    type: Literal["reasoning"]
    content: list[ThoughtPart] | None = None
    summary: list[ThoughtPart] = Field(default_factory=list)


def _type_of(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _type_of,
        custom_error_type="unsupported_item",
        custom_error_message="expected an item of type message, function_call, function_call_output or reasoning",
    ),
]
Items = Annotated[list[Item], BeforeValidator(one_if_text(lambda text: {"role": "user", "content": text}))]


class Tool(Section):
    """A function of the client's. This server has no tools of its own."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None


class OneTool(Section):
    """The one that must be called."""

    type: Literal["function"]
    name: str


class Format(Section):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: Json | None = Field(default=None, alias="schema")

    def grammar(self) -> str | None:
        """What the answer must be. Raises InputError for a schema that cannot be enforced."""
        if self.type == "json_schema":
            if self.schema_ is None:
                raise InputError("text.format.schema", "expected an object, found none")
            return json_grammar(self.schema_)
        return json_grammar() if self.type == "json_object" else None


class TextConfig(Section):
    format: Format = Format()


class Effort(Section):
    effort: str | None = None


class ResponsesBody(Sampled):
    """What may be asked. Fields that would change the answer and are not supported are refused by `ask`."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED | OF_OPENAI
    model: str | None = None
    input: Items = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | OneTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    reasoning: Effort | None = None
    stream: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: Json = Field(default_factory=dict)
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None

    def ask(self) -> Ask:
        """Raises InputError for what is not supported and would change the answer."""
        for name, why in _REFUSED.items():
            if getattr(self, name):
                raise InputError(name, why)
        if "message.output_text.logprobs" in (self.include or ()):
            raise InputError("include", _NO_LOGPROBS)
        penalties = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        return self.asking(
            self._conversation(),
            sampling={name: value for name, value in penalties.items() if value is not None},
            max_tokens=self.max_output_tokens,
            grammar=self.text.format.grammar(),
            calls=self._calls(),
        )

    def _calls(self) -> Calls:
        only = self.tool_choice.name if isinstance(self.tool_choice, OneTool) else None
        are_forced = only is not None or self.tool_choice == "required"
        return Calls(are_forced, only, self.parallel_tool_calls is not False)

    def echoed(self, sampling: Sampling) -> Json:
        """What a response tells of its request: what held for it, whatever was asked for."""
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "tools": [tool.model_dump() | {"strict": False} for tool in self.tools],
            "tool_choice": choice.model_dump() if isinstance(choice, OneTool) else choice or "auto",
            "parallel_tool_calls": self._calls().is_parallel,
            "text": self.text.model_dump(by_alias=True, exclude_none=True),
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1.0,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "metadata": self.metadata or {},
        }

    def _conversation(self) -> Conversation:
        instructions = () if self.instructions is None else (Said("system", text=self.instructions),)
        pieces = [*instructions, *(piece for item in self.input for piece in _said(item))]
        tools = () if self.tool_choice == "none" else self.tools
        return Conversation(
            as_messages(pieces),
            tuple(function_tool(tool.name, tool.description, tool.parameters) for tool in tools),
            self._effort() | self.chat_template_kwargs,
        )

    def _effort(self) -> Json:
        """By the names that templates know; what they do without it is the model's own choice."""
        if self.reasoning is None or self.reasoning.effort is None:
            return {}
        effort = self.reasoning.effort
        return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def _said(item: MessageItem | CallItem | CallOutputItem | ReasoningItem) -> Iterator[Said]:
    match item:
        case MessageItem():
            role = "system" if item.role == "developer" else item.role  # which no template knows
            yield from (Said(role, text=part.text) for part in item.content)
        case CallItem():
            yield Said("assistant", call=ToolCall(item.call_id, item.name, item.arguments))
        case CallOutputItem():
            yield Said("tool", text="\n".join(part.text for part in item.output), call_id=item.call_id)
        case ReasoningItem():
            yield from (Said("assistant", thought=part.text) for part in item.content or item.summary)
