"""JSON Schema, as much of it as our own document uses: what of a value is not as a schema says."""

from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
_KNOWN = {
    "$ref", "type", "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const", "title",
    "description", "default",
}  # fmt: skip


def breaches(value: Any, schema: dict[str, Any], document: dict[str, Any], place: str = "$") -> list[str]:
    """Where and how the value differs; empty if it does not."""
    return list(_breaches(value, schema, document, place))


def _breaches(value: Any, schema: Any, document: dict[str, Any], place: str) -> Iterator[str]:
    if isinstance(schema, bool):
        yield from () if schema else [f"{place}: expected nothing"]
        return
    assert schema.keys() <= _KNOWN, f"{place}: no test reads {schema.keys() - _KNOWN}"
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema and all(breaches(value, each, document, place) for each in schema["anyOf"]):
        yield f"{place}: {value!r} is none of {schema['anyOf']}"
    if "const" in schema and value != schema["const"]:
        yield f"{place}: expected {schema['const']!r}, found {value!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: expected one of {schema['enum']}, found {value!r}"
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{place}: expected {kind}, found {value!r}"
    elif isinstance(value, dict):
        yield from _of_object(value, schema, document, place)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _breaches(each, schema.get("items", True), document, f"{place}[{number}]")


def _of_object(value: dict[str, Any], schema: dict[str, Any], document: dict[str, Any], place: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place}: {name} is missing"
    for name, each in value.items():
        yield from _breaches(
            each, properties.get(name, schema.get("additionalProperties", True)), document, f"{place}.{name}"
        )
