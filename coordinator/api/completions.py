"""`POST /v1/completions`: OpenAI's legacy completions of raw prompts, several at once."""

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, NotRequired

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from coordinator.api.answers import AnswerStats
from coordinator.api.body import UNSUPPORTED, RawPrompts, Unsupported, none_below
from coordinator.api.openai import MAX_CHOICES, CompletionUsage, Finish, OpenAIAnswer, OpenAIBody, OpenAIObject
from coordinator.api.server import Server
from coordinator.decoding.decode_options import Decode
from coordinator.engine.inputs import InputProcessor, numbered, prepare_choices
from coordinator.sessions.output import Output, Token
from coordinator.sessions.request import Request, RequestSpec, most_prompt
from worker.errors import InputError
from worker.platform.text import Json


class CompletionBody(OpenAIBody):
    """The body of `/v1/completions`."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED | {"suffix": ("",)}
    prompt: RawPrompts
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, none_below(0)] = None
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _agree(self) -> "CompletionBody":
        if (self.best_of or 1) > self.n:
            raise InputError("best_of", f"expected at most n ({self.n}): this server does not choose among answers")
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise InputError("prompt", f"expected at most {MAX_CHOICES} answers in all, prompts times n")
        if self.max_tokens == 0 and not self.scores_prompts:
            raise InputError("max_tokens", "expected at least 1, got 0; with echo and logprobs 0 scores the prompt")
        return self

    @property
    def scores_prompts(self) -> bool:
        """Whether the answer has the log-probabilities of the prompts' own tokens."""
        return self.echo and self.logprobs is not None

    def to_specs(self) -> list[RequestSpec]:
        """Return the engine's request for each prompt."""
        num_logprobs = 0 if self.logprobs is None else 1 + self.logprobs
        return [self.make_spec(prompt, logprobs=num_logprobs, max_tokens=self.max_tokens) for prompt in self.prompt]


class TextLogprobs(TypedDict):
    """One entry per token. An echoed prompt comes first; its first token follows nothing and has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class Completion(OpenAIObject):
    """The whole answer, or an event of a stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[CompletionUsage]
    brigade: NotRequired[AnswerStats | list[AnswerStats]]


@dataclass
class Choice:
    echoed: str = ""
    prompt: tuple[int, ...] = ()  # if its tokens are to be scored
    eos: frozenset[int] = frozenset()
    scores: list[tuple[float, dict[str, float]]] = field(default_factory=list)  # of each token, and the likeliest
    is_begun: bool = False  # the echoed prompt was sent
    end: int = 0  # of the text so far, in characters
    decoder: IncrementalDecoder = field(default_factory=lambda: getincrementaldecoder("utf-8")("replace"))

    def place(self, spelled: bytes) -> int:
        """Return where the next token begins in the text, or the character whose next bytes it has."""
        begin = self.end
        self.end += len(self.decoder.decode(spelled))
        return begin


class CompletionAnswer(OpenAIAnswer):
    """The answer to one request of completions: `n` choices of the first prompt, then of the next one."""

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionBody, model: str) -> None:
        super().__init__(body, model, "cmpl")
        self._body = body
        self.choices: list[Choice] = []
        self.token_text: Callable[[int], str] = str
        self.token_bytes: Callable[[int], bytes | None] = lambda token: f"{token},".encode()  # without a tokenizer

    async def prepare(self, inputs: InputProcessor) -> Sequence[Request]:
        body = self._body
        self.token_text = inputs.token_text
        if inputs.tokenizer:
            self.token_bytes = inputs.token_bytes
        requests: list[Request] = []
        for number, (prompt, spec) in enumerate(zip(body.prompt, body.to_specs(), strict=True)):
            with numbered(number, body.prompt):
                if body.scores_prompts:
                    ids = await inputs.prompt_ids(prompt, most=most_prompt(inputs.spec, spec.max_tokens))
                    decode = Decode("ar") if body.decode == "auto" else spec.decode
                    # One token has nothing to score: without an answer the request is refused for it.
                    has_scores = len(ids) > 1 or not spec.max_tokens
                    spec = replace(spec, prompt=ids, decode=decode, score_from=1 if has_scores else None)
                group = await prepare_choices(inputs, spec, body.n)
            echoed = ""
            if body.echo:
                echoed = prompt if isinstance(prompt, str) else await inputs.text_of(prompt)
            self.choices += [Choice(echoed, each.prompt if body.scores_prompts else (), each.eos) for each in group]
            requests += group
        return requests

    def chunks(self, index: int, output: Output) -> Iterator[Json]:
        choice = self.choices[index]
        choice.scores += [(score.token.logprob, self._top(score.token)) for score in output.scores]
        if not choice.is_begun and len(choice.scores) >= len(choice.prompt) - 1:
            choice.is_begun = True
            if choice.echoed or choice.prompt:
                logprobs = self._prompt_logprobs(choice)
                yield self.chunk(index=index, text=choice.echoed, logprobs=logprobs, finish_reason=None)
            choice.end = len(choice.echoed)
            choice.decoder.reset()
        if output.text or output.finish_reason or (self._body.logprobs is not None and output.tokens):
            logprobs = self._logprobs(choice, output.tokens)
            yield self.chunk(index=index, text=output.text, logprobs=logprobs, finish_reason=output.finish_reason)

    def join(self, parts: Sequence[Json]) -> Json:
        logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
        joined = {name: [each for one in logprobs for each in one[name]] for name in TextLogprobs.__annotations__}
        text = "".join(part["text"] for part in parts)
        return parts[-1] | {"text": text, "logprobs": joined if logprobs else None}

    def _prompt_logprobs(self, choice: Choice) -> TextLogprobs | None:
        """Return those of an echoed prompt, if they are wanted."""
        if not choice.prompt:
            return None
        begins = [choice.place(self.token_bytes(token) or b"") for token in choice.prompt]
        # What a tokenizer puts before a text, such as a token that begins it or a space, may not be echoed.
        unseen = max(0, choice.end - len(choice.echoed))
        return {
            "tokens": [self.token_text(token) for token in choice.prompt],
            "token_logprobs": [None, *(logprob for logprob, _ in choice.scores)],
            "top_logprobs": [None, *(top for _, top in choice.scores)],
            "text_offset": [min(max(0, begin - unseen), len(choice.echoed)) for begin in begins],
        }

    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> TextLogprobs | None:
        if self._body.logprobs is None:
            return None
        spelled = [b"" if token.token in choice.eos else self.token_bytes(token.token) or b"" for token in tokens]
        return {
            "tokens": [self.token_text(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [choice.place(each) for each in spelled],
        }

    def _top(self, token: Token) -> dict[str, float]:
        """Return the likeliest tokens and the one that was drawn; of two with the same text, the likelier one."""
        found: dict[str, float] = {}
        for each in (*token.alternatives, token):
            found.setdefault(self.token_text(each.token), each.logprob)
        return found


async def completions(server: Server, body: CompletionBody) -> CompletionAnswer:
    """Continue texts or token ids as they stand, at once or as a stream of events."""
    return CompletionAnswer(body, server.name_for(body.model))
