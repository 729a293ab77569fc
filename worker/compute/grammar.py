"""Grammars: which tokens an answer may go on with. llguidance matches; its state follows from the ids alone."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from protos.brigade_pb2 import Grammar
from worker.errors import SamplingError

_MOST_KEPT = 16  # compiled grammars
_QUIET = 0


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
            raise SamplingError(f"the grammar cannot go on: {_first_line(self._matcher.get_error())}")


class Grammars:
    """Compiles the grammars of one model's vocabulary, and keeps those that were used last."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` holds the model's tokenizer.json; without one there are no grammars."""
        self._path = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}  # by the tokens that end an answer: one, as a rule
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def guide(self, grammar: Grammar) -> Guide:
        """Raises SamplingError for a grammar that is none, or a model without a fast tokenizer."""
        key = Grammar(text=grammar.text, eos=grammar.eos).SerializeToString(deterministic=True)
        if key not in self._compiled:
            self._compiled[key] = self._compile(grammar)
            if len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return Guide(self._compiled[key].deep_copy(), grammar.begins, self._vocab_size)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer(tuple(grammar.eos)), grammar.text, log_level=_QUIET)
        if matcher.is_error():
            raise SamplingError(f"expected a grammar, found something else: {_first_line(matcher.get_error())}")
        return matcher

    def _tokenizer(self, eos: tuple[int, ...]) -> LLTokenizer:
        if eos in self._tokenizers:
            return self._tokenizers[eos]
        try:
            text = self._path.read_text(encoding="utf-8")
            found = self._tokenizers[eos] = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(eos))
        except (OSError, ValueError) as error:
            said = f"grammars need a tokenizer.json that can be read: {_first_line(str(error))}"
            raise SamplingError(said) from error
        return found


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
