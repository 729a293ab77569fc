"""Calls are told as they are written, in every format that mlx-lm reads, and end as mlx-lm reads them."""

import json
import pkgutil
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
from mlx_lm import tool_parsers

from coordinator.sessions.calls import WrittenCalls, joined_calls
from coordinator.sessions.output import ToolCall
from worker.platform.text import to_json

CODE = "import os\n\ndef main() -> None:\n" + "".join(f'    print("line {n}", os.sep)  # é\n' for n in range(40))
PROPERTIES = {"path": {"type": "string"}, "content": {"type": "string"}, "count": {"type": "integer"}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "wait"}},
]
WRITE = {"path": "a.py", "count": 3, "content": CODE.strip()}
BODY = json.dumps(WRITE)


def tagged(begin: str, key: str, end: str, close: str) -> str:
    return begin + "".join(key.replace("KEY", name) + str(value) + end for name, value in WRITE.items()) + close


PYTHONIC = ", ".join(f"{name}={value!r}" for name, value in WRITE.items())
GEMMA4 = ",".join(
    f'{name}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{name}:{value}" for name, value in WRITE.items()
)
WRITTEN = {
    "json_tools": f'\n{{"name": "write", "arguments": {BODY}}}\n',
    "mistral": f"write[ARGS]{BODY}",
    "kimi_k2": f"<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{BODY}<|tool_call_end|>",
    "qwen3_coder": tagged("\n<function=write>\n", "<parameter=KEY>\n", "\n</parameter>\n", "</function>\n"),
    "glm47": tagged("write\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    "laguna": tagged("write\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    "longcat": tagged(
        "write\n", "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n", ""
    ),
    "minimax_m2": tagged('\n<invoke name="write">\n', '<parameter name="KEY">', "</parameter>\n", "</invoke>\n"),
    "minicpm5": tagged('"write">', '<param name="KEY">', "</param>", ""),
    "muse_spark": tagged(
        '<atem:invoke name="write">', '<atem:parameter name="KEY">', "</atem:parameter>", "</atem:invoke>"
    ),
    "kimi_k3": tagged(
        '<|open|>call tool="write" index="1"<|sep|>',
        '<|open|>argument key="KEY" type="string"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
    ),
    "pythonic": f"[write({PYTHONIC})]",
    "gemma4": f"call:write{{{GEMMA4}}}",
    "function_gemma": f"call:write{{path:<escape>a.py<escape>,count:3,content:<escape>{CODE.strip()}<escape>}}",
}  # fmt: skip


def written(
    form: str, text: str, size: int, most: int | None = None, used: set[str] | None = None
) -> tuple[list[tuple[int, ToolCall]], bool]:
    """The pieces, each with how much of the text had come; and whether the text was calls."""
    parse = import_module(f"mlx_lm.tool_parsers.{form}").parse_tool_call
    calls = WrittenCalls(form, parse, TOOLS, most, set() if used is None else used)
    pieces = [(at + size, piece) for at in range(0, len(text), size) for piece in calls.push(text[at : at + size])]
    rest = calls.finish()
    return pieces + [(len(text), piece) for piece in rest or ()], rest is not None


def expected(form: str, text: str) -> Any:
    found = import_module(f"mlx_lm.tool_parsers.{form}").parse_tool_call(text, TOOLS)
    return [(call["name"], call["arguments"]) for call in (found if isinstance(found, list) else [found])]


def told(pieces: list[tuple[int, ToolCall]]) -> Any:
    return [(call.name, json.loads(call.arguments)) for call in joined_calls([piece for _, piece in pieces])]


def test_every_format_of_mlx_lm_is_among_them() -> None:
    assert {module.name for module in pkgutil.iter_modules(tool_parsers.__path__)} == set(WRITTEN)


@pytest.mark.parametrize("form", WRITTEN)
def test_the_pieces_of_a_call_are_the_call_that_mlx_lm_reads(form: str) -> None:
    for size in (1, 7, 100, 10_000):
        pieces, are_calls = written(form, WRITTEN[form], size)
        assert are_calls and told(pieces) == expected(form, WRITTEN[form]), size
        assert len({piece.id for _, piece in pieces}) == 1, size


@pytest.mark.parametrize("form", WRITTEN)
def test_the_name_comes_first_and_a_long_text_as_it_is_written(form: str) -> None:
    text = WRITTEN[form]
    pieces, _ = written(form, text, 3)
    first_at, first = pieces[0]
    assert first.name == "write" and first_at < 150
    waited = [later - earlier for (earlier, _), (later, _) in pairwise(pieces)]
    # its text holds what ends an object, which mlx-lm's parser takes for the end of the call
    assert max(waited) < (250 if form != "function_gemma" else len(text))


@pytest.mark.parametrize("form", WRITTEN)
def test_a_call_that_breaks_off_is_told_as_far_as_it_went(form: str) -> None:
    whole = to_json(expected(form, WRITTEN[form])[0][1])
    for cut in (len(WRITTEN[form]) // 2, len(WRITTEN[form]) - 60):
        pieces, are_calls = written(form, WRITTEN[form][:cut], 5)
        [call] = joined_calls([piece for _, piece in pieces])
        assert are_calls and call.name == "write"
        if form not in ("json_tools", "mistral", "kimi_k2"):
            assert whole.startswith(call.arguments.removesuffix("}")) or json.loads(call.arguments)
        else:
            assert BODY.startswith(call.arguments)


PARALLEL = {
    "mistral": '[{"name": "write", "arguments": {"path": "}"}}, {"name": "wait", "arguments": {}}]',
    "kimi_k2": (
        '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"path": "}"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.wait:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    ),
    "minimax_m2": '<invoke name="write"><parameter name="path">}</parameter></invoke><invoke name="wait"></invoke>',
    "pythonic": '[write(path="}"), wait()]',
    "gemma4": 'call:write{path:<|"|>}<|"|>}call:wait{}',
}


@pytest.mark.parametrize("form", PARALLEL)
@pytest.mark.parametrize("size", [1, 1000])
def test_calls_beside_each_other_have_ids_of_their_own(form: str, size: int) -> None:
    pieces, are_calls = written(form, PARALLEL[form], size)
    assert are_calls and told(pieces) == expected(form, PARALLEL[form]) == [("write", {"path": "}"}), ("wait", {})]
    assert told(written(form, PARALLEL[form], size, most=1)[0]) == [("write", {"path": "}"})]
    assert written(form, PARALLEL[form], size, most=0) == ([], True)


@pytest.mark.parametrize("size", [1, 1000])
def test_an_id_that_the_model_gives_twice_is_used_once(size: int) -> None:
    """In one section of calls and in a later one: clients join the pieces of a call by its id."""
    calls = "".join(
        f'<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{{"path": "{path}"}}<|tool_call_end|>'
        for name, path in (("write", "a"), ("wait", "b"), ("write", "c"))
    )
    used = {"functions.wait:0"}
    pieces, _ = written("kimi_k2", calls, size, used=used)
    found = joined_calls([piece for _, piece in pieces])
    assert [call.id.startswith("call_") for call in found] == [False, True, True]
    assert len({call.id for call in found}) == 3
    assert [json.loads(call.arguments)["path"] for call in found] == ["a", "b", "c"] and used >= {c.id for c in found}


@pytest.mark.parametrize("form", ["mistral", "kimi_k2"])
def test_calls_that_come_at_once_are_told_before_the_last_one_ends(form: str) -> None:
    text = PARALLEL[form].replace('"}"', f'"{"x" * 5000}"')
    pieces, _ = written(form, text[: text.rindex("{") + 1], 10_000)
    assert [piece.name for _, piece in pieces if not piece.arguments] == ["write", "wait"]


def test_a_call_within_the_arguments_of_another_is_no_call() -> None:
    inner = '{"name": "wait", "arguments": {}}'
    text = f'{{"arguments": {{"path": {inner}}}, "name": "write"}}'
    for size in (1, 1000):
        assert told(written("json_tools", text, size)[0]) == expected("json_tools", text)


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"na', '{"name": "write", "arg', '{"name": "write"}'])
def test_what_has_no_arguments_is_no_call(text: str) -> None:
    assert written("json_tools", text, 1) == ([], False)


@pytest.mark.parametrize("form", ["qwen3_coder", "glm47", "minimax_m2", "minicpm5", "muse_spark", "kimi_k3", "longcat"])
def test_a_text_that_looks_like_something_else_is_read_as_mlx_lm_reads_it(form: str) -> None:
    for value in ("null", "true", "12", "[1, 2]", '"quoted"', "", " ", "x" * 39 + "</", "<a>" * 30):
        text = WRITTEN[form].replace(CODE.strip(), value)
        for size in (1, 13):
            assert told(written(form, text, size)[0]) == expected(form, text), value


@pytest.mark.parametrize(
    "function",
    [
        {"name": ["write"]},
        {"name": "write", "parameters": []},
        {"name": "write", "parameters": {"properties": {"content": True}}},
        {"name": "write", "parameters": {"properties": {"content": {"type": ["string"]}}}},
    ],
)
@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic", "gemma4"])
def test_whatever_a_client_calls_a_tool_breaks_no_answer(form: str, function: dict[str, Any]) -> None:
    parse = import_module(f"mlx_lm.tool_parsers.{form}").parse_tool_call
    calls = WrittenCalls(form, parse, [{"type": "function", "function": function}])
    for at in range(0, len(WRITTEN[form]), 20):
        calls.push(WRITTEN[form][at : at + 20])
    calls.finish()


def test_a_value_that_is_nested_too_deeply_is_no_call() -> None:
    parse = import_module("mlx_lm.tool_parsers.pythonic").parse_tool_call
    calls = WrittenCalls("pythonic", parse, TOOLS)
    calls.push("[write(path=" + "[" * 5000)
    assert calls.finish() is None
