"""What a checkpoint's generation_config.json says: where answers end, and how its makers sample. Pure."""

from collections.abc import Mapping
from typing import Any

from worker.errors import ModelError

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OFF_AT_ONE = ("top_p", "repetition_penalty")


def eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> frozenset[int]:
    """All end-of-sequence ids that the checkpoint names, in config.json and generation_config.json."""
    places = config, config.get("text_config") or {}, generation_config
    found = [place.get("eos_token_id") for place in places]
    ids: set[int] = set()
    for value in found:
        ids |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    return frozenset(ids)


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
