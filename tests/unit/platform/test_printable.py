from worker.platform.text import printable, printable_lines


def test_what_steers_a_terminal_or_fills_it_is_marked_and_all_else_stays() -> None:
    assert printable("Mac Studio von Jürgen 日本 → 😀") == "Mac Studio von Jürgen 日本 → 😀"
    shown = {"\x1b]0;owned\x07": "�]0;owned�", "a\nb\tc\r": "a�b�c�", "\u202egnp\x9b": "�gnp�"}
    assert {text: printable(text, most=20) for text in shown} == shown
    assert printable("12345", most=4) == "1234..."
    assert printable_lines("a\n\tb\x1b[2J\r\u202e\x9b" + "x" * 999) == "a\n\tb[2J" + "x" * 999
