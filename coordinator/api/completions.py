"""`POST /v1/completions`: OpenAI's legacy completions of raw prompts, several at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired, cast

from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from coordinator.api.answers import MIN_LOGPROB, Figures, Usage, all_figures, openai_usage
from coordinator.api.body import UNSUPPORTED, Sampled, StreamOptions, Texts, Unsupported, read_body
from coordinator.api.openai import Finish, OpenAIAnswer, grammar_of
from coordinator.api.server import Server
from coordinator.api.sse import DONE, data, respond
from coordinator.decoding.decode import Decode
from coordinator.engine.engine import Engine, prepare_choices
from coordinator.sessions.output import Output, Scored, Token
from coordinator.sessions.request import Request as EngineRequest
from coordinator.sessions.request import RequestSpec
from coordinator.sessions.text import TextParser
from worker.errors import InputError

Json = dict[str, Any]
RawPrompt = str | tuple[int, ...]

_MAX_CHOICES = 128  # of one request, all prompts together


def prompts_of(value: Any) -> list[RawPrompt]:
    """Return one prompt or several, each a text or its token ids. Raises ValueError for anything else."""
    if isinstance(value, str):
        return [value]
    if _are_ids(value) and value:
        return [tuple(value)]
    if isinstance(value, list) and value and all(isinstance(prompt, str) or _are_ids(prompt) for prompt in value):
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value]
    raise ValueError("expected a text, token ids, or a list of texts or of lists of token ids")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


_Prompts = BeforeValidator(prompts_of, json_schema_input_type=str | list[str] | list[int] | list[list[int]])


class CompletionBody(Sampled):
    """What may be asked."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED | {"suffix": ("",)}
    model: str | None = None
    prompt: Annotated[list[RawPrompt], _Prompts]
    max_tokens: int | None = Field(None, ge=0)
    stop: Texts | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=_MAX_CHOICES)
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    response_format: Json | None = None
    brigade: Json = Field(default_factory=dict)  # {"waterfall": true}

    @model_validator(mode="after")
    def _agree(self) -> "CompletionBody":
        if (self.best_of or 1) > self.n:
            raise InputError("best_of", f"expected at most n ({self.n}): this server does not choose among answers")
        if len(self.prompt) * self.n > _MAX_CHOICES:
            raise InputError("prompt", f"expected at most {_MAX_CHOICES} answers in all, prompts times n")
        if self.max_tokens == 0 and not self.scores_prompts:
            raise InputError("max_tokens", "expected at least 1, got 0; with echo and logprobs 0 scores the prompt")
        return self

    @property
    def scores_prompts(self) -> bool:
        """Whether the log-probabilities of the prompts' own tokens are asked for."""
        return self.echo and self.logprobs is not None

    def asks(self) -> list[RequestSpec]:
        """Return what is asked of each prompt."""
        chosen = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "logprobs": 0 if self.logprobs is None else 1 + self.logprobs,
        }
        return [
            self.asking(
                prompt,
                sampling=chosen,
                max_tokens=self.max_tokens,
                stops=tuple(self.stop or ()),
                grammar=grammar_of(self.response_format),
            )
            for prompt in self.prompt
        ]


class TextLogprobs(TypedDict):
    """Of each token; those of an echoed prompt come first, and its first token, which follows nothing, has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class Completion(TypedDict):
    """A whole answer, or an event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[Usage]
    brigade: NotRequired[Figures | list[Figures]]


@dataclass
class Choice:
    """One answer as it comes. With a `parser`, the place of each token in the text is found by it."""

    echoed: str = ""
    prompt: tuple[int, ...] = ()  # if its tokens are to be scored
    parser: TextParser | None = None
    eos: frozenset[int] = frozenset()
    scores: list[Scored] = field(default_factory=list)
    is_open: bool = False  # the echoed prompt is sent
    end: int = 0  # of the text so far, in characters

    @property
    def is_scored(self) -> bool:
        return len(self.scores) >= len(self.prompt) - 1

    def place(self, token: int) -> int:
        """Return where the next token begins."""
        assert self.parser is not None
        begin = self.end
        if token not in self.eos:  # which has no text
            self.end += len(self.parser.push(token))
        return begin


class CompletionAnswer(OpenAIAnswer):
    """The answers to the prompts of one request: `n` choices of the first prompt, then of the next one."""

    def __init__(self, body: CompletionBody, model: str) -> None:
        super().__init__(model, "cmpl")
        self._body = body
        self.choices: list[Choice] = []

    async def prepare(self, engine: Engine) -> Sequence[EngineRequest]:
        inputs, body = engine.inputs, self._body
        self.token_text = inputs.token_text
        requests: list[EngineRequest] = []
        for prompt, asked in zip(body.prompt, body.asks(), strict=True):
            spec = asked
            if body.scores_prompts:
                ids = await inputs.prompt_ids(prompt, most=inputs.spec.context - 1)
                decode = Decode("ar") if body.decode == "auto" else spec.decode
                spec = replace(spec, prompt=ids, decode=decode, score_from=1 if len(ids) > 1 else None)
            group = await prepare_choices(engine, spec, body.n)
            echoed = ""
            if body.echo:
                echoed = prompt if isinstance(prompt, str) else await inputs.text_of(prompt)
            for request in group:
                choice = Choice(echoed, request.prompt if body.scores_prompts else ())
                if body.logprobs is not None:
                    choice.parser = inputs.tokenizer.stream() if inputs.tokenizer else TextParser()
                    choice.eos = request.eos
                self.choices.append(choice)
            requests += group
        return requests

    def events(self, index: int, output: Output) -> Iterator[bytes]:
        choice = self.choices[index]
        choice.scores += output.scores
        if not choice.is_open and choice.is_scored:
            choice.is_open = True
            if choice.echoed or choice.prompt:
                yield data(self._about([self._choice(index, choice.echoed, self._prompt_logprobs(choice), None)]))
            choice.end = len(choice.echoed)
        if output.text or output.finish_reason or (choice.parser and output.tokens):
            logprobs = self._logprobs(choice, output.tokens)
            yield data(self._about([self._choice(index, output.text, logprobs, output.finish_reason)]))
        if output.finish_reason is not None:
            self.lasts[index] = output

    def end(self) -> Iterator[bytes]:
        if self._body.stream_options.include_usage:
            lasts = [self.lasts[index] for index in range(len(self.lasts))]
            yield data({**self._about([]), "usage": self._usage(lasts), "brigade": all_figures(lasts)})
        yield DONE

    def whole(self, outputs: Sequence[Sequence[Output]]) -> Completion:
        choices = []
        for index, choice_outputs in enumerate(outputs):
            choice = self.choices[index]
            choice.scores = [score for output in choice_outputs for score in output.scores]
            logprobs = self._prompt_logprobs(choice)
            choice.end = len(choice.echoed)
            tokens = [token for output in choice_outputs for token in output.tokens]
            answer = self._logprobs(choice, tokens)
            if logprobs and answer:
                answer = {
                    "tokens": logprobs["tokens"] + answer["tokens"],
                    "token_logprobs": logprobs["token_logprobs"] + answer["token_logprobs"],
                    "top_logprobs": logprobs["top_logprobs"] + answer["top_logprobs"],
                    "text_offset": logprobs["text_offset"] + answer["text_offset"],
                }
            text = choice.echoed + "".join(output.text for output in choice_outputs)
            choices.append(self._choice(index, text, answer, choice_outputs[-1].finish_reason))
        lasts = [choice_outputs[-1] for choice_outputs in outputs]
        return {**self._about(choices), "usage": self._usage(lasts), "brigade": all_figures(lasts)}

    def _usage(self, lasts: Sequence[Output]) -> Usage:
        """Return the usage of all prompts; the choices of one share its tokens."""
        n = self._body.n
        usages = [openai_usage(lasts[start : start + n]) for start in range(0, len(lasts), n)]
        return {
            "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
            "completion_tokens": sum(usage["completion_tokens"] for usage in usages),
            "total_tokens": sum(usage["total_tokens"] for usage in usages),
            "prompt_tokens_details": {
                "cached_tokens": sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
            },
        }

    def _about(self, choices: list[TextChoice]) -> Completion:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, text: str, logprobs: TextLogprobs | None, reason: str | None) -> TextChoice:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": cast(Finish | None, reason)}

    def _prompt_logprobs(self, choice: Choice) -> TextLogprobs | None:
        """Return those of an echoed prompt, if they are asked for."""
        if not choice.prompt:
            return None
        tokens = [score.token for score in choice.scores]
        return {
            "tokens": [self.token_text(token) for token in choice.prompt],
            "token_logprobs": [None, *(max(token.logprob, MIN_LOGPROB) for token in tokens)],
            "top_logprobs": [None, *map(self._top, tokens)],
            "text_offset": [min(choice.place(token), len(choice.echoed)) for token in choice.prompt],
        }

    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> TextLogprobs | None:
        if choice.parser is None:
            return None
        return {
            "tokens": [self.token_text(token.token) for token in tokens],
            "token_logprobs": [max(token.logprob, MIN_LOGPROB) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [choice.place(token.token) for token in tokens],
        }

    def _top(self, token: Token) -> dict[str, float]:
        """Return the likeliest tokens and the one that was taken; of two with one text the likelier one."""
        found: dict[str, float] = {}
        for each in (*token.alternatives, token):
            found.setdefault(self.token_text(each.token), max(each.logprob, MIN_LOGPROB))
        return found


async def completions(request: Request) -> Response:
    """Go on from texts or token ids as they stand, at once or as a stream of events."""
    server: Server = request.app.state.server
    body = await read_body(request, CompletionBody, server.limits.body_bytes)
    server.require_name(body.model)
    answer = CompletionAnswer(body, server.names[0])
    return await respond(request, answer, stream=body.stream, traced=bool(body.brigade.get("waterfall")))
