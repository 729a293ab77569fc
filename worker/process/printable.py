"""Text of another machine, as it may stand in a terminal: nothing of it may steer that, or fill it."""

_MOST_CHARACTERS = 400


def printable(text: str, most: int = _MOST_CHARACTERS) -> str:
    """The same on one line, without control characters and what turns the direction of text, and not too long."""
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    return shown if len(shown) <= most else f"{shown[:most]}..."


def printable_lines(text: str) -> str:
    """The same with its lines and tabs, whole: what else is not printable is left out."""
    return "".join(each for each in text if each.isprintable() or each in "\n\t")
