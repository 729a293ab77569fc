import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from coordinator.api.body import read
from coordinator.api.completions import Choice, CompletionAnswer, CompletionBody
from coordinator.api.openai import ChatAnswer, ChatBody, OpenAIAnswer
from coordinator.api.sse import DONE, Event, encode
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.tokenizer import Tokenizer
from coordinator.sessions.output import Output, Scored, Token, ToolCall, Usage
from coordinator.sessions.request import Conversation
from protos.brigade_pb2 import Alternative, Sample
from tests.unit.api.fakes import ScriptedModel, app_of, ask, only
from worker.model.checkpoint import DEMO, open_folder

USAGE = Usage(3, 0, 2, 4, 4, num_generated=4)
CALL = ToolCall("call_1", "look", '{"a": 1}')


HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def answer_of(**fields: Any) -> ChatAnswer:
    return ChatAnswer(read(ChatBody, HELLO | fields), "talker")


def parsed(events: Iterable[Event]) -> list[dict[str, Any]]:
    """As clients get them, without the end of the stream."""
    return [json.loads(encode(event).removeprefix(b"data: ")) for event in events if event != DONE]


def chunks_of(answer: ChatAnswer, outputs: Sequence[Output], index: int = 0) -> list[dict[str, Any]]:
    """The chunks of a choice, without the first one, which tells the role."""
    first, *chunks = parsed([event for output in outputs for event in answer.events(index, output)])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    return chunks


def whole_of(answer: OpenAIAnswer, *choices: Sequence[Output]) -> Any:
    for index, outputs in enumerate(choices):
        for output in outputs:
            answer.add(index, output)
    return answer.whole()


def messages_of(*messages: dict[str, Any]) -> list[Any]:
    prompt = read(ChatBody, {"messages": list(messages)}).to_spec().prompt
    assert isinstance(prompt, Conversation)
    return list(prompt.messages)


def test_messages_are_told_to_the_template_in_its_own_words() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    assert messages_of(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call | {"function": {"name": "look", "arguments": {"a": 1}}}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]


def test_calls_of_the_older_form_and_their_results_are_those_of_tools() -> None:
    call = {"name": "look", "arguments": '{"a": 1}'}
    result = {"content": "4", "name": "look"}
    assert messages_of(
        {"role": "assistant", "content": None, "function_call": call, "tool_calls": None},
        {"role": "function", **result},
    ) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"a": 1}}}],
        },
        {"role": "tool", **result},
    ]


def test_a_stream_and_a_whole_answer_tell_the_same() -> None:
    deltas = [
        Output("", (Token(1),), 0),
        Output("", (Token(1),), 0, reasoning="hm"),
        Output("", (Token(1),), 0, content="look: "),
        Output("", (Token(1),), 0, "tool_calls", USAGE, tool_calls=(CALL,)),
    ]
    [choice] = whole_of(answer_of(), deltas)["choices"]
    chunks = [chunk["choices"][0] for chunk in chunks_of(answer_of(), deltas)]
    assert len(chunks) == 3
    message = choice["message"]
    assert message["content"] == "".join(chunk["delta"].get("content", "") for chunk in chunks) == "look: "
    assert message["reasoning"] == message["reasoning_content"] == chunks[0]["delta"]["reasoning_content"] == "hm"
    [call] = message["tool_calls"]
    assert chunks[-1]["delta"]["tool_calls"] == [call | {"index": 0}]
    assert call["function"] == {"name": "look", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat/completions", HELLO | {"logprobs": True}), ("completions", {"prompt": "a", "logprobs": 0})],
)
def test_the_logprobs_of_a_whole_answer_are_made_as_they_come(path: str, body: dict[str, Any]) -> None:
    """All at once at the end, they would hold up every stream."""
    made: list[set[int]] = []

    class Model(ScriptedModel):
        def token_text(self, token: int) -> str:  # type: ignore[override]
            told.add(token)
            return ""

    def script() -> Iterator[Output]:
        for number in range(3):
            yield Output("", [Token(number)], 0)
            made.append({*told})
        yield only(0)

    told = set[int]()
    assert ask(app_of(Model(script())), "POST", f"http://localhost:9338/v1/{path}", json=body).status_code == 200
    assert made == [{0}, {0, 1}, {0, 1, 2}]


def test_the_logprobs_of_an_echoed_prompt_are_made_as_they_come() -> None:
    made, told = answer(Choice("abca", (0, 1, 0)), echo=True, logprobs=1), list[int]()
    made.token_text = lambda token: str(told.append(token))
    assert not chunks(made, scored(token(1, -0.5, (2, -0.5)))) and told == [2, 1]


@pytest.mark.parametrize("wants", [True, False])
def test_what_is_decided_ahead_comes_with_the_chunk_of_its_step_where_it_is_asked_for(*, wants: bool) -> None:
    """Also with a step whose tokens say nothing yet."""
    steps = [Output(text, [Token(5)], 0, fills=[(9, Token(7)), (11, Token(6))], content=text) for text in ("a", "")]
    chunks = chunks_of(answer_of(brigade={"fills": wants}), [*steps, only(0)])
    ahead = {"fills": [[9, "7"], [11, "6"]]}
    assert [chunk.get("brigade") for chunk in chunks] == ([ahead, ahead, None] if wants else [None, None])
    if wants:
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"content": "a"}, {}, {"content": "a"}]


def test_a_stream_tells_the_figures_of_its_choices_by_number_in_whatever_order_they_end() -> None:
    answer = answer_of(n=3, stream_options={"include_usage": True})
    for index in (2, 0, 1):
        chunks_of(answer, [only(num_reused=index)], index)
    [closing, done] = answer.end()
    assert done == DONE == next(answer_of().end()), "the only event of one that is not asked for its usage"
    assert [figures["reused_tokens"] for figures in closing["brigade"]] == [0, 1, 2]
    assert closing["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_calls_of_a_stream_are_numbered_on_and_bytes_of_a_part_of_a_character_are_its_own_or_not_told() -> None:
    second, third = (ToolCall(id, "look", "{}") for id in ("call_2", "call_3"))
    outputs = [
        Output("", (), 0, tool_calls=(CALL,)), Output("", (), 0, "tool_calls", USAGE, tool_calls=(second, third))
    ]  # fmt: skip
    calls = [call for chunk in chunks_of(answer_of(), outputs) for call in chunk["choices"][0]["delta"]["tool_calls"]]
    assert [call["index"] for call in calls] == [0, 1, 2]
    pieces = [ToolCall("call_1", "look", part) for part in ("", '{"a": ', "1}")]
    [chunk] = chunks_of(answer_of(), [Output("", (), 0, "tool_calls", USAGE, tool_calls=tuple(pieces))])
    [call] = chunk["choices"][0]["delta"]["tool_calls"]  # some clients read the first only
    assert call["function"] == {"name": "look", "arguments": '{"a": 1}'}
    apart = [
        Output("", (), 0, tool_calls=tuple(pieces[:2])),
        Output("", (), 0, "tool_calls", USAGE, tool_calls=(pieces[2], second)),
    ]
    called = whole_of(answer_of(), apart)["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in called] == [
        ("call_1", '{"a": 1}'),
        ("call_2", "{}"),
    ]
    made = answer_of(logprobs=True)
    made.token_text, made.token_bytes = lambda token: "\ufffd", {1: b"\xe2", 2: None}.get
    logprobs = whole_of(made, [Output("", (Token(1), Token(2)), 0, "stop", USAGE)])["choices"][0]["logprobs"]
    assert logprobs and [entry["bytes"] for entry in logprobs["content"]] == [[0xE2], None]


EOS = 9
LETTERS = {0: b"a", 1: b"bc", 2: b"\xc3", 3: b"\xa9", 4: b" ", 5: b" a", EOS: b"<eos>"}  # 2 and 3 are halves of é


def token(number: int, logprob: float = -1.0, *others: tuple[int, float]) -> Token:
    alternatives = [Alternative(token=other, logprob=value) for other, value in others]
    return Token.of(Sample(token=number, logprob=logprob, alternatives=alternatives))


def delta(text: str, *tokens: Token, finish_reason: str | None = None, num_prompt: int = 3) -> Output:
    usage = Usage(num_prompt, 0, 1, 1, 1, num_generated=2) if finish_reason else None
    return Output(text, tokens, 0, finish_reason, usage, content=text)


def answer(*choices: Choice, **fields: Any) -> CompletionAnswer:
    made = CompletionAnswer(read(CompletionBody, {"prompt": "a"} | fields), "talker")
    made.token_text, made.token_bytes = lambda token: LETTERS[token].decode(errors="replace"), LETTERS.get
    made.choices = list(choices)
    return made


def chunks(answer: CompletionAnswer, *outputs: Output) -> list[Any]:
    """The choices of a stream's events."""
    return [event["choices"][0] for output in outputs for event in answer.events(0, output)]


def test_each_token_has_its_place_in_the_text_though_some_make_a_character_together() -> None:
    deltas = [delta("abc", token(0), token(1)), delta("", token(2)), delta("é", token(3)), delta("", token(4))]
    deltas.append(delta(" a", token(0), token(EOS), finish_reason="stop"))
    whole = whole_of(answer(Choice(eos=frozenset({EOS})), logprobs=0), deltas)["choices"][0]
    assert whole["text"] == "abcé a" and whole["logprobs"]
    assert whole["logprobs"]["text_offset"] == [0, 1, 3, 3, 4, 5, 6]
    streaming = answer(Choice(eos=frozenset({EOS})), logprobs=0)
    offsets = [place for chunk in chunks(streaming, *deltas) for place in chunk["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    answers = CompletionAnswer(read(CompletionBody, {"prompt": [1], "logprobs": 0}), "talker")  # without a tokenizer
    answers.choices = [Choice()]
    deltas = [delta("12", token(12)), delta(",5,0", token(5), token(0), finish_reason="stop")]
    [whole] = whole_of(answers, deltas)["choices"]
    assert whole["text"] == "12,5,0" and whole["logprobs"]["text_offset"] == [0, 3, 5]


@pytest.mark.parametrize("text", [" 5- swan ,  2 x \n 3", "naïve ☃🦊 日 5"])
async def test_a_token_begins_where_its_text_is_in_the_answer_of_a_real_tokenizer(text: str) -> None:
    checkpoint = open_folder(DEMO)
    inputs = InputProcessor(checkpoint, tokenizer := Tokenizer(checkpoint))
    made = CompletionAnswer(read(CompletionBody, {"prompt": [1, 2], "logprobs": 0, "max_tokens": 64}), "talker")
    [request] = await made.prepare(inputs)
    ids = tokenizer.encode(text, special=False)
    output = delta("", *map(token, ids), finish_reason="length")
    inputs.parser(request).read(output)
    [whole] = whole_of(made, [output])["choices"]
    offsets, parts = whole["logprobs"]["text_offset"], [tokenizer.token_bytes(each) or b"" for each in ids]
    assert whole["text"] == text and b"".join(parts) == text.encode()
    before = [b"".join(parts[:number]).decode(errors="ignore") for number in range(len(parts))]
    assert offsets == [*map(len, before)] and len({*offsets}) > 8


def test_the_token_that_was_taken_is_among_the_likeliest_and_look_alikes_are_told_once() -> None:
    found = delta("a", token(0, -2.0, (1, -0.5), (2, -1.0), (3, -1.5)), finish_reason="length")
    logprobs = whole_of(answer(Choice(), logprobs=3), [found])["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"bc": -0.5, "\ufffd": -1.0, "a": -2.0}]
    assert logprobs["tokens"] == ["a"] and logprobs["token_logprobs"] == [-2.0]
    never = delta("a", token(0, float("-inf"), (1, float("-inf"))), finish_reason="length")
    logprobs = whole_of(answer(Choice(), logprobs=3), [never])["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0] and logprobs["top_logprobs"][0]["bc"] == -9999.0


def test_usage_counts_each_prompt_once_and_all_that_was_generated() -> None:
    lasts = [delta("a", token(0), finish_reason="stop", num_prompt=length) for length in (3, 3, 5, 5)]
    made = answer(*[Choice() for _ in lasts], prompt=["a", "b"], n=2)
    usage = whole_of(made, *[[last] for last in lasts])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 8, 16)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


def test_an_echoed_prompt_comes_first_and_one_that_is_only_scored_has_no_answer() -> None:
    opening, chunk = chunks(answer(Choice("xyz"), logprobs=0), delta("a", token(0)))
    assert opening["text"] == "xyz" and chunk["logprobs"]["text_offset"] == [3]
    assert len(chunks(answer(Choice()), delta("a", token(0)))) == 1
    outputs = [scored(token(1, -0.5, (1, -0.5))), delta("", finish_reason="length")]
    whole = whole_of(answer(Choice("abc", (0, 1)), echo=True, logprobs=1), outputs)["choices"][0]
    assert whole["text"] == "abc" and whole["logprobs"] and whole["logprobs"]["token_logprobs"] == [None, -0.5]
    assert read(CompletionBody, {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1}).scores_prompts


def scored(*tokens: Token) -> Output:
    return Output("", (), 0, scores=[Scored(each, is_greedy=True) for each in tokens])


def test_the_tokens_of_an_echoed_prompt_have_log_probabilities_but_for_the_first() -> None:
    outputs = [
        scored(token(1, -0.5, (1, -0.5))), scored(token(0, -2.0, (1, -0.25))),
        delta("a", token(0, -3.0, (0, -3.0)), finish_reason="length"),
    ]  # fmt: skip
    expected = {
        "tokens": ["a", "bc", "a", "a"],
        "token_logprobs": [None, -0.5, -2.0, -3.0],
        "top_logprobs": [None, {"bc": -0.5}, {"bc": -0.25, "a": -2.0}, {"a": -3.0}],
        "text_offset": [0, 1, 3, 4],
    }
    choice = Choice("abca", (0, 1, 0))
    whole = whole_of(answer(choice, echo=True, logprobs=1), outputs)["choices"][0]
    assert (whole["text"], whole["logprobs"]) == ("abcaa", expected)
    opening, chunk = chunks(answer(Choice("abca", (0, 1, 0)), echo=True, logprobs=1), *outputs)
    assert opening["text"] == "abca" and opening["finish_reason"] is None
    assert {name: [*opening["logprobs"][name], *chunk["logprobs"][name]] for name in expected} == expected


def test_what_a_tokenizer_puts_before_an_echoed_prompt_has_no_place_of_its_own() -> None:
    outputs = [scored(token(5), token(1), token(5)), delta(" a", token(5), finish_reason="length")]
    made = answer(Choice("abc a", (EOS, 5, 1, 5), frozenset({EOS})), echo=True, logprobs=1)
    [whole] = whole_of(made, outputs)["choices"]
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("abc a a", [0, 0, 1, 3, 5])


def test_an_echoed_prompt_that_ends_within_a_character_leaves_the_answer_its_places() -> None:
    outputs = [scored(token(2)), delta("aa", token(0), token(0), finish_reason="length")]
    [whole] = whole_of(answer(Choice("a\ufffd", (0, 2)), echo=True, logprobs=1), outputs)["choices"]
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("a\ufffdaa", [0, 1, 2, 3])
