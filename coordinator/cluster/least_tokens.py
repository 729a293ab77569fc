"""Least tokens: how many a text has at least, without tokenizing it: none is longer than the vocabulary's longest."""

from collections.abc import Callable, Sequence
from typing import Any

_MARGIN = 4  # normalizers may shorten a text: NFC and NFKC make one letter of up to three
_PROBED = 4096  # letters
# What some tokenizers drop, or make one token of however much there is: blanks, and letters that none knows.
_PROBES = (" " * _PROBED, "\n" * _PROBED, "\u0378" * _PROBED)


class LeastTokens:
    """Of one tokenizer, by letters: a token stands for no more of them than it is spelled with, be they bytes."""

    def __init__(self, tokenizer: Any, encode: Callable[[str], Sequence[int]]) -> None:
        self._most_letters = _MARGIN * max(map(len, tokenizer.get_vocab()))
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._eats_blanks = any(token.lstrip or token.rstrip for token in added)
        self._is_sure = all(len(encode(probe)) >= _PROBED // self._most_letters for probe in _PROBES)

    def of(self, text: str) -> int:
        """A fourth of what can be known, and 0 for a tokenizer that may drop what it is given."""
        if not self._is_sure:
            return 0
        num_letters = sum(map(len, text.split())) if self._eats_blanks else len(text)
        return num_letters // self._most_letters
