"""YAML files that users write: how they are read, and how everything that is wrong with one is told at once."""

import difflib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from worker.errors import ConfigError

_MOST_BYTES = 1 << 20
_MOST_PROBLEMS = 20  # that are listed
FROM_LIST = Field(strict=False)  # a tuple, which YAML gives as a list


class Section(BaseModel):
    """A part of a file: it has no other keys, and true is no number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


def read_yaml(path: Path, wanted: str) -> tuple[Any, list[str]]:
    """Return the data of a YAML file, and a line for each key that it gives twice.

    Args:
        wanted: what was expected, for the message if the file is missing.
    Raises:
        ConfigError: it cannot be read, is longer than 1 MiB or is not YAML.
    """
    try:
        if (num_bytes := path.stat().st_size) > _MOST_BYTES:
            raise ConfigError(f"{path} has {num_bytes} bytes; expected at most {_MOST_BYTES} of {wanted}")
        loader = _Loader(path.read_text(encoding="utf-8"))
        return loader.get_single_data(), loader.duplicates
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; expected {wanted} there") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}, line {line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """Records keys that are given twice; yaml silently keeps the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                found = f"found {key.value!r} on line {lines[key.value]} too"
                self.duplicates.append(f"line {line}: expected each key once, {found}")
            elif isinstance(key, yaml.ScalarNode):
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def errors_of(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's findings, but not that a list is too short without its invalid items."""
    return [each for each in error.errors() if each["type"] != "too_short" or not each["input"]]


def yaml_path(*loc: int | str) -> str:
    """Return the path of a value, such as `workers[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def unknown_key(key: str, section: type[BaseModel]) -> str:
    """Return the problem of a key that the section does not have."""
    known = [field.alias or name for name, field in section.model_fields.items()]
    near = difflib.get_close_matches(key.lower(), known, n=1)
    return f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key; expected one of {', '.join(known)}"


def shown(value: Any) -> str:
    """Return a YAML value for a message."""
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    if isinstance(value, dict | list | tuple):
        return "keys and values" if isinstance(value, dict) else "a list"
    is_long = isinstance(value, int) and abs(value) >= 10**80  # Python refuses to write the longest in decimal
    text = f"{value:#x}" if is_long else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def repeated(values: Mapping[str, tuple[str, Hashable]]) -> Iterator[str]:
    """Yield values whose keys repeat; `values` are pairs of a value and its key, by YAML path."""
    firsts: dict[Hashable, str] = {}
    for path, (value, key) in values.items():
        if (first := firsts.setdefault(key, path)) != path:
            is_of_same_node = first.rpartition(".")[0] == path.rpartition(".")[0]
            expected = "each once" if is_of_same_node else "one that no other node has"
            yield f"{path}: expected {expected}, found {value!r} at {first} too"


def refuse(path: Path, problems: Sequence[str]) -> None:
    """Raise ConfigError with a line for each problem of a file, if there are any."""
    if problems:
        lines = [f"  {line}" for line in problems[:_MOST_PROBLEMS]]
        left = [f"  and {more} more"] if (more := len(problems) - len(lines)) else []
        raise ConfigError("\n".join([f"{path} has {len(problems)} problem{'s' * (len(problems) > 1)}:", *lines, *left]))
