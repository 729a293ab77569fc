"""InputProcessor: makes checked requests of what clients ask, with a model's configuration, tokenizer and template."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Self, TypedDict, TypeVar, Unpack

from coordinator.cluster.open import read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.decoding.decode_options import LOSSY, rotating, suit
from coordinator.engine.bounded import GrammarTrials
from coordinator.engine.caller import KEY_DIGEST, usual_priority
from coordinator.engine.grammars import (
    after_thought,
    arguments_grammars,
    calls_grammar,
    regex_grammar,
    text_or_calls_grammar,
)
from coordinator.engine.one_at_a_time import OneAtATime
from coordinator.engine.tokenizer import Tokenizer, find_tokenizer, is_begun
from coordinator.sessions.request import (
    AUTO_CALLS,
    FILTERS,
    PENALTIES,
    Calls,
    Conversation,
    Prompt,
    Request,
    RequestSpec,
    check_length,
    check_request,
    check_token_ids,
    eos_ids,
    make_sampling,
    most_prompt,
    require_text,
    sampling_defaults,
)
from coordinator.sessions.text import Markers, TextParser
from protos.brigade_pb2 import Grammar, Sampling
from worker.compute.grammar import Grammars
from worker.compute.header import check_grammar
from worker.errors import BrigadeError, FrameError, InputError, ModelError, SamplingError, WaitedTooLong, again
from worker.memory.history import common_prefix
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe

T = TypeVar("T")

_ANY_USER = {"role": "user", "content": "a"}
_SEARCH_S = 3.0  # for the tool at fault among many: other grammars wait meanwhile
_LONG = 1 << 18  # letters: a longer prompt is tokenized in another process, in a turn of its own
_MOST_STOP, _MOST_BREAKER = 4096, 256  # letters: streams would wait while long ones are searched or tokenized
REMEMBERED_S, _MOST_REMEMBERED = 300.0, 256  # refused grammars: agents send theirs with every turn


class Usual(TypedDict, total=False):
    """Defaults of requests, and the queue in which they are encoded: see `InputProcessor`."""

    sampling: Mapping[str, Any]
    max_tokens: int
    encoding: OneAtATime


class InputProcessor:
    """Makes checked requests for one model. Prompts are encoded one at a time, outside of the event loop."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        *,
        sampling: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        encoding: OneAtATime | None = None,
    ) -> None:
        """
        Args:
            tokenizer: None: prompts and texts are token ids.
            sampling: defaults of requests; they override the model's.
            max_tokens: default of requests; None: as many as there is room for.
            encoding: limits how long requests wait to be encoded.
        Raises:
            ModelError: generation_config.json is wrong, or the end of sequence in config.json.
        """
        self.checkpoint = checkpoint
        self.spec = spec = describe(checkpoint)
        self.tokenizer = tokenizer
        self.defaults = {**sampling_defaults(checkpoint.generation_config), **(sampling or {})}
        self._grammars = Grammars(checkpoint.folder, spec.vocab_size)
        self._max_tokens = min(max_tokens or spec.context, spec.context)
        self._encoding = encoding or OneAtATime()
        self._trials = GrammarTrials(checkpoint.folder, spec.vocab_size, sorted(self.eos))
        self._refused: dict[tuple[str, str], tuple[float, str]] = {}  # by key and grammar: until when, and why
        self._trying = self._encoding.another()  # a slow grammar holds up only grammars
        self._reading_long = self._encoding.another()  # a long prompt holds up only long prompts

    @classmethod
    async def read(cls, options: ClusterOptions, *, needs_text: bool = True, **usual: Unpack[Usual]) -> Self:
        """Read the configuration and tokenizer of the options' model, but no weights.

        Args:
            needs_text: fail for a model without a tokenizer.
            usual: see the arguments of the same names above.
        Raises:
            ModelError: there is no such model, or it cannot be read.
        """
        checkpoint, _ = await read_model(options.model, options.draft_model)
        find = Tokenizer if needs_text else find_tokenizer
        return cls(checkpoint, find(checkpoint, trust_remote_code=options.trust_remote_code), **usual)

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    @property
    def eos(self) -> frozenset[int]:
        """The tokens that end an answer."""
        named = eos_ids(self.checkpoint.config, self.checkpoint.generation_config)
        named |= self.tokenizer.eos if self.tokenizer else frozenset()
        return frozenset(token for token in named if 0 <= token < self.spec.vocab_size)

    async def make_request(self, asked: RequestSpec) -> Request:
        """Encode and check what is asked, before any node gets work.

        Raises:
            InputError: the model cannot serve it. ModelError: its generation_config.json has an impossible value.
        """
        for stop in asked.stops:
            require_text("stop", stop, _MOST_STOP)
        asked = await self._completed(asked)
        spec = replace(self.spec, cache=asked.cache)
        if (asked.score_from is not None or asked.pooling) and spec.needs_canvas:
            expected = "expected a model that scores and embeds tokens"
            raise InputError("prompt", f"{expected}; {spec.name} was trained for canvas only")
        check_token_ids("stop_token_ids", asked.stop_token_ids, spec.vocab_size)
        for breaker in asked.dry_sequence_breakers:
            require_text("dry_sequence_breakers", breaker, _MOST_BREAKER)
        decode = suit(asked.decode, asked.cache, spec)
        refines = decode.training is not None and decode.training.refinement is not None
        without = (*PENALTIES, *FILTERS) if refines else PENALTIES if decode.kind == "canvas" else ()
        sampling = self._sampling(asked.sampling, without=without)
        prompt = await self.prompt_ids(asked.prompt, most=most_prompt(spec, asked.max_tokens), calls=asked.calls)
        not_enforced = await self._constrain(asked, prompt, sampling, can_offer=decode.kind not in LOSSY)
        eos = (frozenset() if asked.ignore_eos else self.eos) | set(asked.stop_token_ids)
        await self._name_tokens(sampling, asked, len(prompt), eos)
        request = Request(
            prompt=prompt,
            max_tokens=self._max_tokens if asked.max_tokens is None else asked.max_tokens,
            sampling=sampling,
            stops=asked.stops,
            eos=eos,
            decode=decode,
            cache=asked.cache,
            repeat_guard=asked.repeat_guard,
            priority=usual_priority() if asked.priority is None else asked.priority,
            score_from=asked.score_from,
            pool_from=None if asked.pooling is None else 0 if asked.pooling == "mean" else max(0, len(prompt) - 1),
            tools=asked.tools,
            calls=asked.calls,
            continues_text=not isinstance(asked.prompt, Conversation) or is_begun(asked.prompt.messages),
            not_enforced=not_enforced,
            turn_ends=await self._turn_ends(asked, prompt) if len(prompt) > spec.rows_that_can_be_cut else (),
        )
        check_request(request, spec)
        return request

    async def _completed(self, asked: RequestSpec) -> RequestSpec:
        """Return what is asked with what depends on the model's template. Raises InputError as `_num_system`."""
        if asked.is_constrained and isinstance(asked.prompt, Conversation):  # do not think first, unless asked to
            arguments = {"enable_thinking": False, **asked.prompt.template_arguments}
            asked = replace(asked, prompt=replace(asked.prompt, template_arguments=arguments))
        if asked.keeps_system:
            asked = replace(asked, cache=rotating(asked.cache.size, await self._num_system(asked)))
        return asked

    async def _name_tokens(self, sampling: Sampling, asked: RequestSpec, num_prompt: int, eos: Iterable[int]) -> None:
        """Put the tokens that some sampling parameters look at into `sampling`."""
        if sampling.min_tokens:
            sampling.begins, sampling.ends[:] = num_prompt, sorted(eos)
        if sampling.xtc_probability:  # the tokens that mlx-lm's own commands except
            sampling.xtc_special_tokens[:] = sorted(self.eos | await self._last_tokens(["\n"]))
        if sampling.dry_multiplier:
            sampling.dry_breakers[:] = await self.dry_breakers(asked)

    async def dry_breakers(self, asked: RequestSpec) -> list[int]:
        """Return the tokens that no repetition goes beyond, sorted, as DRY's author finds them."""
        texts = [f"a{breaker}" for breaker in asked.dry_sequence_breakers]  # a text begins otherwise than it goes on
        return sorted(await self._last_tokens(texts))

    def parser(self, request: Request) -> TextParser:
        """Return a parser for the answer's tokens, after it has processed those of a journal."""
        if self.tokenizer is None:
            parser = TextParser()
        else:
            markers = self.tokenizer.markers(request.prompt, request.calls)
            parser = self.tokenizer.stream(
                *(request.stops, markers, request.tools, request.calls, request.sampling.min_tokens),
                continues_text=request.continues_text,
            )
        parser.recall(request.known, request.eos)
        return parser

    async def prompt_ids(
        self, prompt: Prompt, *, most: int | None = None, special: bool = True, calls: Calls = AUTO_CALLS
    ) -> tuple[int, ...]:
        """Return a prompt's token ids; `special` adds the tokens that the tokenizer puts around any text.

        Args:
            calls: what a conversation's answer may call.
        Raises:
            ContextExceeded: it has more than `most` tokens.
            InputError: there is no tokenizer or template for it, or it is unsuitable or takes too much.
        """
        if isinstance(prompt, tuple):
            return prompt
        if isinstance(prompt, str):
            require_text("prompt", prompt)
        tokenizer = self._require_tokenizer("prompt")
        is_long = _num_letters(prompt) > _LONG
        encode = partial(tokenizer.encode_prompt, prompt, calls=calls, special=special, apart=is_long)
        ids = tuple(await (self._reading_long if is_long else self._encoding).run(encode))
        if most is not None:
            check_length(len(ids), most, self.spec)
        return ids

    async def _num_system(self, asked: RequestSpec) -> int:
        """Return with how many tokens the conversation begins whatever its user says. Raises InputError for none."""
        prompt = asked.prompt
        if not isinstance(prompt, Conversation) or not (system := _system_of(prompt)):
            expected = "expected a conversation that begins with a system prompt, found none"
            raise InputError("kv_keep", f"{expected}; give a number of tokens")

        async def ids(*messages: Mapping[str, Any]) -> Sequence[int]:
            some = replace(prompt, messages=messages)
            return await self.prompt_ids(some, most=self.spec.context - 1, calls=asked.calls)

        later = {"role": "assistant", "content": "a"}, _ANY_USER
        num = common_prefix(*[await ids(*system, {"role": "user", "content": text}, *later) for text in "ab"])
        texts = [await ids({"role": "system", "content": text}, _ANY_USER, *later) for text in "ab"]
        if common_prefix(*texts) >= num:  # some templates put the system prompt before the last message of the user
            expected = "expected a chat template that begins with the system prompt, found another"
            raise InputError("kv_keep", f"{expected}; give a number of tokens")
        return num

    async def _turn_ends(self, asked: RequestSpec, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths at which later prompts may part from these ids of a conversation, ascending.

        They are where its system prompt ends, its last message of the user (templates leave out the thoughts of earlier
        turns), and its last message.
        """
        prompt = asked.prompt
        if not isinstance(prompt, Conversation):
            return ()
        messages = prompt.messages
        last = max((n for n, message in enumerate(messages, 1) if message["role"] == "user"), default=0)
        beginnings = [(*_system_of(prompt), _ANY_USER), *(messages[:end] for end in {last, len(messages)} if end)]
        arguments = {**prompt.template_arguments, "add_generation_prompt": False}
        lengths = set()
        for some in beginnings:
            with suppress(InputError):  # not every template takes every beginning
                beginning = replace(prompt, messages=some, template_arguments=arguments)
                lengths.add(common_prefix(ids, await self.prompt_ids(beginning, calls=asked.calls)))
        return tuple(sorted(lengths - {0, len(ids)}))

    async def _last_tokens(self, texts: Sequence[str]) -> set[int]:
        """Return the last token of each text; none without a tokenizer."""
        if (tokenizer := self.tokenizer) is None:
            return set()
        return await self._encoding.run(lambda: {token for text in texts for token in tokenizer.encode(text)[-1:]})

    async def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens. Raises InputError for ids outside the vocabulary."""
        tokenizer = self._require_tokenizer("tokens")
        check_token_ids("tokens", tokens, self.spec.vocab_size)
        return await self._encoding.run(lambda: tokenizer.decode(tokens))

    async def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token by itself."""
        return await self._encoding.run(lambda: [self.token_text(token) for token in tokens])

    def token_text(self, token: int) -> str:
        """Return the text of one token; its number without a tokenizer."""
        return self.tokenizer.token_text(token) if self.tokenizer else str(token)

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of one token, maybe a part of a character; None where the tokenizer does not reveal them."""
        return self.tokenizer.token_bytes(token) if self.tokenizer else None

    async def any_grammar(self) -> Grammar:
        """Return a grammar that matches any text. The first call reads the vocabulary, which may take seconds.

        Raises:
            InputError: this model cannot follow a grammar.
        """
        grammar, _ = await self.grammar(RequestSpec((), grammar=regex_grammar("(.|\n)*")), ())
        return grammar

    async def _constrain(
        self, asked: RequestSpec, prompt: tuple[int, ...], sampling: Sampling, *, can_offer: bool
    ) -> tuple[str, ...]:
        """Put the answer's grammar into `sampling`, if it has one; return what of schemas that leaves out.

        The calls that are offered keep to a grammar only if their decoder `can_offer` that, and it can be made.
        Raises InputError if a strict tool's cannot.
        """
        has_calls = self.tokenizer is not None and self.tokenizer.has_generic_calls(asked.calls)
        can_end = bool(self.eos) and not asked.ignore_eos and not sampling.min_tokens
        is_offered = bool(asked.tools) and has_calls and can_offer and can_end
        if asked.is_constrained or is_offered:
            try:
                grammar, not_enforced = await self.grammar(asked, prompt)
                sampling.grammar.CopyFrom(grammar)
                return tuple(not_enforced)
            except (InputError, WaitedTooLong):
                if asked.is_constrained or any(tool["function"].get("strict") is True for tool in asked.tools):
                    raise
        return ("schema",) if asked.tools else ()

    async def grammar(self, asked: RequestSpec, prompt: tuple[int, ...]) -> tuple[Grammar, list[str]]:
        """Return the grammar of the answer, after a trial compilation, and the keywords of schemas that it leaves out.

        Raises:
            InputError: the grammar cannot be enforced.
        """
        field = "tool_choice" if asked.calls.are_forced else "response_format" if asked.is_constrained else "tools"
        if asked.ignore_eos or not self.eos:
            expected = (
                "none with ignore_eos" if asked.ignore_eos else "none of a model without an end-of-sequence token"
            )
            raise InputError(field, f"expected {expected}, which ends what a grammar allows")
        try:
            grammar, not_enforced = await self._trying.run(partial(copy_context().run, self._tried, asked, prompt))
            if digest := KEY_DIGEST.get():  # the time that a compiled grammar saves would tell that another key sent it
                grammar.owner = blake2b(grammar.text.encode(), key=bytes.fromhex(digest), digest_size=16).hexdigest()
            return grammar, not_enforced
        except (FrameError, SamplingError) as error:
            raise InputError(field, error.message) from error

    def _tried(self, asked: RequestSpec, prompt: tuple[int, ...]) -> tuple[Grammar, list[str]]:
        eos = sorted(self.eos)
        spell = partial(self._grammars.spelled, eos=eos)
        markers = self.tokenizer.markers(prompt, asked.calls) if self.tokenizer else Markers(None, "normal")
        text = asked.grammar or ""
        if asked.calls.are_forced:
            text = calls_grammar(asked.calls, asked.tools, markers, spell)
        elif asked.grammar is None:
            others = self._grammars.special_tokens(eos)
            text = text_or_calls_grammar(asked.calls, asked.tools, markers, spell, others)
        if asked.is_constrained and (
            markers.begins_in != "normal" or (asked.allows_thinking and markers.thought_begins)
        ):
            text = after_thought(text, markers, spell)
        grammar = Grammar(text=text, begins=len(prompt), eos=eos)
        try:
            check_grammar(grammar)
            return grammar, [f"schema.{keyword}" for keyword in self._not_enforced(text)]
        except (FrameError, SamplingError) as error:
            if asked.calls.are_forced:
                raise self._refusal_of_tools(asked, error) from error
            raise

    def _not_enforced(self, text: str) -> list[str]:
        """Return what GrammarTrials returns; refuse at once what it has refused of late."""
        key = KEY_DIGEST.get(), text
        if (known := self._refused.get(key)) and time.monotonic() < known[0]:
            raise SamplingError(known[1])
        try:
            return self._trials.require(text)
        except SamplingError as error:
            self._refused[key] = time.monotonic() + REMEMBERED_S, error.message
            while len(self._refused) > _MOST_REMEMBERED:
                del self._refused[next(iter(self._refused))]
            raise

    def _refusal_of_tools(self, asked: RequestSpec, error: BrigadeError) -> InputError:
        """Return the refusal of the first tool whose schema is at fault by itself, if it is found soon, or of all."""
        found = list(arguments_grammars(asked.calls, asked.tools))
        if len(found) == 1:
            [(field, name, _)] = found
            return InputError(field, f"tool {name}: {error.message}")
        until = time.monotonic() + _SEARCH_S
        for field, name, grammar in takewhile(lambda _: time.monotonic() < until, found):
            try:
                self._not_enforced(grammar)
            except SamplingError as alone:
                return InputError(field, f"tool {name}: {alone.message}")
        return InputError("tools", f"the schemas of {len(found)} tools together: {error.message}")

    def _require_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(field, "this model has no tokenizer; give the prompt as token ids")
        return self.tokenizer

    def _sampling(self, asked: Mapping[str, Any], without: Sequence[str]) -> Sampling:
        """Return what is asked for, and the model's defaults for the rest but `without`."""
        defaults = {name: value for name, value in self.defaults.items() if name not in asked and name not in without}
        sampling = make_sampling(**asked)  # what was asked for is refused as such
        if not defaults:
            return sampling
        try:
            return make_sampling(**{**defaults, **asked})
        except InputError as error:
            raise ModelError(f"{self.checkpoint.folder}/generation_config.json: {error}") from error


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Raise InputErrors of this block with these names for our fields; `prompt.1` is part of `prompt`."""
    try:
        yield
    except InputError as error:
        renamed = again(error)
        name, dot, item = error.field.partition(".")
        renamed.field = names.get(name, name) + dot + item
        raise renamed from error


def numbered(number: int, prompts: Sequence[Any]) -> AbstractContextManager[None]:
    """Raise InputErrors of a block about the prompt as `prompt.number` if it is one of several."""
    return renaming({"prompt": f"prompt.{number}"} if len(prompts) > 1 else {})


async def prepare_choices(inputs: InputProcessor, spec: RequestSpec, n: int) -> list[Request]:
    """Return `n` copies of the checked request with consecutive seeds."""
    first = await inputs.make_request(spec)
    requests = [first]
    for k in range(1, n):
        sampling = Sampling()
        sampling.CopyFrom(first.sampling)
        sampling.seed = (sampling.seed + k) % 2**64
        requests.append(replace(first, sampling=sampling))
    return requests


def _system_of(prompt: Conversation) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of the system with which a conversation begins."""
    return tuple(takewhile(lambda message: message["role"] == "system", prompt.messages))


def _num_letters(value: Any) -> int:
    """Return the length of all text in a prompt."""
    if isinstance(value, Conversation):
        return _num_letters((value.messages, value.tools, value.template_arguments))
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_letters, (*value.keys(), *value.values())))
    return sum(map(_num_letters, value)) if isinstance(value, list | tuple) else 0
