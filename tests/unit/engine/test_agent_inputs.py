"""What agents send, as the model gets it: begun answers, and schemas with keywords that no grammar enforces."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.options import cluster_options
from coordinator.engine.grammars import json_grammar
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.tokenizer import Tokenizer
from coordinator.sessions.request import Conversation, RequestSpec
from worker.errors import InputError
from worker.model.checkpoint import DEMO, Checkpoint

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["a"],
    "additionalProperties": False,
    "not": {"type": "null"},
}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def inputs(runner: asyncio.Runner) -> InputProcessor:
    return runner.run(InputProcessor.read(cluster_options(None, "demo")))


def rendered(runner: asyncio.Runner, inputs: InputProcessor, *messages: dict[str, Any], **arguments: Any) -> str:
    tokens = runner.run(inputs.prompt_ids(Conversation(messages, (), arguments)))
    return runner.run(inputs.text_of(tokens))


def test_an_answer_that_was_begun_is_continued(runner: asyncio.Runner, inputs: InputProcessor) -> None:
    user, begun = {"role": "user", "content": "Name one."}, {"role": "assistant", "content": "It is"}
    assert rendered(runner, inputs, user).endswith("<|im_start|>assistant\n")
    assert rendered(runner, inputs, user, begun).endswith("<|im_start|>assistant\nIt is")
    call = {"function": {"name": "look", "arguments": {}}}
    for given in ({"role": "assistant", "content": ""}, begun | {"tool_calls": [call]}):
        assert rendered(runner, inputs, user, given).endswith("<|im_start|>assistant\n")
    assert rendered(runner, inputs, user, begun, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_a_template_without_tools_gets_them_and_their_results(runner: asyncio.Runner, inputs: InputProcessor) -> None:
    tools = ({"type": "function", "function": {"name": "look", "description": "See the sky."}},)
    user, result = {"role": "user", "content": "Snow?"}, {"role": "tool", "content": "It snows."}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 5}}}]}
    text = runner.run(inputs.text_of(runner.run(inputs.prompt_ids(Conversation((user, call, result), tools)))))
    for said in ("See the sky.", '{"name": "look", "arguments": {"at": 5}}', "It snows."):
        assert text.count(said) == 1


def test_keywords_that_no_grammar_enforces_are_named(runner: asyncio.Runner, inputs: InputProcessor) -> None:
    def request(**how: Any) -> Any:
        return runner.run(inputs.make_request(RequestSpec("a", grammar=json_grammar(SCHEMA, **how))))

    assert set(request(is_strict=False).not_enforced) == {"schema.uniqueItems", "schema.not"}
    with pytest.raises(InputError, match="Unimplemented keys"):
        request()
    assert runner.run(inputs.make_request(RequestSpec("a", grammar=json_grammar()))).not_enforced == ()


def test_later_system_messages_become_the_users_if_a_template_takes_one(runner: asyncio.Runner, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((DEMO / name).read_text())
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    once = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('once') }}{% endif %}"
    )
    settings["chat_template"] = once + "[{{ m.role }}]{{ m.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(Checkpoint("", tmp_path, {}, {}))
    said = [("system", "a"), ("system", "b"), ("user", "c"), ("system", "d"), ("assistant", "e"), ("user", "f")]
    messages = [{"role": role, "content": text} for role, text in said]
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "[system]a\nb[user]c\nd[assistant]e[user]f"
