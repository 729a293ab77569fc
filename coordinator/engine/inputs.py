"""Inputs: a model's configuration, tokenizer and template. Makes checked requests of what is asked; asks no node."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypedDict, TypeVar, Unpack

from coordinator.cluster.open import read_model
from coordinator.decoding.decode import suit
from coordinator.engine.bounded import GrammarTrials
from coordinator.engine.grammars import after_thought, calls_grammar, regex_grammar
from coordinator.engine.tokenizer import Tokenizer, find_tokenizer
from coordinator.sessions.request import (
    Conversation,
    Prompt,
    Request,
    RequestSpec,
    check_request,
    eos_ids,
    make_sampling,
    require_utf8,
    sampling_defaults,
)
from coordinator.sessions.text import Markers, TextParser
from protos.brigade_pb2 import Grammar, Sampling
from worker.compute.grammar import Grammars
from worker.compute.header import check_grammar
from worker.errors import FrameError, InputError, ModelError, QueueFull, SamplingError, WaitedTooLong
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.platform.threads import run_in_thread

T = TypeVar("T")

MOST_READ = 1024  # requests that wait to be read at most: as many as may be connected


class OneAtATime:
    """Calls that may take long, on a thread aside of the event loop, one at a time: they share what no two may use."""

    def __init__(
        self,
        max_waiting: int = MOST_READ,
        max_wait_s: float = 60.0,
        on_refused: Callable[[QueueFull], None] = lambda error: None,
    ) -> None:
        """At most `max_waiting` calls wait for their turn, each of them for `max_wait_s`."""
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._on_refused = on_refused
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    def another(self) -> "OneAtATime":
        """Turns with the same bounds, for calls that share nothing with these."""
        return OneAtATime(self._max_waiting, self._max_wait_s, self._on_refused)

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result, or its exception. Cancelled, it ends at once; the next call waits for this one yet.

        Raises:
            QueueFull: too many wait already. WaitedTooLong: it was not this call's turn in time.
        """
        try:
            await self._wait_turn()
        except QueueFull as error:
            self._on_refused(error)
            raise
        running = asyncio.ensure_future(run_in_thread(call))
        running.add_done_callback(self._end)
        await asyncio.wait([running])
        return running.result()

    async def _wait_turn(self) -> None:
        if self._turn.locked() and self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} requests wait to be read; try again later")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._turn.acquire()
        except TimeoutError:
            raise WaitedTooLong(f"waited {self._max_wait_s:g} s to be read; try again later") from None
        finally:
            self._num_waiting -= 1

    def _end(self, running: "asyncio.Future[T]") -> None:
        self._turn.release()
        if not running.cancelled():
            running.exception()  # it may have no reader any more


class Usual(TypedDict, total=False):
    """What holds for requests that do not say, and how long they may wait for being encoded: see `InputProcessor`."""

    sampling: Mapping[str, Any]
    max_tokens: int
    aside: OneAtATime


class InputProcessor:
    """Makes checked requests for one model. Encoding and rendering are done aside, one at a time."""

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
        self.defaults = {**sampling_defaults(checkpoint.generation_config), **(sampling or {})}
        self._grammars = Grammars(checkpoint.folder, spec.vocab_size)
        self._max_tokens = min(max_tokens or spec.context, spec.context)
        self._aside = aside or OneAtATime()
        self._trials = GrammarTrials(checkpoint.folder, spec.vocab_size, sorted(self.eos))
        self._trying = self._aside.another()  # a grammar that takes long holds up grammars only

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

    @property
    def eos(self) -> frozenset[int]:
        """The tokens that end an answer."""
        named = eos_ids(self.checkpoint.config, self.checkpoint.generation_config)
        return named | (self.tokenizer.eos if self.tokenizer else frozenset())

    async def make_request(self, asked: RequestSpec) -> Request:
        """Encode and check what is asked, before any node is troubled.

        Raises:
            InputError: the model cannot serve it. ModelError: its generation_config.json asks for what none can.
        """
        for stop in asked.stops:
            require_utf8("stop", stop)
        sampling = self._sampling(asked.sampling)
        if asked.is_constrained and isinstance(asked.prompt, Conversation):  # no thinking first, unless it is asked for
            arguments = {"enable_thinking": False, **asked.prompt.template_arguments}
            asked = replace(asked, prompt=replace(asked.prompt, template_arguments=arguments))
        prompt = await self.prompt_ids(asked.prompt, most=self.spec.context - 1)
        if asked.is_constrained:
            sampling.grammar.CopyFrom(await self._grammar(asked, prompt))
        spec = replace(self.spec, cache=asked.cache)
        request = Request(
            prompt=prompt,
            max_tokens=self._max_tokens if asked.max_tokens is None else asked.max_tokens,
            sampling=sampling,
            stops=asked.stops,
            eos=frozenset() if asked.ignore_eos else self.eos,
            decode=suit(asked.decode, asked.cache, spec),
            cache=asked.cache,
            repeat_guard=asked.repeat_guard,
            score_from=asked.score_from,
            tools=asked.tools,
            has_parallel_calls=asked.calls.is_parallel,
        )
        check_request(request, spec)
        return request

    def parser(self, request: Request) -> TextParser:
        """What makes text of the answer's tokens; it has taken in those that a journal knows."""
        if self.tokenizer is None:
            parser = TextParser()
        else:
            markers = self.tokenizer.markers(request.prompt)
            parser = self.tokenizer.stream(request.stops, markers, request.tools, request.has_parallel_calls)
        parser.recall(request.known, request.eos)
        return parser

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

    async def any_grammar(self) -> Grammar:
        """One that says nothing. It may take as long as the vocabulary takes to be read.

        Raises:
            InputError: this model can keep to none.
        """
        return await self._grammar(RequestSpec((), grammar=regex_grammar("(.|\n)*")), ())

    async def _grammar(self, asked: RequestSpec, prompt: tuple[int, ...]) -> Grammar:
        """What the answer must be, once it has been tried. Raises InputError if the model cannot keep to it."""
        field = "tool_choice" if asked.calls.are_forced else "response_format"
        if asked.ignore_eos or not self.eos:
            raise InputError(field, "expected an end-of-sequence token to end it, found none")
        try:
            return await self._trying.run(partial(self._tried, asked, prompt))
        except (FrameError, SamplingError) as error:
            raise InputError(field, error.message) from error

    def _tried(self, asked: RequestSpec, prompt: tuple[int, ...]) -> Grammar:
        """May take long."""
        eos = sorted(self.eos)
        spell = partial(self._grammars.spelled, eos=eos)
        markers = self.tokenizer.markers(prompt) if self.tokenizer else Markers(None, "normal")
        text = asked.grammar or ""
        if asked.calls.are_forced:
            text = calls_grammar(asked.calls, asked.tools, markers, spell)
        if markers.begins_in != "normal" or (asked.allows_thinking and markers.thought_begins):
            text = after_thought(text, markers, spell)
        grammar = Grammar(text=text, begins=len(prompt), eos=eos)
        check_grammar(grammar)
        self._trials.require(text)
        return grammar

    def _require_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(field, "this model has no tokenizer; give the prompt as token ids")
        return self.tokenizer

    def _sampling(self, asked: Mapping[str, Any]) -> Sampling:
        defaults = {name: value for name, value in self.defaults.items() if name not in asked}
        sampling = make_sampling(**asked)  # what was asked for is refused as such
        if not defaults:
            return sampling
        try:
            return make_sampling(**{**defaults, **asked})
        except InputError as error:
            raise ModelError(f"{self.checkpoint.folder}/generation_config.json: {error}") from error


def _encode(tokenizer: Tokenizer, prompt: Conversation | str, most: int | None, *, special: bool = True) -> list[int]:
    if isinstance(prompt, Conversation):
        return tokenizer.encode_chat(prompt.messages, prompt.tools, prompt.template_arguments, most=most)
    if most is not None:
        tokenizer.require_few(prompt, most)
    return tokenizer.encode(prompt, special=special)
