"""The least tokens of a text, by tokenizers that drop nothing, or something."""

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from coordinator.engine.tokenizer import LeastTokens

VOCABULARY = {"a": 0, "e": 1, "Ġ": 2, "Ċ": 3, "Í": 4, "¸": 5, "aaaaaaaa": 6, "<unk>": 7}
TEXT = "a e" * 9_000


def least(backend: Tokenizer, *added: AddedToken) -> LeastTokens:
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=list(added))
    return LeastTokens(fast, lambda text: fast.encode(text, add_special_tokens=False))


def bytes_of(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    backend = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[], unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer:
        backend.normalizer = normalizer
    return backend


def test_no_text_has_fewer_than_its_letters_by_the_longest_token_and_a_margin() -> None:
    """Blanks do not count where a token takes them with it."""
    assert least(bytes_of()).of(TEXT) == least(bytes_of(normalizers.NFC())).of(TEXT) == len(TEXT) // (8 * 4)
    assert least(bytes_of(), AddedToken("<end>", rstrip=True)).of("a" * 320 + " " * 10_000) == 10


@pytest.mark.parametrize(
    "backend",
    [
        bytes_of(normalizers.Replace(Regex(" +"), " ")),
        bytes_of(normalizers.Strip()),
        Tokenizer(models.BPE(vocab=VOCABULARY, merges=[], unk_token="<unk>", fuse_unk=True)),
    ],
    ids=["blanks become one", "blanks are dropped", "what is unknown becomes one"],
)
def test_nothing_is_known_of_a_tokenizer_that_may_drop_what_it_is_given(backend: Tokenizer) -> None:
    assert least(backend).of(TEXT) == 0
