"""OpenAI's answers as types: what `/openapi.json` promises of them. They are built elsewhere, plainly. Pure."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Finish = Literal["stop", "length", "tool_calls"]


class Told(BaseModel):
    """An object of which every field is named here."""

    model_config = ConfigDict(extra="forbid")


class PromptDetails(Told):
    cached_tokens: int


class Usage(Told):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Figures(Told):
    """What windows, recoveries and prefixes made of an answer."""

    steps: int
    tokens_per_step: float | None
    recoveries: int
    recovery_s: float
    reused_tokens: int
    waterfall: dict[str, Any] | None


class Ahead(Told):
    """Tokens that a window has decided ahead of the text: position and text of each."""

    fills: list[tuple[int, str]]


class TopLogprob(Told):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Told):
    content: list[TokenLogprob]
    refusal: None


class Function(Told):
    name: str
    arguments: str


class Call(Told):
    id: str
    type: Literal["function"]
    function: Function


class CallDelta(Call):
    index: int


class ChatMessage(Told):
    role: Literal["assistant"]
    content: str | None
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[Call] = []


class ChatChoice(Told):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Told):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    brigade: Figures | list[Figures]


class ChatDelta(Told):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[CallDelta] = []


class ChatChunkChoice(Told):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(Told):
    """An event of a stream; `usage` and `brigade` come with the last one, where they are asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    brigade: Figures | list[Figures] | Ahead | None = None


class TextLogprobs(Told):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Told):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class Completion(Told):
    """A whole answer, or an event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    brigade: Figures | list[Figures] | None = None


class ModelCard(Told):
    """The last three are Anthropic's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(Told):
    """The last three are Anthropic's."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


class ErrorBody(Told):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Told):
    error: ErrorBody


class Tokenized(Told):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Told):
    prompt: str


class Health(Told):
    status: str
    why: str = ""


class Versions(Told):
    brigade: str
    mlx: str
    mlx_lm: str
