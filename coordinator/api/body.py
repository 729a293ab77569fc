"""Body: what the request bodies of all shapes have in common, and what one says of a wrong one. Pure."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from coordinator.api.errors import refuse
from coordinator.decoding.decode import Decode, make_cache_choice, make_decode
from coordinator.sessions.request import Prompt, RequestSpec
from worker.errors import InputError
from worker.platform.threads import run_in_thread

Body = TypeVar("Body", bound=BaseModel)


def listed(value: Any) -> Any:
    """One text stands for a list of one."""
    return [value] if isinstance(value, str) else value


_Listed = BeforeValidator(listed, json_schema_input_type=str | list[str])
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=64), _Listed]
Unsupported = dict[str, Sequence[Any]]  # fields, with their values that change nothing
UNSUPPORTED: Unsupported = {  # of more than one shape; what is left out, or null, changes nothing in any case
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
OF_OPENAI: Unsupported = {  # which the other shapes do not know
    "logit_bias": ({},),
    "logprobs": (False,),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "stop": ([],),
}
_DEEPEST = 64  # levels of lists and objects in a field


class Section(BaseModel):
    """Unknown fields are let pass: clients send many that change nothing."""

    model_config = ConfigDict(extra="ignore", strict=False)
    unsupported: ClassVar[Unsupported] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """Take a null as left out: official clients send one for every field that they do not set."""
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


class StreamOptions(Section):
    """What a stream tells at its end."""

    include_usage: bool = False


class Sampled(Section):
    """The parameters that all shapes share, by the names that most servers know; and our own."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    repeat_guard: int = Field(0, ge=0)
    ignore_eos: bool = False
    decode: str = "auto"
    window: str | int = "auto"
    entropy_threshold: float = Decode.entropy_threshold
    position_penalty: float = Decode.position_penalty
    kv: str = "full"
    max_kv_size: int | None = None

    def sampling(self) -> dict[str, Any]:
        """What was chosen, by the names of the proto message."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        return chosen | ({"top_k": 0} if self.top_k == -1 else {})  # as vLLM's clients say that it is off

    def asking(self, prompt: Prompt, *, sampling: Mapping[str, Any] | None = None, **own: Any) -> RequestSpec:
        """What is asked of this prompt; `sampling` and `own` are what not all shapes know. Raises InputError."""
        return RequestSpec(
            prompt,
            sampling=self.sampling() | dict(sampling or {}),
            decode=make_decode(self.decode, str(self.window), self.entropy_threshold, self.position_penalty),
            cache=make_cache_choice(self.kv, self.max_kv_size),
            ignore_eos=self.ignore_eos,
            repeat_guard=self.repeat_guard,
            **own,
        )


def read(shape: type[Body], body: Mapping[str, Any]) -> Body:
    """The body as this shape.

    Raises:
        InputError: the first field that is wrong, that no shape can take, or that is not supported and would change
            the answer.
    """
    for name, value in body.items():
        _require_plain(name, value)
    for name, harmless in getattr(shape, "unsupported", {}).items():
        if body.get(name) is not None and body[name] not in harmless:
            raise InputError(name, "is not supported by this server, and would change the answer; leave it out")
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = _place(first["loc"], body, is_missing=first["type"] == "missing")
        raise InputError(place, first["msg"].removeprefix("Value error, ")) from error


def _require_plain(name: str, value: Any) -> None:
    """Raise InputError for what JSON can say and nobody can use: deep nesting, half characters, huge numbers."""
    level = [name, value]
    for _ in range(_DEEPEST):
        for each in level:
            _require_plain_scalar(name, each)
        level = [child for each in level for child in _children(each)]
        if not level:
            return
    raise InputError(name, f"expected at most {_DEEPEST} levels of nesting")


def _require_plain_scalar(name: str, value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError(name, "expected whole characters, found half of a surrogate pair") from None
    elif value != value:
        raise InputError(name, "expected a number of JSON, found NaN")
    elif isinstance(value, int | float) and not abs(value) < 2**64:
        raise InputError(name, "expected numbers below 2^64")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else ()


def _place(path: Sequence[str | int], body: Any, *, is_missing: bool) -> str:
    """Return where a field stands in the body, without the names of alternatives that pydantic puts in between."""
    found: list[str | int] = []
    for part in path:
        known = body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ()
        if part in known:
            body = body[part]
            found.append(part)
    if is_missing and found[-1:] != list(path[-1:]):
        found.append(path[-1])
    return ".".join(map(str, found))


MOST_AT_ONCE = 64 << 10  # bytes that are parsed on the event loop: more would keep the others waiting
_SEND_S = 60.0  # how long a client may take to send its body
_CLOSE = {"Connection": "close"}  # with what is still to come


async def read_body(request: Request, shape: type[Body], most_bytes: int) -> Body:
    """Raises Refusal (400, 408, 413, 415), or InputError for a field that is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise refuse(415, f"expected content-type application/json, found {kind or 'none'}", "unsupported_media_type")
    try:
        async with asyncio.timeout(_SEND_S):
            body = await _bytes_of(request, most_bytes)
    except TimeoutError:
        raise refuse(408, f"expected a whole body within {_SEND_S:g} s", "request_timeout", headers=_CLOSE) from None
    parse = partial(_parsed, shape, body)
    return await run_in_thread(parse) if len(body) > MOST_AT_ONCE else parse()


def _parsed(shape: type[Body], body: bytes) -> Body:
    return read(shape, _as_object(body))


async def _bytes_of(request: Request, most: int) -> bytes:
    too_large = refuse(413, f"expected a body of at most {most} bytes", "request_too_large", headers=_CLOSE)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 12 or int(length) > most):
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_large
    except ClientDisconnect:
        raise refuse(400, "the client left before it had sent its request", "incomplete_request") from None
    return bytes(body)


def _as_object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise refuse(400, f"expected JSON, found something else ({error})", "invalid_json") from None
    if not isinstance(found, dict):
        raise refuse(400, f"expected a JSON object, found {type(found).__name__}", "invalid_json")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
