"""What `tools.check_clients` does with litellm, in the environment that it is in: every shape has the same answer.

python tools/litellm_requests.py URL PROMPT
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any

import litellm

litellm.suppress_debug_info = True  # which goes to standard output
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "is_new": {"type": "boolean"}},
    "required": ["name", "is_new"],
    "additionalProperties": False,
}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": ADD}}


def chat(asked: dict[str, Any]) -> str:
    answer = litellm.completion(**asked)
    assert answer.usage.completion_tokens <= asked["max_tokens"]
    return str(answer.choices[0].message.content)


def stream(asked: dict[str, Any]) -> str:
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens <= asked["max_tokens"]
    return _text_of(chunks)


def _text_of(chunks: Iterable[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def loop(asked: dict[str, Any]) -> str:
    """The plain answer, once tools were called and their results sent back, by both shapes that litellm speaks."""
    for each in (asked, _of_anthropic(asked)):
        for is_stream in (False, True):
            given = each | {"max_tokens": 400, "temperature": 1.0, "tools": [TOOL]}
            message = _message(given, is_stream=is_stream)
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": str(1 + json.loads(call.function.arguments)["a"])}
                for call in message.tool_calls
            ]
            assert not _message(
                given | {"messages": [*asked["messages"], message, *results]}, is_stream=is_stream
            ).tool_calls
    return chat(asked)


def _message(asked: dict[str, Any], *, is_stream: bool) -> Any:
    answer = litellm.completion(**asked, stream=is_stream)
    return (litellm.stream_chunk_builder(list(answer)) if is_stream else answer).choices[0].message


def schema(asked: dict[str, Any]) -> str:
    """The plain answer, once one of a schema came."""
    format = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    said = json.loads(
        litellm.completion(**asked | {"max_tokens": 100}, response_format=format).choices[0].message.content
    )
    assert said.keys() == {"name", "is_new"}, said
    return chat(asked)


def text(asked: dict[str, Any]) -> str:
    """The plain answer, once a raw completion came."""
    prompt = asked["messages"][0]["content"]
    rest = _without(asked, "messages") | {"model": _as("text-completion-openai", asked)}
    assert litellm.text_completion(**rest, prompt=prompt).choices[0].text
    return chat(asked)


def responses(asked: dict[str, Any]) -> str:
    rest = _without(asked, "messages", "max_tokens")
    answer = litellm.responses(**rest, input=asked["messages"][0]["content"], max_output_tokens=asked["max_tokens"])
    return "".join(part.text for item in answer.output if item.type == "message" for part in item.content)


def messages(asked: dict[str, Any]) -> str:
    return chat(_of_anthropic(asked))


def messages_stream(asked: dict[str, Any]) -> str:
    return _text_of(litellm.completion(**_of_anthropic(asked), stream=True))


def at_once(asked: dict[str, Any]) -> str:
    """The one thing that four requests at the same time said."""

    async def ask() -> set[str]:
        answers = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(4)))
        return {answer.choices[0].message.content for answer in answers}

    (said,) = asyncio.run(ask())
    return said


def errors(asked: dict[str, Any]) -> str:
    """The plain answer, once errors were told apart."""
    long = [{"role": "user", "content": "fox " * 80_000}]
    for wrong, kind in (
        ({"temperature": -1}, litellm.BadRequestError),
        ({"messages": long}, litellm.ContextWindowExceededError),
    ):
        try:
            litellm.completion(**asked | wrong)
        except kind:
            continue
        raise AssertionError(f"{wrong.keys()}: expected {kind}")
    return chat(asked)


def _of_anthropic(asked: dict[str, Any]) -> dict[str, Any]:
    return asked | {"model": _as("anthropic", asked), "api_base": asked["api_base"].removesuffix("/v1")}


def _as(provider: str, asked: dict[str, Any]) -> str:
    return f"{provider}/{asked['model'].partition('/')[2]}"


def _without(asked: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name not in names}


def main(url: str, prompt: str) -> None:
    asked = {
        "model": "openai/brigade", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 24, "temperature": 0.0,
        "messages": [{"role": "user", "content": prompt}], "num_retries": 0,
    }  # fmt: skip
    said = chat(asked)
    for each in (stream, loop, schema, text, responses, messages, messages_stream, at_once, errors):
        assert (found := each(asked)) == said, f"{each.__name__}: expected {said!r}, found {found!r}"


if __name__ == "__main__":
    main(*sys.argv[1:])
