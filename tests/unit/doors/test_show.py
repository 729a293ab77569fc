"""What of a growing Markdown text is final."""

import pytest

from coordinator.doors.show import num_final


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("a\nb", ""),
        ("a\n\nb", "a\n\n"),
        ("a\n\n", "a\n\n"),
        ("```\na\n\nb\n", ""),
        ("x\n\n```\na\n\nb\n```\n\nc", "x\n\n```\na\n\nb\n```\n\n"),
    ],
)
def test_blocks_are_final_after_a_blank_line_outside_of_code(text: str, final: str) -> None:
    assert text[: num_final(text)] == final
