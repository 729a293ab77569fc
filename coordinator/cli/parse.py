"""Texts of flags to numbers. All raise InputError, naming the parameter, for what holds none or others. Pure."""

from collections.abc import Callable
from typing import TypeVar

from worker.errors import InputError

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def parse_layers(text: str) -> tuple[int, ...]:
    return tuple(_parse("layers", text, int, "whole numbers like 3,2,1"))


def parse_tokens(text: str) -> tuple[int, ...]:
    return tuple(_parse("prompt_tokens", text, int, "token ids like 1,2,3", has_gaps=True))


def parse_bias(text: str) -> dict[int, float]:
    return dict(_parse("logit_bias", text, _pair, "ID:BIAS pairs like 5:-1.5,7:2", has_gaps=True))


def parse_counts(field: str, text: str, *, most: int = 1_000_000) -> tuple[int, ...]:
    """Whole numbers from 1 to `most`, ascending, each once."""
    counts = _parse(field, text, _within(int, 1, most), f"whole numbers from 1 to {most} like 1,4,8")
    return tuple(sorted(set(counts)))


def parse_times(field: str, text: str, *, least: float = 0.0) -> tuple[float, ...]:
    """Milliseconds from `least` to a million."""
    expected = f"milliseconds from {least:g} to 1000000 like 26.5,6.5"
    return tuple(_parse(field, text, _within(float, least, 1e6), expected))


def _parse(field: str, text: str, read: Callable[[str], T], expected: str, *, has_gaps: bool = False) -> list[T]:
    """What stands between the commas; with `has_gaps`, nothing may stand there. `read` raises ValueError."""
    try:
        return [read(part) for part in text.split(",") if part.strip() or not has_gaps]
    except ValueError:
        raise InputError(field, f"expected {expected}, got {text!r}") from None


def _within(read: Callable[[str], Number], least: Number, most: Number) -> Callable[[str], Number]:
    def number(part: str) -> Number:
        found = read(part)
        if not least <= found <= most:  # true for nan, too
            raise ValueError(part)
        return found

    return number


def _pair(part: str) -> tuple[int, float]:
    token, bias = part.split(":")
    return int(token), float(bias)
