"""Grammars that are refused before a node is asked."""

import asyncio

import psutil
import pytest

from coordinator.engine import inputs
from coordinator.engine.bounded import Bounds, GrammarTrials, LongTexts
from coordinator.engine.grammars import json_grammar, lark_grammar, regex_grammar
from coordinator.sessions.request import Conversation, RequestSpec
from worker.errors import ContextExceeded, InputError, SamplingError

LONG = "the long text " * 40_000


EXPLODING = [
    json_grammar({"allOf": [{"type": "string", "pattern": f"^.*x.{{{n}}}$"} for n in range(12, 60)]}),
    lark_grammar("start: A\nA: " + " & ".join(f"/.*x.{{{n}}}/" for n in range(12, 60))),
]


@pytest.mark.parametrize("grammar", EXPLODING, ids=["JSON schema", "Lark"])
def test_a_grammar_that_explodes_is_refused_and_a_chat_beside_it_is_read_at_once(grammar: str) -> None:
    async def checked() -> None:
        front = await inputs.InputProcessor.read("demo")
        await front.make_request(RequestSpec("a", grammar=regex_grammar("[0-9]+")))  # has read the vocabulary
        chat = RequestSpec(Conversation(({"role": "user", "content": "hi"},)))
        await front.make_request(chat)
        exploding = asyncio.ensure_future(front.make_request(RequestSpec("a", grammar=grammar)))
        while not front._trying._turn.locked():  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        assert (await front.make_request(chat)).prompt and not exploding.done()
        with pytest.raises(InputError, match=r"^response_format: the grammar took .* to compile; make it simpler$"):
            await exploding
        assert psutil.Process().memory_info().rss < before + (256 << 20), "not in this process"
        assert (await front.make_request(RequestSpec("a", grammar=regex_grammar("[a-z]")))).prompt

    before = psutil.Process().memory_info().rss
    asyncio.run(checked())


LONG_ENOUGH = "the quick brown fox, naïvely " * 10_000


@pytest.mark.parametrize(
    "prompt", [LONG_ENOUGH, Conversation(({"role": "user", "content": LONG_ENOUGH},))], ids=["text", "chat"]
)
def test_a_long_text_is_tokenized_elsewhere_and_a_chat_beside_it_is_read_at_once(prompt: Conversation | str) -> None:
    async def checked() -> tuple[int, ...]:
        front = await inputs.InputProcessor.read("demo")
        assert front.tokenizer is not None
        chat = RequestSpec(Conversation(({"role": "user", "content": "hi"},)))
        await front.make_request(chat)
        reading = asyncio.ensure_future(front.prompt_ids(prompt))
        while not front._reading_long._turn.locked():  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        assert (await front.make_request(chat)).prompt and not reading.done()
        return await reading

    def here() -> list[int]:
        front = asyncio.run(inputs.InputProcessor.read("demo"))
        assert front.tokenizer is not None
        return front.tokenizer.encode_prompt(prompt)

    assert list(asyncio.run(checked())) == here()


def test_a_text_whose_tokens_take_too_long_is_refused() -> None:
    front = asyncio.run(inputs.InputProcessor.read("demo"))
    texts = LongTexts(
        front.checkpoint.folder, trust_remote_code=False, bounds=Bounds(seconds=0.1, memory_bytes=4 << 30)
    )
    with pytest.raises(InputError, match=r"^prompt: tokenizing it took longer than 0.1 s; shorten it$"):
        texts.encode("encode", text=LONG_ENOUGH * 10)


def test_more_tokens_than_fit_into_an_answer_are_refused() -> None:
    front = asyncio.run(inputs.InputProcessor.read("demo"))
    texts = LongTexts(front.checkpoint.folder, trust_remote_code=False, bounds=Bounds(text_bytes=1 << 10))
    with pytest.raises(ContextExceeded):
        texts.encode("encode", text="the quick brown fox " * 1000)
    assert texts.encode("encode", text="fox") == front.tokenizer.encode("fox")  # type: ignore[union-attr]


def test_a_grammar_that_wants_too_much_memory_is_refused() -> None:
    front = asyncio.run(inputs.InputProcessor.read("demo"))
    bounds = Bounds(seconds=20, memory_bytes=200 << 20)
    trials = GrammarTrials(front.checkpoint.folder, front.spec.vocab_size, sorted(front.eos), bounds)
    with pytest.raises(SamplingError, match="the grammar took more than 200 MiB of memory to compile"):
        trials.require(EXPLODING[0])
    trials.require(regex_grammar("[a-z]"))


@pytest.mark.parametrize("prompt", [LONG, Conversation(({"role": "user", "content": LONG},))], ids=["text", "chat"])
def test_a_prompt_that_is_plainly_too_long_is_refused_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, prompt: Conversation | str
) -> None:
    front = asyncio.run(inputs.InputProcessor.read("demo"))
    assert front.tokenizer is not None
    asyncio.run(front.make_request(RequestSpec(LONG[:5000], max_tokens=1)))  # probes the tokenizer
    monkeypatch.setattr(type(front.tokenizer), "encode", None)
    with pytest.raises(ContextExceeded, match=r"^prompt: expected at most 2047 tokens, found at least [0-9]{4,}"):
        asyncio.run(front.make_request(RequestSpec(prompt, max_tokens=1)))


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
            r"the grammar cannot go on: no text matches it; a rule or \$ref may stand for it",
        ),
    ],
    ids=["regex", "schema", "itself"],
)
def test_a_grammar_that_nothing_is_of_is_refused_with_the_words_of_its_parser(grammar: str, said: str) -> None:
    front = asyncio.run(inputs.InputProcessor.read("demo"))
    with pytest.raises(InputError, match=f"^response_format: .*{said}"):
        asyncio.run(front.make_request(RequestSpec("a", max_tokens=1, grammar=grammar)))


def test_a_grammar_that_no_node_takes_is_refused() -> None:
    front = asyncio.run(inputs.InputProcessor.read("demo"))
    with pytest.raises(InputError, match=r"^response_format: expected at most 1048576 characters of a grammar, got"):
        asyncio.run(front.make_request(RequestSpec("a", max_tokens=1, grammar="x" * 2**21)))


def test_what_is_usual_holds_for_requests_that_do_not_say() -> None:
    front = asyncio.run(inputs.InputProcessor.read("demo", sampling={"temperature": 0.5, "top_k": 3}, max_tokens=7))
    silent = asyncio.run(front.make_request(RequestSpec((1,))))
    said = asyncio.run(front.make_request(RequestSpec((1,), max_tokens=9, sampling={"temperature": 0.25})))
    assert (silent.max_tokens, silent.sampling.temperature, silent.sampling.top_k) == (7, 0.5, 3)
    assert (said.max_tokens, said.sampling.temperature, said.sampling.top_k) == (9, 0.25, 3)
