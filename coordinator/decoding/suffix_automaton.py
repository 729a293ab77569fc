"""Texts that are searched for the longest repeat of what was written last. Pure.

A suffix automaton (Blumer et al., 1985) has a state for each set of substrings that end at the same places; it grows by
a token in constant time on average, and has at most two states per token. Drafts from it: SAM-Decoding, arXiv
2411.10666.
"""

from collections.abc import Sequence
from typing import NamedTuple

_MOST_TOKENS = 1 << 16  # of ended answers that are kept
_MOST_OF_ONE = 2048  # tokens of one ended answer, the last ones: indexing them takes some milliseconds
_BETWEEN = -1  # stands between two answers


class Match(NamedTuple):
    """The end of a text that also stands elsewhere."""

    length: int  # tokens
    end: int  # index of the token that followed there


NO_MATCH = Match(0, 0)


class SuffixAutomaton:
    """All substrings of a growing text, and the longest suffix of it that stands in it twice."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # of each state, by token
        self._link = [-1]  # the state of the longest suffix that ends at more places
        self._length = [0]  # of the longest substring
        self._end = [0]  # index of the token that follows one of the places
        self._last = 0  # the state of the whole text

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def find_repeat(self) -> Match:
        """Return the longest suffix of the text that ended before, and note that it ends here too: call it once."""
        state = self._link[self._last]
        if state <= 0:
            return NO_MATCH
        match = Match(self._length[state], self._end[state])
        self._end[state] = len(self.tokens)  # what followed last is likeliest to follow again
        return match

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state and the length of the longest suffix of a text that stands here, with this token added.

        `state` and `length` are those before the token; (0, 0) at the beginning.
        """
        while state and length <= self._length[self._link[state]]:  # the state was split since
            state = self._link[state]
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token in self._next[state]:
            return self._next[state][token], length + 1
        return 0, 0

    def end_of(self, state: int) -> int:
        """Return the index of the token that follows a place where the substrings of a state end."""
        return self._end[state]

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        new = self._add({}, self._length[self._last] + 1, len(self.tokens))
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._last = new
        if state < 0:
            self._link[new] = 0
            return
        following = self._next[state][token]
        if self._length[following] == self._length[state] + 1:
            self._link[new] = following
            return
        clone = self._add(dict(self._next[following]), self._length[state] + 1, self._end[following])
        self._link[clone] = self._link[following]
        self._link[following] = self._link[new] = clone
        while state >= 0 and self._next[state].get(token) == following:
            self._next[state][token] = clone
            state = self._link[state]

    def _add(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class EndedTexts:
    """Answers that have ended, by owner, for later sessions of the same one; they are forgotten all at once."""

    def __init__(self) -> None:
        self._automata: dict[str, SuffixAutomaton] = {}
        self._num_tokens = 0

    def of(self, owner: str) -> SuffixAutomaton:
        """Return the answers of an owner; those that end later are added there."""
        return self._automata.setdefault(owner, SuffixAutomaton())

    def add(self, owner: str, tokens: Sequence[int]) -> None:
        """Add the end of an answer."""
        if self._num_tokens > _MOST_TOKENS:
            self._automata.clear()
            self._num_tokens = 0
        added = [*tokens[-_MOST_OF_ONE:], _BETWEEN]
        self.of(owner).extend(added)
        self._num_tokens += len(added)


class TextSearch:
    """Finds what followed the last tokens of one session before: in its own text, or in answers that have ended."""

    _MOST_AT_ONCE = 512  # tokens of a long prompt that are indexed per step: two milliseconds
    _MOST = 1 << 15  # tokens of a prompt that are indexed, the last ones: an automaton takes 400 bytes for each

    def __init__(self, ended: SuffixAutomaton | None = None) -> None:
        self._own = SuffixAutomaton()
        self._ended = ended or SuffixAutomaton()
        self._state, self._length = 0, 0  # of the longest suffix that stands in the ended answers
        self._match, self._is_own = NO_MATCH, True
        self._num_skipped: int | None = None  # leading tokens that are not indexed; None before the first search

    def find(self, tokens: Sequence[int]) -> int:
        """Find the longest suffix of these tokens that stood before, and return its length.

        The tokens begin with those of the last call.
        """
        if self._num_skipped is None:
            self._num_skipped = max(0, len(tokens) - self._MOST)
        begin = self._num_skipped + len(self._own.tokens)
        new = tokens[begin : begin + self._MOST_AT_ONCE]
        self._own.extend(new)
        for token in new:
            self._state, self._length = self._ended.step(self._state, self._length, token)
        if begin + len(new) < len(tokens):
            return 0
        if new:
            self._match, self._is_own = self._own.find_repeat(), True
            if self._length > self._match.length:
                self._match, self._is_own = Match(self._length, self._ended.end_of(self._state)), False
        return self._match.length

    def drafts(self, count: int) -> list[int]:
        """Return at most `count` tokens that followed what was found.

        A draft that reaches the end of the session's own text repeats what lies between: a loop often continues.
        """
        end, tokens = self._match.end, (self._own if self._is_own else self._ended).tokens
        if self._is_own:
            period = len(tokens) - end
            return [tokens[end + number % period] for number in range(count)]
        found = tokens[end : end + count]
        return found[: found.index(_BETWEEN)] if _BETWEEN in found else found
