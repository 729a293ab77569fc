"""What `tools.check_clients` does with litellm, in whatever environment that is in. Needs nothing else.

python tools/litellm_requests.py NAME URL MODEL PROMPT MAX_TOKENS: says what the model did. `--names`: all names.
"""

import asyncio
import json
import sys
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
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools(asked: dict[str, Any]) -> str:
    """The plain answer, once one came to a prompt with tools."""
    assert litellm.completion(**asked, tools=[TOOL], tool_choice="auto").choices[0].finish_reason
    return chat(asked)


def calls(asked: dict[str, Any]) -> str:
    """The plain answer, once a call was forced, at once and as a stream, by both shapes that litellm speaks."""
    forced = {"max_tokens": 200, "tools": [TOOL], "tool_choice": "required"}
    for each in (asked, _of_anthropic(asked)):
        (call, *_) = litellm.completion(**each | forced).choices[0].message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments)["a"] in range(100), call
        whole = litellm.stream_chunk_builder(list(litellm.completion(**each | forced, stream=True)))
        (again, *_) = whole.choices[0].message.tool_calls
        assert again.function == call.function, again
    return chat(asked)


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
    return "".join(
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**_of_anthropic(asked), stream=True)
    )


def at_once(asked: dict[str, Any]) -> str:
    """The one thing that four requests at the same time said."""

    async def ask() -> set[str]:
        answers = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(4)))
        return {answer.choices[0].message.content for answer in answers}

    (said,) = asyncio.run(ask())
    return said


def errors(asked: dict[str, Any]) -> str:
    """The plain answer, once errors were told apart."""
    long = [{"role": "user", "content": "fox " * 40_000}]
    for wrong, kind in (
        ({"model": "openai/another"}, litellm.NotFoundError),
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


REQUESTS = {
    each.__name__: each
    for each in (chat, stream, tools, calls, schema, text, responses, messages, messages_stream, at_once, errors)
}


def main(name: str, url: str, model: str, prompt: str, most: str) -> None:
    asked = {
        "model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": int(most),
        "messages": [{"role": "user", "content": prompt}], "num_retries": 0,
    }  # fmt: skip
    print(REQUESTS[name](asked))


if __name__ == "__main__":
    if sys.argv[1:] == ["--names"]:
        print(" ".join(REQUESTS))
    else:
        main(*sys.argv[1:])
