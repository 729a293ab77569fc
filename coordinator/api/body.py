"""Request bodies: what those of all APIs have in common, and how they are read. Pure, but for `read_body`."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from coordinator.api.errors import HttpError
from coordinator.decoding.decode_options import DECODE_FIELDS, SYSTEM, Decode, make_cache_choice, make_decode
from coordinator.engine.caller import BEST_PRIORITY, KEY_HOLDER, usual_priority
from coordinator.engine.one_at_a_time import OneAtATime
from coordinator.sessions.request import BREAKERS, Prompt, RequestSpec, SamplingParams, sampling_field
from worker.errors import InputError
from worker.platform.text import json_problem

Body = TypeVar("Body", bound=BaseModel)


def text_or_list(make: Callable[[str], Any] = str, **schema: Any) -> BeforeValidator:
    """Return a validator of lists, where one text stands for a list of what `make` makes of it."""

    def listed(value: Any) -> Any:
        if not isinstance(value, str | list):
            raise PydanticCustomError("text_or_list", "expected a text or a list")
        return [make(value)] if isinstance(value, str) else value

    return BeforeValidator(listed, **schema)


def none_below(least: int) -> BeforeValidator:
    """Return a validator for which a smaller number counts as not given: clients that set nothing send -1 or 0."""
    return BeforeValidator(lambda value: None if type(value) is int and value < least else value)


Limit = Annotated[Annotated[int, Field(ge=1)] | None, none_below(1)]  # a number of tokens
ModelName = Annotated[str, Field(max_length=256)]  # every event of a stream repeats it
# JSON has no tuples, and only text as keys; the numbers in a tuple are strict still
TokenIds = Annotated[tuple[int, ...], Strict(False)]
TokenKey = Annotated[int, Strict(False)]
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=64),
    text_or_list(json_schema_input_type=str | list[str]),
]
RawPrompt = str | tuple[int, ...]


def _prompts(value: Any) -> list[RawPrompt]:
    """Return one prompt or several, each a text or its token ids. Raises ValueError for anything else."""

    def is_id(value: Any) -> bool:
        return type(value) is int

    def is_prompt(value: Any) -> bool:
        return isinstance(value, str) or (isinstance(value, list) and all(map(is_id, value)))

    is_list = isinstance(value, list)
    items = value if is_list else [value]
    has_ids = is_list and is_id(next(iter(items), None))
    wrong = [each for each in items if not (is_id(each) if has_ids else is_prompt(each))]
    if wrong or not items:
        found = f"{'a list with ' * is_list}{shown(wrong[0])}" if wrong else "an empty list"
        raise ValueError(f"expected a text, token ids, or a list of texts or of lists of token ids, found {found}")
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in ([items] if has_ids else items)]


RawPrompts = Annotated[
    list[RawPrompt], BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]
Unsupported = dict[str, Sequence[Any]]  # fields, with the values that change nothing; null never does
UNSUPPORTED: Unsupported = {  # by all APIs
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
OPENAI_ONLY: Unsupported = {  # fields of OpenAI's bodies that the other APIs do not have
    "logit_bias": ({},),
    "logprobs": (False,),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "stop": ([],),
}
_MAX_DEPTH = 64  # levels of lists and objects in a field
_MAX_OBJECTS = 20_000  # in a field: messages, parts, tools; each costs the event loop time
_MAX_KEYS = 65_536  # of an object
_MOST_DESCRIBED = 32  # errors of a body: one that is wrong in many places is told the first one


class Section(BaseModel):
    """An object of a body. Unknown fields are ignored: clients send many that change nothing.

    Types are strict: `true` is no number, and "5" no whole one. The first wrong item of a list ends the validation: to
    describe a million of them takes seconds, in which no thread runs Python.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    unsupported: ClassVar[Unsupported] = {}
    reasons: ClassVar[Mapping[str, str]] = {}  # of unsupported fields, what is expected, if there is more to say

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        left: list[Any] = [schema]
        while left:
            match left.pop():
                case dict() as part:
                    left += part.values()
                    if part.get("type") in ("list", "tuple"):
                        part["fail_fast"] = True
                case list() as parts:
                    left += parts
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """Treat a null as an absent field: official clients send one for every field that they do not set."""
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


def described(name: str, **default: Any) -> Any:
    """Return the field of a sampling parameter, by default null; `make_sampling` checks its range."""
    return Field(**(default or {"default": None}), description=sampling_field(name).description)


class Sampled(Section):
    """The parameters that all APIs share, by the names that most servers use, and our own."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED
    temperature: float | None = described("temperature")
    top_p: float | None = described("top_p")
    top_k: int | None = described("top_k")
    min_p: float | None = described("min_p")
    top_n_sigma: float | None = described("top_n_sigma")
    xtc_probability: float | None = described("xtc_probability")
    xtc_threshold: float | None = described("xtc_threshold")
    repetition_penalty: float | None = described("repetition_penalty")
    repetition_context_size: int | None = described("repetition_context_size")
    dry_multiplier: float | None = described("dry_multiplier")
    dry_base: float | None = described("dry_base")
    dry_allowed_length: int | None = described("dry_allowed_length")
    dry_penalty_last_n: int | None = described("dry_penalty_last_n")
    dry_sequence_breakers: Texts = list(BREAKERS)
    min_tokens: int | None = described("min_tokens")
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] = []
    seed: Annotated[int | None, none_below(0)] = described("seed")
    repeat_guard: int = Field(0, ge=0)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    ignore_eos: bool = False
    decode: str = "auto"
    window: str | int = "auto"
    entropy_threshold: float = Decode.entropy_threshold
    position_penalty: float = Decode.position_penalty
    num_draft_tokens: int | str = "auto"
    canvas: int | None = None
    canvas_steps: int | None = None
    canvas_sampler: str | None = None
    canvas_threshold: str | float | None = None
    conditioning: str = Decode.conditioning
    kv: str = "full"
    max_kv_size: int | None = None
    kv_keep: int | str | None = None

    def make_spec(self, prompt: Prompt, *, logprobs: int = 0, **more: Any) -> RequestSpec:
        """Return the request for this prompt; `more` are fields that not all APIs have. Raises InputError."""
        names = [name for name in SamplingParams.__annotations__ if name != "logprobs"]
        sampling = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        if self.top_k == -1:  # vLLM's clients turn it off by this
            sampling["top_k"] = 0
        for name in ("top_n_sigma", "dry_penalty_last_n"):
            if sampling.get(name) == -1:  # llama.cpp's default
                del sampling[name]
        if logprobs:
            sampling["logprobs"] = logprobs
        return RequestSpec(
            prompt,
            sampling=sampling,
            decode=make_decode(self.decode, **{name: getattr(self, name) for name in DECODE_FIELDS}),
            cache=make_cache_choice(self.kv, self.max_kv_size, self.kv_keep),
            keeps_system=self.kv_keep == SYSTEM,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            dry_sequence_breakers=tuple(self.dry_sequence_breakers),
            repeat_guard=self.repeat_guard,
            priority=self._priority(),
            **more,
        )

    def _priority(self) -> int:
        best = BEST_PRIORITY.get()
        if self.priority is not None and self.priority < best:
            whose = "with this key" if KEY_HOLDER.get() else "without a key whose `priority=` allows less"
            raise InputError("priority", f"expected at least {best} {whose} (lower goes first), got {self.priority}")
        return usual_priority() if self.priority is None else self.priority


class OpenAISampled(Sampled):
    """The further parameters of OpenAI's chats and completions, which `brigade bridge` takes too."""

    stop: Texts | None = None
    presence_penalty: float = described("presence_penalty", default=0.0)
    presence_context_size: int | None = described("presence_context_size")
    frequency_penalty: float = described("frequency_penalty", default=0.0)
    frequency_context_size: int | None = described("frequency_context_size")
    logit_bias: dict[TokenKey, float] = described("logit_bias", default_factory=dict)

    def make_spec(self, prompt: Prompt, *, logprobs: int = 0, **more: Any) -> RequestSpec:
        return super().make_spec(prompt, logprobs=logprobs, stops=tuple(self.stop or ()), **more)


def read(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """Return the body as this type.

    Raises:
        InputError: names the first field that is wrong, or that is not supported and would change the answer.
    """
    for name, value in body.items():
        _require_plain(name, value)
    for name, harmless in getattr(kind, "unsupported", {}).items():
        if body.get(name) is not None and body[name] not in harmless:
            reason = "is not supported by this server, and would change the answer; leave it out"
            raise InputError(name, getattr(kind, "reasons", {}).get(name, reason))
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = [(_place(each, body), each) for each in error.errors(include_url=False)[:_MOST_DESCRIBED]]
        first, _ = found[0]
        # one of each type of a union: those that lead deepest are of the type that is meant
        place = max((place for place, _ in found if place[: len(first)] == first), key=len)
        same = [each for other, each in found if other == place]
        raise InputError(".".join(map(str, place)), _describe(same)) from error


# What is expected, by the types of pydantic's errors. In braces: what pydantic says of the limit.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "missing": "a value",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "{min_length} or more characters",
    "string_type": "a text",
    "text_or_list": "a text or a list",
    "too_long": "at most {max_length} items",
    "too_short": "{min_length} or more items",
    "tuple_type": "a list",
    "union_tag_not_found": "an object with a type",
}
MOST_SHOWN = 60  # characters of a value in an error


def _describe(errors: Sequence[ErrorDetails]) -> str:
    """Return what a field should be, and what it is; pydantic's own text, or a validator's, for other errors."""
    first = errors[0]
    if first["type"] not in _EXPECTED:
        return first["msg"].removeprefix("Value error, ")
    known = [each for each in errors if each["type"] in _EXPECTED]
    expected = dict.fromkeys(_EXPECTED[each["type"]].format_map(each.get("ctx", {})) for each in known)
    length = first.get("ctx", {}).get("actual_length")
    is_counted = first["type"] == "missing" or length is not None
    found = str(length or "none") if is_counted else shown(first["input"])
    return f"expected {' or '.join(expected)}, found {found}"


def shown(value: Any) -> str:
    """Return what an error says was found: a JSON value, or what it is where that is too long."""
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else f"{len(text) - 2} characters"


def require_one(body: BaseModel, first: str, second: str) -> None:
    """Raise ValueError unless exactly one of two fields is given."""
    if (getattr(body, first) is None) == (getattr(body, second) is None):
        raise ValueError(f"expected either {first} or {second}")


def _require_plain(name: str, value: Any) -> None:
    """Raise InputError for JSON that no field takes: many objects, deep nesting, half characters, huge numbers."""
    level, num_objects = [name, value], 0
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                num_objects += 1
                if len(each) > _MAX_KEYS:
                    raise InputError(name, f"expected at most {_MAX_KEYS} keys of an object, found {len(each)}")
                below += [*each, *each.values()]
            elif isinstance(each, list):
                below += each
            elif isinstance(each, str):
                try:
                    each.encode()
                except UnicodeEncodeError:
                    raise InputError(name, "expected whole characters, found half of a surrogate pair") from None
            elif each != each:
                raise InputError(name, "expected a number of JSON, found NaN")
            elif isinstance(each, int | float) and not abs(each) < 2**64:
                raise InputError(name, "expected numbers below 2^64")
        if num_objects > _MAX_OBJECTS:
            raise InputError(name, f"expected at most {_MAX_OBJECTS} objects in it, found more")
        if not below:
            return
        level = below
    raise InputError(name, f"expected at most {_MAX_DEPTH} levels of nesting")


def _place(error: ErrorDetails, body: Any) -> list[str | int]:
    """Return the path of an error's field in the body, without the names of union members that pydantic puts there."""
    path, found = error["loc"], list[str | int]()
    for part in path:
        known = body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ()
        if part in known:
            body = body[part]
            found.append(part)
    if error["type"] == "missing" and found[-1:] != list(path[-1:]):
        found.append(path[-1])
    return found


MAX_INLINE_BYTES = 64 << 10  # a longer body is parsed on a thread, one at a time: they would delay streams
_SEND_S = 60.0  # within which a client has to send its body
# Bytes beyond the limit that are read all the same: a client sees no answer while it sends into a closed connection.
_MOST_DISCARDED = 64 << 20
_CLOSE = {"Connection": "close"}  # the rest of the body is not read


async def read_body(
    request: Request, kind: type[Body], max_bytes: int, long_bodies: OneAtATime
) -> tuple[Body, list[str]]:
    """Return a request's body, and the names of the fields that are ignored; `long_bodies` are parsed in turn.

    Raises:
        HttpError: with the status 400, 408, 413 or 415. InputError: a field is wrong.
        WaitedTooLong: it is long, and waited for others.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        reason = f"expected content-type application/json, found {media or 'none'}"
        raise HttpError(415, reason, "unsupported_media_type")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        reason = f"expected a body without content-encoding, found {coding}; send it uncompressed"
        raise HttpError(415, reason, "unsupported_media_type", headers={"Accept-Encoding": "identity"})
    too_large = HttpError(413, f"expected a body of at most {max_bytes} bytes", "request_too_large", headers=_CLOSE)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 12 or int(length) > max_bytes + _MOST_DISCARDED):
        raise too_large
    body, num_sent = bytearray(), 0
    try:
        async with asyncio.timeout(_SEND_S):
            async for chunk in request.stream():
                num_sent += len(chunk)
                if num_sent > max_bytes + _MOST_DISCARDED:
                    break
                body += chunk
                if num_sent > max_bytes:
                    body.clear()
    except ClientDisconnect:
        raise HttpError(400, "the client left before it had sent its request", "incomplete_request") from None
    except TimeoutError:
        raise HttpError(408, f"expected a whole body within {_SEND_S:g} s", "request_timeout", headers=_CLOSE) from None
    if num_sent > max_bytes:
        raise too_large
    parse = partial(_parse, kind, bytes(body))
    return await long_bodies.run(parse) if len(body) > MAX_INLINE_BYTES else parse()


def _parse(kind: type[Body], body: bytes) -> tuple[Body, list[str]]:
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"expected JSON, found something else ({json_problem(error)})", "invalid_json") from None
    if not isinstance(found, dict):
        raise HttpError(400, f"expected a JSON object, found {shown(found)}", "invalid_json")
    known = {field.alias or name for name, field in kind.model_fields.items()}
    return read(kind, found), sorted(found.keys() - known - getattr(kind, "unsupported", {}).keys())


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
