"""Grammars: which tokens an answer may go on with. llguidance matches; its state follows from the ids alone."""

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protos.brigade_pb2 import Grammar
from worker.errors import SamplingError

# What is compiled beside the steps of others has to be there once its session opens: as many are kept as may wait.
# A usual one takes 0.15 MB, and long ones 90 bytes per character of their text: some 300 MB in all.
_MOST_KEPT = 1024  # the default limit of waiting sessions on a coordinator
_MOST_TEXT = 1_500_000  # characters of all kept grammars
_LEAST_KEPT = 16  # however long they are
_MOST_TOKENIZERS = 4  # each has a trie of the whole vocabulary
# What is kept no more when its session opens is compiled where every step waits for it: half a second at most.
_LIMITS = LLParserLimits(max_grammar_size=20_000, verbose_errors=False)
_QUIET = 0
_ENDLESS = "NoExtensionBias"  # what llguidance says of a grammar that allows no token
_READING = Lock()  # one thread reads a tokenizer at a time
_MARKER = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")  # what may be a special token


class Guide:
    """One answer's matcher. It goes back and forth with the tokens that it is asked about."""

    def __init__(self, matcher: LLMatcher, begins: int, vocab_size: int) -> None:
        """`begins` is the index in the sequence where the answer begins."""
        self._matcher = matcher
        self._begins = begins
        self._vocab_size = vocab_size
        self._taken: list[int] = []

    def allowed(self, tokens: Sequence[int], known: Sequence[int], num_wanted: int) -> mx.array:
        """What may be chosen for each row, [N, V] bool.

        Args:
            tokens: the sequence; row n comes after the first `known[n]` of them.
            num_wanted: rows that answer for the sequence. The rest are guesses, for which all is allowed: a guess that
                the grammar forbids is a draft that does not hold.
        Raises:
            SamplingError: the tokens so far are none of the grammar's, or it is too complex.
        """
        rows = np.ones((len(known), self._vocab_size), bool)
        for row, length in enumerate(known[:num_wanted]):
            if not self._go_to(tokens[self._begins : length], is_draft=row > 0):
                break  # what is after a draft that the grammar forbids is never used
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            rows[row] = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            self._require_sound()
        return mx.array(rows)

    def require_beginning(self) -> None:
        """Raise SamplingError for a grammar that allows no first token."""
        self._matcher.compute_bitmask()
        self._require_sound()

    def _go_to(self, answer: Sequence[int], *, is_draft: bool) -> bool:
        """Match just these tokens; False for a draft that cannot be."""
        shared = 0
        while shared < min(len(answer), len(self._taken)) and answer[shared] == self._taken[shared]:
            shared += 1
        if len(self._taken) > shared:
            self._matcher.rollback(len(self._taken) - shared)
        rest = list(answer[shared:])
        num_taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._taken = [*answer[: shared + num_taken]]
        if num_taken < len(rest) and not is_draft:
            raise SamplingError(f"the answer so far is none of its grammar from its token {len(self._taken)} on")
        return num_taken == len(rest)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            said = _first_line(self._matcher.get_error())
            if said == _ENDLESS:
                said = "no text is one of it; a rule or $ref may stand for itself alone"
            raise SamplingError(f"the grammar cannot go on: {said}")


class Grammars:
    """Compiles grammars for one model's vocabulary and keeps the most recently used."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` holds the model's tokenizer.json; without one there are no grammars."""
        self._path = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._lock = Lock()  # a coordinator compiles on several threads
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._num_text = 0  # characters of all that are kept

    def guide(self, grammar: Grammar) -> Guide:
        """Raises SamplingError for a grammar that is none, or a model without a fast tokenizer."""
        key = Grammar(text=grammar.text, eos=grammar.eos).SerializeToString(deterministic=True)
        matcher = self._compiled.get(key) or self._compile(grammar)
        self._keep(key, matcher)
        return Guide(matcher.deep_copy(), grammar.begins, self._vocab_size)

    def spelled(self, text: str, eos: Sequence[int]) -> str:
        """A text as a Lark rule spells it: special tokens by their ids, since no text stands for those."""
        tokenizer = self._tokenizer(tuple(eos))
        symbols = (_symbol(tokenizer, part) for part in _MARKER.split(text) if part)
        return " ".join(symbols)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer(tuple(grammar.eos)), grammar.text, log_level=_QUIET, limits=_LIMITS)
        if matcher.is_error():
            raise SamplingError(f"it cannot be enforced; its parser says: {_parsers_words(matcher.get_error())}")
        return matcher

    def _tokenizer(self, eos: tuple[int, ...]) -> LLTokenizer:
        if (highest := max(eos, default=0)) >= self._vocab_size:
            raise SamplingError(f"expected tokens that end an answer below {self._vocab_size}, got {highest}")
        try:
            with _READING:
                return _read_tokenizer(self._path, self._path.stat().st_mtime_ns, self._vocab_size, eos)
        except (OSError, ValueError) as error:
            said = f"grammars need a tokenizer.json that can be read: {_first_line(str(error))}"
            raise SamplingError(said) from error

    def _keep(self, key: bytes, matcher: LLMatcher) -> None:
        """Mark a grammar as the most recently used."""
        with self._lock:
            if key not in self._compiled:
                self._num_text += len(key)
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            while self._is_too_much:
                oldest, _ = self._compiled.popitem(last=False)
                self._num_text -= len(oldest)

    @property
    def _is_too_much(self) -> bool:
        num_kept = len(self._compiled)
        return num_kept > _MOST_KEPT or (self._num_text > _MOST_TEXT and num_kept > _LEAST_KEPT)


@lru_cache(_MOST_TOKENIZERS)
def _read_tokenizer(path: Path, changed: int, vocab_size: int, eos: tuple[int, ...]) -> LLTokenizer:
    """One for all in this process; another one once the file has changed."""
    return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos))


def _symbol(tokenizer: LLTokenizer, part: str) -> str:
    for token in tokenizer.tokenize_str(part, parse_special=True):
        if tokenizer.is_special_token(token) and tokenizer.decode_str([token]) == part:
            return f"<[{token}]>"
    return json.dumps(part)


def _parsers_words(text: str) -> str:
    """In one line; of a regular expression the parser shows the place before it says what is wrong."""
    first, found, error = text.strip().partition("\nerror: ")
    return _first_line(first) + (f" {_first_line(error)}" if found else "")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
