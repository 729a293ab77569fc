"""A model whose tokenizer is Python code, as Kimi's: with --trust-remote-code like any other, without it in ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from coordinator.cluster.options import ClusterOptions
from tests.cluster.commands import answer_here, run_here
from tests.cluster.models import make_talker
from tests.cluster.test_serve_here import served
from tests.code_tokenizer import CODE, code_kept_in, write_code_tokenizer
from worker.config import ClusterConfig

ASKED = ("--local", "0", "--raw", "--prompt", "aé", "--max-tokens", "6", "--ignore-eos")
TRUSTED = "--trust-remote-code"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
BOUND: list[tuple[str, dict[str, Any], str]] = [  # what is asked where, and the field that is refused
    ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "regex", "regex": "a*"}}, "response_format"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ("/v1/messages", {"messages": HELLO, "output_config": {"format": FORMAT}}, "output_config.format"),
]  # fmt: skip


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kimi")
    with code_kept_in(folder / "modules"):
        yield write_code_tokenizer(make_talker(folder / "model"))


def test_trusted_code_makes_text_of_tokens_and_tokens_of_text(kimi: Path) -> None:
    by_text = answer_here("--model", kimi, TRUSTED, *ASKED)
    assert by_text["prompt_tokens"] == len("aé".encode())
    said = bytes(token for token in by_text["tokens"] if token < 256)
    assert by_text["text"] == said.decode(errors="replace").rstrip("\ufffd"), "but for half a character"


def test_verify_has_texts_among_its_prompts_where_the_code_is_trusted(kimi: Path) -> None:
    for flags in ((), (TRUSTED,)):
        outcome = run_here("verify", "--model", kimi, "--local", "0", "--max-tokens", "1", *flags)
        assert outcome.code == 0, outcome.err
        assert ("What is 48 + 27?" in outcome.out) == bool(flags)
        assert (CODE in outcome.err) == (not flags)
    assert TRUSTED not in run_here("plan", "--help").out, "a flag only where a tokenizer is loaded"


def test_a_server_without_a_fast_tokenizer_refuses_whatever_needs_a_grammar(kimi: Path) -> None:
    async def check() -> None:
        options = ClusterOptions(ClusterConfig(), str(kimi), 0, 4096, trust_remote_code=True)
        async with served(options) as client:
            for path, said, field in BOUND:
                found = await client.post(path, json={"max_tokens": 2, **said})
                assert found.status_code == 400, found.text
                assert found.json()["error"]["message"].startswith(field)
            free = await client.post("/v1/completions", json={"prompt": "aé", "max_tokens": 2})
            assert free.status_code == 200

    uvloop.run(check())
