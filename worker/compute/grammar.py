"""Grammars: which tokens may follow in an answer. llguidance matches token ids."""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protos.brigade_pb2 import Grammar
from worker.errors import SamplingError
from worker.memory.history import common_prefix

# A grammar compiled while its session waits must still be here when the session opens, so keep one per waiting session.
# A typical grammar takes 0.15 MB, a long one 90 bytes per character of its text. Terminals that repeat may take 1,700
# bytes per character (60 times `/\w{1,50}x/`: 2.7 MiB), so that all kept ones take 700 MB at most.
_MOST_KEPT = 1024  # the default limit of waiting sessions on a coordinator
MOST_TEXT = 400_000  # characters of all kept grammars
_LEAST_KEPT = 16  # grammars kept however long they are
_MOST_TOKENIZERS = 4  # each has a trie of the whole vocabulary
# All steps wait while an evicted grammar is compiled again: with these limits at most half a second.
_LIMITS = LLParserLimits(max_grammar_size=20_000, verbose_errors=False)
_QUIET = 0
_ENDLESS = "NoExtensionBias"  # llguidance's error for a grammar that allows no token
_READING = Lock()  # one thread reads a tokenizer at a time
_KEYWORD = re.compile(r'"([^"]+)"')
_MARKER = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")  # text that may be a special token


class Guide:
    """The matcher of one answer, which moves back and forth to the requested position."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: Callable[[], LLTokenizer],
        begins: int,
        vocab_size: int,
        on_excess: Callable[[], None] = lambda: None,
    ) -> None:
        """`begins` is the index in the sequence where the answer begins.

        Args:
            tokenizer: reads the matcher's tokenizer, which few answers need.
            on_excess: called once the grammar is too complex. Then so are all copies of the matcher, which share their
                parser states.
        """
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._on_excess = on_excess
        self.begins = begins
        self._vocab_size = vocab_size
        self._taken: list[int] = []

    def copy(self) -> "Guide":
        """Return an independent guide at the same position."""
        other = Guide(self._matcher.deep_copy(), self._tokenizer, self.begins, self._vocab_size, self._on_excess)
        other._taken = list(self._taken)
        return other

    def allowed_next(self, answer: Sequence[int]) -> mx.array | None:
        """Return which tokens may follow an answer that ends in drafts, [V] bool; None if the grammar forbids a draft.

        Raises:
            SamplingError: the grammar is too complex.
        """
        return mx.array(self._allowed_here()) if self._go_to(answer, is_draft=True) else None

    def _allowed_here(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._require_sound()
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        if not self._matcher.validate_tokens([int(allowed.argmax())]):
            # llguidance spells a forced text as its tokenizer does, which may put a special token, or a normalized
            # character, where the matcher only takes the text's own bytes.
            text = self._matcher.compute_ff_bytes().decode(errors="ignore")
            spelled = self._tokenizer().greedy_tokenize(text)[:1]
            if self._matcher.validate_tokens(spelled):  # not where the grammar itself has a special token
                allowed = np.arange(self._vocab_size) == spelled[0]
        return allowed

    def allowed(self, tokens: Sequence[int], known: Sequence[int], num_wanted: int) -> mx.array:
        """Return which tokens may be chosen for each row, [N, V] bool.

        Args:
            tokens: the sequence; row n follows the first `known[n]` of them.
            num_wanted: the number of leading rows to restrict. The others are guesses, for which all tokens are
                allowed: a guess that the grammar forbids is rejected later.
        Raises:
            SamplingError: the tokens so far do not match the grammar, or it is too complex.
        """
        rows = np.ones((len(known), self._vocab_size), bool)
        for row, length in enumerate(known[:num_wanted]):
            if not self._go_to(tokens[self.begins : length], is_draft=row > 0):
                break  # rows after a forbidden draft are never used
            rows[row] = self._allowed_here()
        return mx.array(rows)

    def require_beginning(self) -> None:
        """Raise SamplingError if the grammar allows no first token."""
        self._matcher.compute_bitmask()
        self._require_sound()

    def not_enforced(self) -> list[str]:
        """Return the keywords of its JSON schemas that the grammar ignores."""
        found: dict[str, None] = {}
        for warning in self._matcher.get_grammar_warnings():
            listed = _KEYWORD.findall(warning.partition("Unimplemented keys:")[2])
            found |= dict.fromkeys(listed or warning.split()[:1])
        return list(found)

    def _go_to(self, answer: Sequence[int], *, is_draft: bool) -> bool:
        """Match exactly these tokens; return False if the grammar forbids a draft among them."""
        shared = common_prefix(answer, self._taken)
        if len(self._taken) > shared:
            self._matcher.rollback(len(self._taken) - shared)
        rest = list(answer[shared:])
        num_taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._require_sound()
        self._taken = [*answer[: shared + num_taken]]
        if num_taken < len(rest) and not is_draft:
            raise SamplingError(f"the answer does not match its grammar from its token {len(self._taken)} on")
        return num_taken == len(rest)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            if reason == _ENDLESS:
                reason = "no text matches it; a rule or $ref may stand for itself alone"
            self._on_excess()
            raise SamplingError(f"the grammar cannot go on: {reason}")


class Grammars:
    """Compiles grammars for one model's vocabulary and keeps the most recently used."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` holds the model's tokenizer.json, which all grammars need."""
        self._path = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._lock = Lock()  # a coordinator compiles on several threads
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._num_text = 0  # characters of all kept grammars
        self._special: list[int] | None = None

    def guide(self, grammar: Grammar) -> Guide:
        """Return a guide for one answer. Raises SamplingError for an invalid grammar or without a tokenizer.json."""
        kept = Grammar(text=grammar.text, eos=grammar.eos, owner=grammar.owner)
        key = kept.SerializeToString(deterministic=True)
        matcher = self._compiled.get(key) or self.compile(grammar)
        self._keep(key, matcher)
        tokenizer, forget = partial(self._tokenizer, tuple(grammar.eos)), partial(self._forget, key, matcher)
        return Guide(matcher.deep_copy(), tokenizer, grammar.begins, self._vocab_size, forget)

    def spelled(self, text: str, eos: Sequence[int]) -> str:
        """Return a text as a Lark rule, with ids for special tokens, since no text matches them."""
        tokenizer = self._tokenizer(tuple(eos))
        return " ".join(_symbol(tokenizer, part) for part in _MARKER.split(text) if part)

    def special_tokens(self, eos: Sequence[int]) -> Sequence[int]:
        """Return the special tokens, which no text matches, except those that end an answer."""
        tokenizer = self._tokenizer(tuple(eos))
        if self._special is None:
            self._special = [token for token in range(self._vocab_size) if tokenizer.is_special_token(token)]
        return [token for token in self._special if token not in eos]

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher. Raises SamplingError as `guide` does."""
        matcher = LLMatcher(self._tokenizer(tuple(grammar.eos)), grammar.text, log_level=_QUIET, limits=_LIMITS)
        if matcher.is_error():
            # for regular expressions llguidance prints the place before the error
            first, found, error = matcher.get_error().strip().partition("\nerror: ")
            reason = _first_line(first) + (f" {_first_line(error)}" if found else "")
            raise SamplingError(f"it cannot be enforced; its parser says: {reason}")
        return matcher

    def _tokenizer(self, eos: tuple[int, ...]) -> LLTokenizer:
        if (highest := max(eos, default=0)) >= self._vocab_size:
            raise SamplingError(f"expected tokens that end an answer below {self._vocab_size}, got {highest}")
        try:
            with _READING:
                return read_tokenizer(self._path, self._path.stat().st_mtime_ns, self._vocab_size, eos)
        except (OSError, ValueError) as error:
            reason = _first_line(str(error))
            raise SamplingError(f"grammars need a tokenizer.json that can be read: {reason}") from error

    def _keep(self, key: bytes, matcher: LLMatcher) -> None:
        """Mark a grammar as the most recently used."""
        with self._lock:
            if key not in self._compiled:
                self._num_text += len(key)
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            while len(self._compiled) > (_MOST_KEPT if self._num_text <= MOST_TEXT else _LEAST_KEPT):
                oldest, _ = self._compiled.popitem(last=False)
                self._num_text -= len(oldest)

    def _forget(self, key: bytes, matcher: LLMatcher) -> None:
        """Remove this matcher, so that the next answer compiles the grammar again."""
        with self._lock:
            if self._compiled.get(key) is matcher:
                del self._compiled[key]
                self._num_text -= len(key)


@lru_cache(_MOST_TOKENIZERS)
def read_tokenizer(path: Path, changed: int, vocab_size: int, eos: tuple[int, ...]) -> LLTokenizer:
    """Read a tokenizer. The cached one is shared until the file's time of change, `changed`, differs."""
    return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos))


def _symbol(tokenizer: LLTokenizer, part: str) -> str:
    for token in tokenizer.tokenize_str(part, parse_special=True):
        if tokenizer.is_special_token(token) and tokenizer.decode_str([token]) == part:
            return f"<[{token}]>"
    return json.dumps(part)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
