"""Grammars that are refused before a node is asked."""

import asyncio
import threading

import pytest

from coordinator.resident import frontend
from coordinator.resident.ask import Ask, Conversation
from coordinator.resident.grammars import json_grammar, regex_grammar
from worker.compute.grammar import Grammars
from worker.errors import ContextExceeded, InputError

LONG = "the long text " * 40_000


def test_a_grammar_that_takes_too_long_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(frontend, "_COMPILES_S", 0.01)
    monkeypatch.setattr(Grammars, "guide", lambda self, grammar: released.wait(10))
    front = asyncio.run(frontend.Frontend.read("demo"))
    try:
        with pytest.raises(InputError, match=r"^response_format: expected a grammar that compiles within 0\.01 s$"):
            asyncio.run(front.prepare(Ask("a", max_tokens=1, grammar=regex_grammar("[0-9]+"))))
    finally:
        released.set()


def test_a_grammar_that_waits_for_its_turn_is_not_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(frontend, "_COMPILES_S", 0.0)

    async def checked() -> None:
        front = await frontend.Frontend.read("demo")
        held = asyncio.ensure_future(front._aside.run(lambda: released.wait(10)))
        asked = asyncio.ensure_future(front.prepare(Ask((1,), max_tokens=1, grammar=regex_grammar("[0-9]+"))))
        try:
            for _ in range(10):
                await asyncio.sleep(0)
            assert not asked.done()
        finally:
            released.set()
            await asyncio.gather(held, asked, return_exceptions=True)

    asyncio.run(checked())


@pytest.mark.parametrize("prompt", [LONG, Conversation(({"role": "user", "content": LONG},))], ids=["text", "chat"])
def test_a_prompt_that_is_plainly_too_long_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, prompt: Conversation | str
) -> None:
    front = asyncio.run(frontend.Frontend.read("demo"))
    assert front.tokenizer is not None
    asyncio.run(front.prepare(Ask(LONG[:5000], max_tokens=1)))  # probes the tokenizer
    monkeypatch.setattr(type(front.tokenizer), "encode", None)
    with pytest.raises(ContextExceeded, match=r"^prompt: expected at most 2047 tokens, found at least [0-9]{4,}"):
        asyncio.run(front.prepare(Ask(prompt, max_tokens=1)))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (regex_grammar("(("), r"its parser says: .*\(in regex\): regex parse error: unclosed group$"),
        (
            json_grammar({"type": "number", "minimum": 5, "maximum": 3}),
            r"says: Unsatisfiable schema: minimum \(5\) is g",
        ),
        (
            json_grammar({"$ref": "#"}),
            r"the grammar cannot go on: no text is one of it; a rule or \$ref may stand for it",
        ),
    ],
    ids=["regex", "schema", "itself"],
)
def test_a_grammar_that_nothing_is_of_is_refused_with_the_words_of_its_parser(grammar: str, said: str) -> None:
    front = asyncio.run(frontend.Frontend.read("demo"))
    with pytest.raises(InputError, match=f"^response_format: .*{said}"):
        asyncio.run(front.prepare(Ask("a", max_tokens=1, grammar=grammar)))


def test_a_grammar_that_no_node_takes_is_refused() -> None:
    front = asyncio.run(frontend.Frontend.read("demo"))
    with pytest.raises(InputError, match=r"^response_format: expected at most 1048576 characters of a grammar, got"):
        asyncio.run(front.prepare(Ask("a", max_tokens=1, grammar="x" * 2**21)))


def test_what_is_usual_holds_for_requests_that_do_not_say() -> None:
    front = asyncio.run(frontend.Frontend.read("demo", sampling={"temperature": 0.5, "top_k": 3}, max_tokens=7))
    silent = asyncio.run(front.prepare(Ask((1,)))).request
    said = asyncio.run(front.prepare(Ask((1,), max_tokens=9, sampling={"temperature": 0.25}))).request
    assert (silent.max_tokens, silent.sampling.temperature, silent.sampling.top_k) == (7, 0.5, 3)
    assert (said.max_tokens, said.sampling.temperature, said.sampling.top_k) == (9, 0.25, 3)
