"""Body: what the request bodies of all shapes have in common, and what one says of a wrong one. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coordinator.decoding.decode import Decode, make_cache_choice, make_decode
from protos.brigade_pb2 import Cache
from worker.errors import InputError

Body = TypeVar("Body", bound=BaseModel)


def listed(value: Any) -> Any:
    """One text stands for a list of one."""
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(listed)]


class Section(BaseModel):
    """Unknown fields are let pass: clients send many that change nothing."""

    model_config = ConfigDict(extra="ignore", strict=False)


class Sampled(Section):
    """The parameters that all shapes share, by the names that most servers know; and our own."""

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
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def decoder(self) -> Decode:
        return make_decode(self.decode, str(self.window), self.entropy_threshold, self.position_penalty)

    def cache(self) -> Cache:
        return make_cache_choice(self.kv, self.max_kv_size)


def read(shape: type[Body], body: Mapping[str, Any]) -> Body:
    """The body as this shape. Raises InputError, naming the first field that is wrong."""
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = _place(first["loc"], body, is_missing=first["type"] == "missing")
        raise InputError(place, first["msg"].removeprefix("Value error, ")) from error


def _place(path: Sequence[str | int], body: Any, *, is_missing: bool) -> str:
    """Where a field stands in the body; pydantic puts the names of alternatives in between."""
    found: list[str | int] = []
    for part in path:
        known = body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ()
        if part in known:
            body = body[part]
            found.append(part)
    return ".".join(map(str, [*found, *(path[-1:] if is_missing else ())]))
