import json

import pytest

from worker.errors import internal_error_text
from worker.platform.text import json_bytes, to_json


def test_half_a_character_stays_the_escape_that_it_came_as() -> None:
    assert to_json({"id": "a\ud800\\é日😀"}) == '{"id": "a\\ud800\\\\é日😀"}'


def test_whatever_json_can_say_can_be_written_and_read_again() -> None:
    for text in ("\ud800", "\\\udfff", "\\ud800", '"\udc00\ud800"', "\x00\n日"):
        assert json.loads(to_json([text, {text: 1}]).encode()) == [text, {text: 1}]


def test_what_is_no_number_is_refused_where_readers_know_none() -> None:
    assert json_bytes(float("nan")) == b"NaN"
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes(float("nan"), allow_nan=False)


def test_a_bug_with_some_text_does_not_tell_all_of_it() -> None:
    try:
        "secret \ud800".encode()
    except UnicodeEncodeError as error:
        text = internal_error_text(error)
    assert "secret" not in text and r"can't encode character '\\ud800' in position 7" in text
