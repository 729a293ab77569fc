"""OpenAI's legacy completions: raw prompts, whose answers are told as they stand. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from coordinator.resident.ask import Ask
from coordinator.resident.channels import Delta
from coordinator.sessions.answer import Token
from coordinator.sessions.text import Text
from coordinator.shapes.answers import LEAST_LOGPROB, TokenText, summed_usage, total_usage
from coordinator.shapes.body import UNSUPPORTED, Sampled, StreamOptions, Texts, Unsupported
from coordinator.shapes.openai_chat import grammar_of
from worker.errors import InputError

Json = dict[str, Any]
RawPrompt = str | tuple[int, ...]

_SCORES = "how likely prompts are is told by /v1/score"
_MOST_CHOICES = 128  # of one request, all prompts together


def prompts_of(value: Any) -> list[RawPrompt]:
    """One prompt or several, each a text or its token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(token) is int for token in value):
            return [tuple(value)]
        prompts = [prompt if isinstance(prompt, str) else _ids(prompt) for prompt in value]
        if None not in prompts:
            return [prompt for prompt in prompts if prompt is not None]
    raise ValueError("expected a text, token ids, or a list of texts or of lists of token ids")


def _ids(prompt: Any) -> tuple[int, ...] | None:
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return tuple(prompt)
    return None


_Prompts = BeforeValidator(prompts_of, json_schema_input_type=str | list[str] | list[int] | list[list[int]])


class CompletionBody(Sampled):
    """What may be asked."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED | {"suffix": ("",)}
    model: str | None = None
    prompt: Annotated[list[RawPrompt], _Prompts]
    max_tokens: int | None = Field(None, ge=1)
    stop: Texts | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=_MOST_CHOICES)
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    response_format: Json | None = None
    brigade: Json = Field(default_factory=dict)  # {"waterfall": true}

    @field_validator("max_tokens", mode="before")
    @classmethod
    def _require_answers(cls, value: Any) -> Any:
        if value == 0:
            raise InputError("max_tokens", f"expected at least 1, got 0: {_SCORES}")
        return value

    @model_validator(mode="after")
    def _agree(self) -> "CompletionBody":
        if (self.best_of or 1) > self.n:
            raise InputError("best_of", f"expected at most n ({self.n}): this server does not choose among answers")
        if len(self.prompt) * self.n > _MOST_CHOICES:
            raise InputError("prompt", f"expected at most {_MOST_CHOICES} answers in all, prompts times n")
        if self.echo and self.logprobs is not None:
            raise InputError("echo", f"expected without logprobs: {_SCORES}")
        return self

    @property
    def wants_waterfall(self) -> bool:
        return bool(self.brigade.get("waterfall"))

    def asks(self) -> list[Ask]:
        """One of each prompt."""
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


@dataclass
class Choice:
    """One answer as it comes. With a `text`, each token's place in the answer is told by it."""

    echoed: str = ""
    text: Text | None = None
    eos: frozenset[int] = frozenset()
    end: int = field(init=False)  # of what is said so far, in characters

    def __post_init__(self) -> None:
        self.end = len(self.echoed)

    def places(self, tokens: Iterable[Token]) -> list[int]:
        """Where each of them begins."""
        assert self.text is not None
        found = []
        for token in tokens:
            found.append(self.end)
            if token.token not in self.eos:  # which says nothing
                self.end += len(self.text.push(token.token))
        return found


@dataclass(frozen=True)
class CompletionAnswer:
    """How one request's answers are told: `opening` and `chunk` in a stream, `whole` at once."""

    id: str
    model: str
    created: int  # seconds since 1970
    token_text: TokenText
    choices: Sequence[Choice]  # of the first prompt, then of the next one
    num_prompts: int

    def opening(self, index: int) -> Json | None:
        """A stream's first chunk of this choice, if the prompt is to be echoed."""
        echoed = self.choices[index].echoed
        return self._about([_choice(index, echoed, None, None)]) if echoed else None

    def chunk(self, index: int, delta: Delta) -> Json | None:
        """What a step added; None where nothing came of it yet."""
        logprobs = self._logprobs(index, [delta])
        if not (delta.piece.text or delta.piece.finish_reason or (logprobs and delta.piece.tokens)):
            return None
        return self._about([_choice(index, delta.piece.text, logprobs, delta.piece.finish_reason)])

    def closing(self, lasts: Mapping[int, Delta]) -> Json:
        """The chunk that tells the usage; `lasts` are the last deltas of all choices."""
        return self._about([]) | {"usage": self._usage([lasts[index] for index in range(len(lasts))])}

    def whole(self, answers: Sequence[Sequence[Delta]]) -> Json:
        """All deltas of every choice as one object."""
        choices = []
        for index, deltas in enumerate(answers):
            text = self.choices[index].echoed + "".join(delta.piece.text for delta in deltas)
            choices.append(_choice(index, text, self._logprobs(index, deltas), deltas[-1].piece.finish_reason))
        return self._about(choices) | {"usage": self._usage([deltas[-1] for deltas in answers])}

    def _usage(self, lasts: Sequence[Delta]) -> Json:
        each = len(lasts) // self.num_prompts
        return summed_usage([total_usage(lasts[start : start + each]) for start in range(0, len(lasts), each)])

    def _about(self, choices: Sequence[Json]) -> Json:
        about = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return about | {"choices": choices}

    def _logprobs(self, index: int, deltas: Sequence[Delta]) -> Json | None:
        choice = self.choices[index]
        if choice.text is None:
            return None
        tokens = [token for delta in deltas for token in delta.piece.tokens]
        return {
            "tokens": [self.token_text(token.token) for token in tokens],
            "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": choice.places(tokens),
        }

    def _top(self, token: Token) -> dict[str, float]:
        """The likeliest tokens and the one that was taken; of two that look alike the likelier one."""
        found: dict[str, float] = {}
        for each in (*token.alternatives, token):
            found.setdefault(self.token_text(each.token), max(each.logprob, LEAST_LOGPROB))
        return found


def _choice(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
