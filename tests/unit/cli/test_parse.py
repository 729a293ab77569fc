"""Texts of flags to numbers, and what is refused with the name of its flag."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.cli.flags import parse_bias, parse_counts, parse_layers, parse_times, parse_tokens
from worker.errors import InputError


def counts(text: str) -> tuple[int, ...]:
    return parse_counts("concurrency", text, most=8)


def times(text: str) -> tuple[float, ...]:
    return parse_times("stage_ms", text, least=0.5)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_layers, "3,2, 1", (3, 2, 1)),
        (parse_tokens, "1,,2,", (1, 2)),
        (parse_tokens, "", ()),
        (parse_bias, "5:-1.5,7:2,", {5: -1.5, 7: 2.0}),
        (parse_bias, "", {}),
        (counts, "8,1,4,1", (1, 4, 8)),
        (times, "26.5,0.5,1e6", (26.5, 0.5, 1e6)),
    ],
)
def test_what_stands_between_commas_is_read(parse: Callable[[str], Any], text: str, expected: Any) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "text", "field", "wanted"),
    [
        (parse_layers, "3,,1", "layers", "whole numbers like 3,2,1"),
        (parse_tokens, "1;2", "prompt_tokens", "token ids like 1,2,3"),
        (parse_bias, "5", "logit_bias", "ID:BIAS pairs like 5:-1.5,7:2"),
        (parse_bias, "5:1:2", "logit_bias", "ID:BIAS pairs like 5:-1.5,7:2"),
        *((counts, text, "concurrency", "whole numbers from 1 to 8 like 1,4,8") for text in ("", "0", "1,9", "1.5")),
        *((times, text, "stage_ms", "milliseconds from 0.5 to 1000000 like 26.5,6.5")
          for text in ("", "0", "1,nan", "inf", "-1")),
    ],
)  # fmt: skip
def test_what_is_no_such_number_is_refused(parse: Callable[[str], Any], text: str, field: str, wanted: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse(text)
    assert (refusal.value.field, refusal.value.message) == (field, f"expected {wanted}, got {text!r}")
