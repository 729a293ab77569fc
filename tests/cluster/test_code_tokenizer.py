"""A model whose tokenizer is Python code, as Kimi's: with --trust-remote-code like any other, without it in ids."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.commands import answer_here, run_here
from tests.cluster.models import make_talker
from tests.code_tokenizer import CODE, code_kept_in, write_code_tokenizer

TRUSTED = "--trust-remote-code"


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kimi")
    with code_kept_in(folder / "modules"):
        yield write_code_tokenizer(make_talker(folder / "model"))


def test_trusted_code_makes_text_of_tokens_and_tokens_of_text(kimi: Path) -> None:
    asked = ("--local", "0", "--raw", "--prompt", "aé", "--max-tokens", "6", "--ignore-eos")
    by_text = answer_here("--model", kimi, TRUSTED, *asked)
    assert by_text["prompt_tokens"] == len("aé".encode())
    said = bytes(token for token in by_text["tokens"] if token < 256)
    assert by_text["text"] == said.decode(errors="replace").rstrip("\ufffd"), "but for half a character"


def test_verify_has_texts_among_its_prompts_if_the_code_is_trusted(kimi: Path) -> None:
    for flags in ((), (TRUSTED,)):
        outcome = run_here("verify", "--model", kimi, "--local", "0", "--max-tokens", "1", *flags)
        assert outcome.code == 0, outcome.err
        assert ("What is 48 + 27?" in outcome.out) == bool(flags)
        assert (CODE in outcome.err) == (not flags)
