"""What a checkpoint's generation_config.json says: where answers end, and how its makers sample. Pure."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.errors import ModelError

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OFF_AT_ONE = ("top_p", "repetition_penalty")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The file as it stands; empty if there is none. Raises ModelError if it holds no JSON object."""
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not valid JSON (expected keys and values)")
    return found


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters of a model that is to be sampled; none where `do_sample` is not true.

    Raises:
        ModelError: one of them is no number.
    """
    if config.get("do_sample") is not True:
        return {}
    defaults: dict[str, float] = {"temperature": 1.0}  # transformers' own, where the file names none
    for name in _SAMPLING:
        value = config.get(name)
        if value is None or (value == 1 and not isinstance(value, bool) and name in _OFF_AT_ONE):
            continue
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise ModelError(f"generation_config.json: {name}: expected a number, found {value!r}")
        defaults[name] = value
    return defaults
