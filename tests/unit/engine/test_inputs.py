"""Prompts and grammars that are refused before a node is asked, and what a request gets that does not say."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import Decode, make_cache_choice
from coordinator.engine import inputs
from coordinator.engine.bounded import Bounded, Bounds, GrammarTrials, LongTexts
from coordinator.engine.caller import BEST_PRIORITY, KEY_DIGEST
from coordinator.engine.grammars import json_grammar, lark_grammar, regex_grammar
from coordinator.engine.scores import continuation_specs, scoring
from coordinator.engine.tokenizer import Tokenizer
from coordinator.sessions.request import Calls, Conversation, RequestSpec
from worker.compute.header import MOST_GRAMMAR
from worker.errors import ContextExceeded, InputError, SamplingError, WaitedTooLong
from worker.model.checkpoint import Checkpoint

SYSTEM = {"role": "system", "content": "Be brief and kind, and answer in one line."}
LONG = "the long text " * 40_000
LONG_ENOUGH = "the quick brown fox, naïvely " * 10_000
EXPLODING = [
    json_grammar({"allOf": [{"type": "string", "pattern": f"^.*x.{{{n}}}$"} for n in range(12, 60)]}),
    lark_grammar("start: A\nA: " + " & ".join(f"/.*x.{{{n}}}/" for n in range(12, 60))),
]
CHAT = RequestSpec(Conversation(({"role": "user", "content": "hi"},)))

Run = Callable[[Any], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a coroutine on the loop that all tests share, as they share the processes of one front end."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def front(run: Run) -> inputs.InputProcessor:
    return run(inputs.InputProcessor.read(cluster_options(None, "demo")))


def both(prompt: str) -> tuple[str, Conversation]:
    """The prompt as a text and as a chat."""
    return prompt, Conversation(({"role": "user", "content": prompt},))


def asked_of(kind: type[Bounded], monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set once a process of this kind is asked for something."""
    asked, ask = threading.Event(), kind.ask

    def note(bounded: Bounded, request: bytes) -> Any:
        asked.set()
        return ask(bounded, request)

    monkeypatch.setattr(kind, "ask", note)
    return asked


def test_an_exploding_grammar_is_refused_and_holds_up_no_chat(
    front: inputs.InputProcessor, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def checked() -> None:
        await front.make_request(RequestSpec("a", grammar=regex_grammar("[0-9]+")))  # has read the vocabulary
        await front.make_request(CHAT)
        asked = asked_of(GrammarTrials, monkeypatch)
        exploding = asyncio.ensure_future(front.make_request(RequestSpec("a", grammar=EXPLODING[0])))
        await asyncio.to_thread(asked.wait)
        assert (await front.make_request(CHAT)).prompt and not exploding.done()
        with pytest.raises(InputError, match=r"^response_format: the grammar took .* to compile; make it simpler$"):
            await exploding
        assert psutil.Process().memory_info().rss < before + (256 << 20), "not in this process"
        assert (await front.make_request(RequestSpec("a", grammar=regex_grammar("[a-z]")))).prompt

    before = psutil.Process().memory_info().rss
    run(checked())


def test_a_grammar_is_refused_for_its_time_or_memory_and_the_next_one_is_read(front: inputs.InputProcessor) -> None:
    for grammar, bounds, said in (
        (EXPLODING[1], Bounds(seconds=0.5), "the grammar took .* to compile"),
        (EXPLODING[0], Bounds(seconds=20, memory_bytes=100 << 20), "took more than 100 MiB of memory to compile"),
    ):
        trials = GrammarTrials(front.checkpoint.folder, front.spec.vocab_size, sorted(front.eos), bounds)
        with pytest.raises(SamplingError, match=said):
            trials.require(grammar)
    trials.require(regex_grammar("[a-z]"))  # within the time that a slow machine needs to read it


@pytest.mark.parametrize(
    ("tools", "field", "name"),
    [
        ([("a", {}), ("b", {"properties": {"x": {"$ref": "#/$defs/none"}}})], "tools.1.function.parameters", "b"),
        ([("a", {"description": "x" * MOST_GRAMMAR}), ("b", {})], "tools.0.function.parameters", "a"),
        ([(f"f{n}", {"description": "x" * 400}) for n in range(3000)], "tools", "3000 tools"),
    ],
    ids=["wrong", "too large", "too many"],
)
def test_a_tool_whose_schema_cannot_be_enforced_is_refused_by_its_place_and_name(
    front: inputs.InputProcessor, run: Run, tools: list[tuple[str, Any]], field: str, name: str
) -> None:
    given = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools]
    prompt = Conversation(({"role": "user", "content": "hi"},), tuple(given))
    with pytest.raises(InputError, match=rf"\b{name}\b") as refused:
        run(front.grammar(RequestSpec(prompt, calls=Calls(are_forced=True)), ()))
    assert refused.value.field == field


def test_a_long_text_is_tokenized_elsewhere_and_holds_up_no_chat(
    front: inputs.InputProcessor, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def checked(prompt: Conversation | str) -> tuple[int, ...]:
        await front.make_request(CHAT)
        asked.clear()
        reading = asyncio.ensure_future(front.prompt_ids(prompt))
        await asyncio.to_thread(asked.wait)
        assert (await front.make_request(CHAT)).prompt and not reading.done()
        return await reading

    assert front.tokenizer is not None
    asked = asked_of(LongTexts, monkeypatch)
    for prompt in both(LONG_ENOUGH):
        assert list(run(checked(prompt))) == front.tokenizer.encode_prompt(prompt)


def test_a_text_that_takes_too_long_to_tokenize_or_is_too_long_is_refused(front: inputs.InputProcessor) -> None:
    def texts(**bounds: Any) -> LongTexts:
        return LongTexts(front.checkpoint.folder, trust_remote_code=False, bounds=Bounds(**bounds))

    with pytest.raises(InputError, match=r"^prompt: tokenizing it took longer than 0.1 s; shorten it$"):
        texts(seconds=0.1, memory_bytes=4 << 30).encode("encode", text=LONG_ENOUGH * 10)
    short = texts(text_bytes=1 << 10)
    with pytest.raises(ContextExceeded):
        short.encode("encode", text="the quick brown fox " * 1000)
    assert short.encode("encode", text="fox") == front.tokenizer.encode("fox")  # type: ignore[union-attr]


def test_a_too_long_prompt_is_refused(front: inputs.InputProcessor, run: Run) -> None:
    for prompt in both(LONG):
        with pytest.raises(
            ContextExceeded, match=r"^prompt: expected at most 2047 tokens beside .* 2048, found [0-9]{4,}"
        ):
            run(front.make_request(RequestSpec(prompt, max_tokens=1)))


@pytest.mark.parametrize(("prompt", "continuation"), [(LONG, (5,)), ("a", LONG), ((5,), LONG)])
def test_a_text_to_score_is_refused_by_its_length(
    front: inputs.InputProcessor, run: Run, prompt: Any, continuation: Any
) -> None:
    with pytest.raises(ContextExceeded):
        run(continuation_specs(front, prompt, [continuation]))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (regex_grammar("(("), r".*its parser says: .*\(in regex\): regex parse error: unclosed group$"),
        (json_grammar({"type": "number", "minimum": 5, "maximum": 3}), r".*says: Unsatisfiable schema: minimum \(5\)"),
        (json_grammar({"$ref": "#"}), r".*the grammar cannot go on: no text matches it; a rule or \$ref may stand"),
        ("x" * 2**21, "expected at most 1048576 characters of a grammar, got"),
    ],
    ids=["regex", "schema", "itself", "too long"],
)
def test_a_grammar_of_no_text_is_refused(front: inputs.InputProcessor, run: Run, grammar: str, said: str) -> None:
    with pytest.raises(InputError, match=f"^response_format: {said}"):
        run(front.make_request(RequestSpec("a", max_tokens=1, grammar=grammar)))


def test_what_is_usual_holds_for_requests_that_do_not_say_within_the_context(run: Run) -> None:
    front = run(
        inputs.InputProcessor.read(
            cluster_options(None, "demo"), sampling={"temperature": 0.5, "top_k": 3}, max_tokens=7
        )
    )
    silent = run(front.make_request(RequestSpec((1,))))
    said = run(front.make_request(RequestSpec((1,), max_tokens=9, sampling={"temperature": 0.25})))
    assert (silent.max_tokens, silent.sampling.temperature, silent.sampling.top_k) == (7, 0.5, 3)
    assert (said.max_tokens, said.sampling.temperature, said.sampling.top_k) == (9, 0.25, 3)
    for usual in (None, 10**9):
        front = run(inputs.InputProcessor.read(cluster_options(None, "demo"), max_tokens=usual))
        assert run(front.make_request(RequestSpec((1,)))).max_tokens == front.spec.context


async def test_a_grammar_tells_its_key_from_others_and_no_one_the_key(front: inputs.InputProcessor) -> None:
    owners = []
    for digest in ("", "ab" * 32, "cd" * 32, "ab" * 32):
        KEY_DIGEST.set(digest)
        request = await front.make_request(RequestSpec((1,), grammar=regex_grammar("[0-9]+")))
        owners.append(request.sampling.grammar.owner)
    assert owners[0] == "" and owners[1] == owners[3] and len(set(owners)) == 3
    assert not any(owner and owner in "abcd" * 64 for owner in owners)


@pytest.mark.parametrize(("best", "usual"), [(10, 10), (0, 0), (-3, 0)])
async def test_a_score_goes_no_earlier_than_its_key_may(front: inputs.InputProcessor, best: int, usual: int) -> None:
    BEST_PRIORITY.set(best)
    for spec in (scoring((1, 2, 3), 1), RequestSpec((1, 2), 0, decode=Decode("ar"), pooling="mean")):
        assert (await front.make_request(spec)).priority == usual
    assert (await front.make_request(RequestSpec((1,), priority=best))).priority == best


def test_the_sampler_is_told_the_tokens_that_parameters_speak_of(front: inputs.InputProcessor, run: Run) -> None:
    tokenizer, sampling = front.tokenizer, {"min_tokens": 2, "xtc_probability": 0.5, "dry_multiplier": 1.0}
    assert tokenizer is not None
    stops, texts = (9, 11), ("\n", " fox")
    found = run(front.make_request(RequestSpec("Once", 5, sampling, stop_token_ids=stops, dry_sequence_breakers=texts)))
    assert found.eos == front.eos | set(stops) > front.eos and found.sampling.begins == len(found.prompt)
    assert set(found.sampling.ends) == found.eos
    assert set(found.sampling.xtc_special_tokens) == front.eos | set(tokenizer.encode("\n"))
    assert found.sampling.dry_breakers == sorted(tokenizer.encode(text)[-1] for text in texts)
    assert (found.sampling.xtc_threshold, found.sampling.dry_base, found.sampling.dry_allowed_length) == (0.1, 1.75, 2)
    assert run(front.make_request(RequestSpec("a", stop_token_ids=stops, ignore_eos=True))).eos == set(stops)
    with pytest.raises(InputError) as refusal:
        run(front.make_request(RequestSpec("a", stop_token_ids=(front.spec.vocab_size,))))
    assert refusal.value.field == "stop_token_ids"


THOUGHT = "<think>", "</think>"
OPEN_CLOSE = "<|open|>think<|sep|>", "<|close|>think<|sep|>"


def thinking(front: inputs.InputProcessor, folder: Path, template: str, *special: str) -> inputs.InputProcessor:
    """The front of a model with this template and special tokens, for which mlx-lm takes it for one that thinks."""
    shutil.copy(front.checkpoint.folder / "tokenizer.json", folder)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "additional_special_tokens": special,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return inputs.InputProcessor(front.checkpoint, Tokenizer(Checkpoint("", folder, {}, {})))


@pytest.mark.parametrize(
    ("begin", "end", "special", "marks"),
    [
        ("<|im_start|>{role}\n", "<|im_end|>\n", THOUGHT, THOUGHT),
        ("<|of {role}|>", "", ("<|of user|>", "<|of assistant|>", *THOUGHT), THOUGHT),  # no token ends a turn
        ("{role}: ", "<|end_of_msg|>", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), OPEN_CLOSE),
    ],
    ids=["turns end", "turns begin", "marks of several tokens"],
)
def test_what_messages_say_of_thoughts_begins_none(
    front: inputs.InputProcessor, run: Run, tmp_path: Path, begin: str, end: str, special: Any, marks: tuple[str, str]
) -> None:
    """Some templates end within a thought; messages may name the tokens of thoughts, too."""
    each, last = begin.replace("{role}", "{{ m.role }}"), begin.replace("{role}", "assistant")
    template = f"{{% for m in messages %}}{each}{{{{ m.content }}}}{end}{{% endfor %}}{last}{{{{ thought }}}}"
    told, (opens, closes) = thinking(front, tmp_path, template, *special), marks
    for thought, begins_in in (("", "normal"), (opens, "reasoning"), (opens + closes, "normal")):
        for said in ("hi", f"What is {opens}?", f"What is {closes}?", opens + closes + opens):
            prompt = Conversation(({"role": "user", "content": said},), template_arguments={"thought": thought})
            assert told.tokenizer is not None
            assert told.tokenizer.markers(run(told.prompt_ids(prompt))).begins_in == begins_in, (thought, said)


def test_only_an_answer_that_begins_a_text_loses_its_first_space(front: inputs.InputProcessor, run: Run) -> None:
    begun = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "The sky is"})
    asked = (begun[:1], False), (begun, True)
    for messages, continues in asked:
        assert run(front.make_request(RequestSpec(Conversation(messages)))).continues_text is continues


def test_ends_that_are_no_tokens_of_the_model_are_left_out(front: inputs.InputProcessor, run: Run) -> None:
    config = {**front.checkpoint.config, "eos_token_id": [1, -1, front.spec.vocab_size, 2**40]}
    told = inputs.InputProcessor(replace(front.checkpoint, config=config), front.tokenizer)
    assert told.eos == front.eos | {1}
    request = run(told.make_request(RequestSpec("a", 4, {"min_tokens": 2})))
    assert set(request.sampling.ends) == told.eos == request.eos


def test_the_text_of_a_token_has_the_space_that_a_text_would_lose(front: inputs.InputProcessor, tmp_path: Path) -> None:
    """As in SentencePiece's tokenizers, whose decoders drop the first space of a text."""
    words = ["<unk>", "</s>", "a", "▁a", "▁the", "the", "▁sky", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    told = inputs.InputProcessor(front.checkpoint, Tokenizer(Checkpoint("", tmp_path, {}, {})))
    ids = [words.index(word) for word in ("▁the", "▁sky", "the", "<0xC3>", "<0xA9>")]
    assert [told.token_text(token) for token in ids[:3]] == [" the", " sky", "the"]
    assert b"".join(told.token_bytes(token) or b"?" for token in ids).decode() == " the skytheé"


def test_a_token_is_decoded_once(front: inputs.InputProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer with logprobs asks for twenty at each step, on the event loop."""

    def read() -> list[tuple[str, bytes | None]]:
        return [(front.token_text(token), front.token_bytes(token)) for token in range(99)]

    first = read()
    monkeypatch.setattr(Tokenizer, "decode", None)
    assert read() == first


def test_texts_of_a_request_that_would_hold_up_others_are_refused(front: inputs.InputProcessor, run: Run) -> None:
    for field, spec in (
        ("stop", RequestSpec("a", stops=("x" * 4097,))),
        ("dry_sequence_breakers", RequestSpec("a", dry_sequence_breakers=("x" * 257,))),
        ("max_tokens", RequestSpec("a", 2**63)),
        ("repeat_guard", RequestSpec("a", repeat_guard=2**63)),
    ):
        with pytest.raises(InputError, match="expected at most") as refused:
            run(front.make_request(spec))
        assert refused.value.field == field
    longest = RequestSpec("a", 2**63 - 1, stops=("x" * 4096,), dry_sequence_breakers=("x" * 256,))
    assert run(front.make_request(longest)).stops == longest.stops


async def test_a_grammar_that_was_refused_is_not_tried_again_at_once_for_the_same_key(
    front: inputs.InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents send their tools with every turn, and a trial may take seconds."""
    tried: list[str] = []

    def require(trials: GrammarTrials, text: str) -> list[str]:
        tried.append(text)
        raise SamplingError("the grammar took longer than 3 s to compile; make it simpler")

    async def ask(text: str, key: str = "") -> None:
        KEY_DIGEST.set(key)
        with pytest.raises(InputError, match=r"took longer than 3 s to compile"):
            await front.make_request(RequestSpec("a", grammar=text))

    monkeypatch.setattr(GrammarTrials, "require", require)
    slow = regex_grammar("slow")
    for _ in range(3):
        await ask(slow)
    await ask(slow, "ab" * 32)
    assert tried == [slow] * 2
    for number in range(256):
        await ask(regex_grammar(str(number)))
    await ask(regex_grammar("255"))
    assert len(tried) == 258
    monkeypatch.setattr(inputs, "REMEMBERED_S", 0.0)  # it is remembered for a while only
    await ask(slow)  # which only so many are
    await ask(slow)
    assert len(tried) == 260


def test_tools_that_could_not_be_read_in_time_are_offered_all_the_same(
    front: inputs.InputProcessor, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*given: object) -> Any:
        raise WaitedTooLong("waited 60 s to be read; try again later")

    monkeypatch.setattr(GrammarTrials, "require", too_late)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    offered = Conversation(({"role": "user", "content": "hi"},), (tool,))
    assert run(front.make_request(RequestSpec(offered))).not_enforced == ("schema",)
    with pytest.raises(WaitedTooLong):
        run(front.make_request(RequestSpec(offered, calls=Calls(are_forced=True))))


def test_an_optional_call_of_a_strict_tool_is_refused_where_its_schema_cannot_be_enforced(
    front: inputs.InputProcessor, run: Run
) -> None:
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"name": "f", "parameters": schema}

    def offered(**more: Any) -> RequestSpec:
        return RequestSpec(Conversation(({"role": "user", "content": "hi"},), ({"function": tool | more},)))

    assert run(front.make_request(offered())).not_enforced == ("schema.uniqueItems",)
    with pytest.raises(InputError, match=r"^tools: .*uniqueItems"):
        run(front.make_request(offered(strict=True)))
    assert run(front.make_request(replace(offered(strict=True), ignore_eos=True))).not_enforced == ("schema",)


def test_a_constrained_answer_thinks_only_if_asked_to(front: inputs.InputProcessor, run: Run, tmp_path: Path) -> None:
    told = thinking(front, tmp_path, "{{ enable_thinking }}", *THOUGHT)
    tokenizer = told.tokenizer
    assert tokenizer is not None
    number = replace(CHAT, grammar=regex_grammar("[0-9]"))
    thought = replace(number, prompt=Conversation(({"role": "user"},), template_arguments={"enable_thinking": True}))
    texts = [tokenizer.decode(run(told.make_request(asked)).prompt) for asked in (CHAT, number, thought)]
    assert texts == ["True", "False", "True"]


def test_a_rotating_cache_keeps_the_system_prompt_and_no_more(front: inputs.InputProcessor, run: Run) -> None:
    def kept(text: str, size: int = 100, messages: tuple[Any, ...] = (SYSTEM,)) -> tuple[int, tuple[int, ...]]:
        prompt = Conversation((*messages, {"role": "user", "content": text}))
        asked = RequestSpec(prompt, cache=make_cache_choice("rotating", size, "system"), keeps_system=True)
        request = run(front.make_request(asked))
        return request.cache.keep, request.prompt

    (one, begins), (other, begins_too) = kept("a lot of words, so that it is long"), kept("b")
    assert one == other > 10 and begins[:one] == begins_too[:one]
    assert front.tokenizer and SYSTEM["content"] in front.tokenizer.decode(begins[:one])
    for size, messages, field in ((one + 4, (SYSTEM,), "max_kv_size"), (100, (), "kv_keep")):
        with pytest.raises(InputError) as refused:
            kept("a", size, messages)
        assert refused.value.field == field


def test_no_system_prompt_is_kept_where_the_template_puts_it_before_the_last_question(
    front: inputs.InputProcessor, run: Run, tmp_path: Path
) -> None:
    shutil.copy(front.checkpoint.folder / "tokenizer.json", tmp_path)
    template = (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
        "{% endif %}{% for m in messages %}[{% if loop.last %}{{ system }} {% endif %}{{ m.content }}]{% endfor %}"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    told = inputs.InputProcessor(front.checkpoint, Tokenizer(Checkpoint("", tmp_path, {}, {})))
    said = [{"role": role, "content": "word"} for role in ("user", "assistant", "user")]
    for messages in (said[:1], said):  # a first turn, too, or the second one would fail
        cache = make_cache_choice("rotating", 100, "system")
        with pytest.raises(InputError) as refused:
            run(told.make_request(RequestSpec(Conversation((SYSTEM, *messages)), cache=cache, keeps_system=True)))
        assert refused.value.field == "kv_keep"


def test_where_caches_cannot_be_cut_a_request_tells_where_turns_end(front: inputs.InputProcessor, run: Run) -> None:
    def asked(*messages: tuple[str, str], size: int | None = 16) -> RequestSpec:
        conversation = Conversation((SYSTEM, *({"role": role, "content": text} for role, text in messages)))
        return RequestSpec(conversation, cache=make_cache_choice("rotating" if size else "full", size))

    first = ("user", "first thing")
    one, other, later, tool = (
        run(front.make_request(each))
        for each in (
            asked(first),
            asked(("user", "Another thing")),
            asked(first, ("assistant", "done"), ("user", "next")),
            asked(first, ("assistant", "call"), ("tool", "result")),
        )
    )
    system, end = one.turn_ends
    assert one.prompt[:system] == other.prompt[:system] and one.prompt[system] != other.prompt[system]
    assert one.prompt[:end] == later.prompt[:end] and end < len(one.prompt) and end in tool.turn_ends
    assert later.turn_ends[0] == system and len(later.turn_ends) == 2 and tool.turn_ends[-1] < len(tool.prompt)
    assert front.tokenizer is not None and front.tokenizer.decode(one.prompt[:end]).rstrip().endswith(
        "first thing<|im_end|>"
    )
    assert run(front.make_request(asked(first, size=None))).turn_ends == ()
