"""Frontend: a model's configuration, tokenizer and template. Makes checked requests of what is asked; asks no node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypedDict, Unpack

from coordinator.cluster.open import read_model
from coordinator.cluster.tokenizer import Tokenizer, find_tokenizer
from coordinator.decoding.decode import suit
from coordinator.resident.aside import OneAtATime
from coordinator.resident.ask import Ask, Conversation, Prompt, require_utf8
from coordinator.resident.calls import calls_grammar
from coordinator.resident.channels import Channels
from coordinator.resident.grammars import after_thought, regex_grammar
from coordinator.sessions.generation_config import eos_ids, sampling_defaults
from coordinator.sessions.markers import Markers
from coordinator.sessions.request import Request, check_request, make_sampling
from coordinator.sessions.text import TextStream, TokenIds
from protos.brigade_pb2 import Grammar, Sampling
from worker.compute.grammar import Grammars
from worker.compute.header import check_grammar
from worker.errors import FrameError, InputError, ModelError, SamplingError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec

_COMPILES_S = 5.0  # that a grammar may take, once it is its turn: what is to be encoded waits for it


@dataclass(frozen=True)
class Task:
    """A request that its model can serve, and what turns its tokens into text."""

    checkpoint: Checkpoint
    spec: ModelSpec
    request: Request
    tokenizer: Tokenizer | None
    defaults: Mapping[str, float]  # of the sampling, by the model's generation_config.json
    ask: Ask | None = None  # None for the request of a journal

    def stream(self) -> TextStream | TokenIds:
        return self.tokenizer.stream(self.request.stops) if self.tokenizer else TokenIds()

    def channels(self) -> Channels:
        """Takes the text apart: what is said, what is thought, what is to be called."""
        markers = self.tokenizer.markers(self.request.prompt) if self.tokenizer else None
        if self.ask is None:
            return Channels(markers, ())
        return Channels(markers, self.ask.tools, is_parallel=self.ask.calls.is_parallel)


class Usual(TypedDict, total=False):
    """What holds for requests that do not say, and how long they may wait for being encoded: see `Frontend`."""

    sampling: Mapping[str, Any]
    max_tokens: int
    aside: OneAtATime


class Frontend:
    """Checks requests for one model. Encoding and rendering are done aside, one at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        *,
        sampling: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        aside: OneAtATime | None = None,
    ) -> None:
        """Without a tokenizer prompts are token ids, and so is text.

        Args:
            sampling: for requests that do not say; above the model's own.
            max_tokens: of an answer whose request names no number; as many as there is room for if none is given.
            aside: bounds how many wait for being encoded, and how long.
        Raises:
            ModelError: generation_config.json is wrong.
        """
        self.checkpoint = checkpoint
        self.spec = spec
        self.tokenizer = tokenizer
        self._defaults = {**sampling_defaults(checkpoint.generation_config), **(sampling or {})}
        self._grammars = Grammars(checkpoint.folder, spec.vocab_size)
        self._max_tokens = min(max_tokens or spec.context, spec.context)
        self._aside = aside or OneAtATime()

    @classmethod
    async def read(
        cls, model: str, *, trust_remote_code: bool = False, needs_text: bool = True, **usual: Unpack[Usual]
    ) -> Self:
        """Read the model's configuration and tokenizer; no weights.

        Args:
            usual: see the arguments of the same names above.
        Raises:
            ModelError: there is no such model, or it cannot be read, or has no tokenizer though there `needs_text`.
        """
        checkpoint, spec = await read_model(model)
        find = Tokenizer if needs_text else find_tokenizer
        return cls(checkpoint, spec, find(checkpoint, trust_remote_code=trust_remote_code), **usual)

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    async def prepare(self, ask: Ask) -> Task:
        """Check what is asked, before any node is troubled.

        Raises:
            InputError: the model cannot serve it. ModelError: its generation_config.json asks for what none can.
        """
        for stop in ask.stops:
            require_utf8("stop", stop)
        defaults = {name: value for name, value in self._defaults.items() if name not in ask.sampling}
        sampling = self._sampling(ask, defaults)
        if ask.is_bound:
            ask = _calm(ask)
        prompt = await self.prompt_ids(ask.prompt, most=self.spec.context - 1)
        if ask.is_bound:
            sampling.grammar.CopyFrom(await self._grammar(ask, prompt, _COMPILES_S))
        spec = replace(self.spec, cache=ask.cache)
        request = Request(
            prompt=prompt,
            max_tokens=self._max_tokens if ask.max_tokens is None else ask.max_tokens,
            sampling=sampling,
            stops=ask.stops,
            eos=frozenset() if ask.ignore_eos else self.eos,
            decode=suit(ask.decode, ask.cache, spec),
            cache=ask.cache,
            repeat_guard=ask.repeat_guard,
            score_from=ask.score_from,
        )
        check_request(request, spec)
        return Task(self.checkpoint, spec, request, self.tokenizer, defaults, ask)

    async def text_ids(self, text: str, *, special: bool, most: int) -> list[int]:
        """The token ids of a text, with those that the tokenizer puts around it where `special`.

        Raises ContextExceeded for one that has plainly more than `most`.
        """
        tokenizer = self._require_tokenizer("prompt")
        require_utf8("prompt", text)
        return await self._aside.run(partial(_encode, tokenizer, text, most, special=special))

    async def text_of(self, tokens: Sequence[int]) -> str:
        """What the tokens say. Raises InputError for ids outside the vocabulary."""
        tokenizer = self._require_tokenizer("tokens")
        if outside := [token for token in tokens if not 0 <= token < self.spec.vocab_size]:
            raise InputError("tokens", f"expected token ids from 0 to {self.spec.vocab_size - 1}, found {outside[0]}")
        return await self._aside.run(lambda: tokenizer.decode(tokens))

    async def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """What each of them says by itself."""
        return await self._aside.run(lambda: [self.token_text(token) for token in tokens])

    def token_text(self, token: int) -> str:
        """What one token says; its number without a tokenizer."""
        return self.tokenizer.decode([token]) if self.tokenizer else str(token)

    def token_bytes(self, token: int) -> bytes | None:
        """Those that one token stands for, which may be a part of a character; None where the tokenizer hides them."""
        return self.tokenizer.token_bytes(token) if self.tokenizer else None

    async def prompt_ids(self, prompt: Prompt, *, most: int | None = None) -> tuple[int, ...]:
        """A prompt's token ids, in whatever form it comes.

        Raises:
            ContextExceeded: it has plainly more than `most`. InputError: there is no tokenizer or template for it.
        """
        if isinstance(prompt, tuple):
            return prompt
        if isinstance(prompt, str):
            require_utf8("prompt", prompt)
        tokenizer = self._require_tokenizer("prompt")
        return tuple(await self._aside.run(partial(_encode, tokenizer, prompt, most)))

    @property
    def eos(self) -> frozenset[int]:
        """The tokens that end an answer."""
        named = eos_ids(self.checkpoint.config, self.checkpoint.generation_config)
        return named | (self.tokenizer.eos if self.tokenizer else frozenset())

    async def any_grammar(self) -> Grammar:
        """One that says nothing. It may take as long as the vocabulary takes to be read.

        Raises:
            InputError: this model can keep to none.
        """
        return await self._grammar(Ask((), grammar=regex_grammar("(.|\n)*")), (), within_s=None)

    async def _grammar(self, ask: Ask, prompt: tuple[int, ...], within_s: float | None) -> Grammar:
        """What the answer must be, once it has been tried. Raises InputError if the model cannot keep to it."""
        field = "tool_choice" if ask.calls.are_forced else "response_format"
        if ask.ignore_eos or not self.eos:
            raise InputError(field, "expected an end-of-sequence token to end it, found none")
        try:
            return await self._aside.run(partial(self._compiled, ask, prompt), within_s)
        except (FrameError, SamplingError) as error:
            raise InputError(field, error.message) from error
        except TimeoutError:
            raise InputError(field, f"expected a grammar that compiles within {within_s:g} s") from None

    def _compiled(self, ask: Ask, prompt: tuple[int, ...]) -> Grammar:
        """May take long."""
        eos = sorted(self.eos)
        spell = partial(self._grammars.spelled, eos=eos)
        markers = self.tokenizer.markers(prompt) if self.tokenizer else Markers(None, "normal")
        text = calls_grammar(ask.calls, ask.tools, markers, spell) if ask.calls.are_forced else ask.grammar or ""
        if markers.begins_in != "normal" or (ask.wants_thought and markers.thought_begins):
            text = after_thought(text, markers, spell)
        grammar = Grammar(text=text, begins=len(prompt), eos=eos)
        check_grammar(grammar)
        self._grammars.guide(grammar).require_beginning()
        return grammar

    def _require_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(field, "this model has no tokenizer; give the prompt as token ids")
        return self.tokenizer

    def _sampling(self, ask: Ask, defaults: Mapping[str, float]) -> Sampling:
        make_sampling(**ask.sampling)  # what was asked for is refused as such
        try:
            return make_sampling(**{**defaults, **ask.sampling})
        except InputError as error:
            raise ModelError(f"{self.checkpoint.folder}/generation_config.json: {error}") from error


def _calm(ask: Ask) -> Ask:
    """The same without thinking before the answer, unless the client asks for it."""
    if not isinstance(ask.prompt, Conversation):
        return ask
    arguments = {"enable_thinking": False, **ask.prompt.template_arguments}
    return replace(ask, prompt=replace(ask.prompt, template_arguments=arguments))


def _encode(tokenizer: Tokenizer, prompt: Conversation | str, most: int | None, *, special: bool = True) -> list[int]:
    if isinstance(prompt, Conversation):
        return tokenizer.encode_chat(prompt.messages, prompt.tools, prompt.template_arguments, most=most)
    if most is not None:
        tokenizer.require_few(prompt, most)
    return tokenizer.encode(prompt, special=special)
