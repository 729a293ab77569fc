"""A YAML file as plain data. However it is made, it costs little: its size, its depth and its merges are bounded."""

from pathlib import Path
from typing import Any

import yaml

from worker.errors import ConfigError

MOST_BYTES = 1 << 20
MOST_DEPTH = 32  # of lists and mappings in each other
MOST_KEYS = 10_000  # of a mapping with those that are merged into it: each `<<` may hold several that do so too
_LONGEST_NUMBER = 64  # characters: parts of `59:59:59...` are multiplied, and what has many digits cannot be printed


def read_yaml(path: Path, wanted: str = "a cluster.yaml") -> tuple[Any, list[str]]:
    """The file's data, and a line for each key that it gives twice; `wanted` is what it should be.

    Raises:
        ConfigError: it cannot be read, is no YAML, or is larger than it may be.
    """
    try:
        loader = _Loader(_read_text(path, wanted))
        return loader.get_single_data(), loader.duplicates
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; expected {wanted} there") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}, line {line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error


def _read_text(path: Path, wanted: str) -> str:
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path}: expected at most {MOST_BYTES} bytes; give {wanted}")
    return data.decode()


class _Loader(yaml.SafeLoader):
    """Notes keys that are given twice, of which yaml silently keeps the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[str] = []
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ValueError(f"expected at most {MOST_DEPTH} lists and mappings in each other")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST_KEYS:
            raise ValueError(f"expected at most {MOST_KEYS} keys in a mapping, found {len(node.value)}")

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(super().construct_yaml_int(_short(node)))

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        return float(super().construct_yaml_float(_short(node)))

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


def _short(node: yaml.ScalarNode) -> yaml.ScalarNode:
    if len(node.value) > _LONGEST_NUMBER:
        raise ValueError(f"expected at most {_LONGEST_NUMBER} characters in a number, found {len(node.value)}")
    return node


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
