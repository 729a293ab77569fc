"""Anthropic's messages: an answer's deltas as events or as one message. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from coordinator.resident.channels import Delta, ToolCall
from coordinator.shapes.answers import figures_of, usage_of
from coordinator.shapes.parts import Part, Parts, Text, Thought
from coordinator.shapes.turns import parsed
from worker.process.json_text import to_json

Json = dict[str, Any]


class MessageAnswer:
    """How one answer is told. What the events have told so far stands in its `message`."""

    def __init__(self, id: str, model: str, num_prompt: int) -> None:
        self._parts = Parts()
        self._blocks: list[Json] = []
        self._is_block_open = False
        self.message: Json = {
            "id": id, "type": "message", "role": "assistant", "model": model, "content": self._blocks,
            "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": num_prompt, "output_tokens": 0},
        }  # fmt: skip
        self._has_begun = False

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """All of an answer as one message."""
        for delta in deltas:
            list(self.events(delta))
        return self.message

    def events(self, delta: Delta) -> Iterator[Json]:
        """What a step adds."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self.message | {"content": []}}
            yield {"type": "ping"}
        for part in self._parts.push(delta):
            yield from self._tell(part)
        if delta.finish_reason is not None:
            yield from self._close_block()
            yield from self._end(delta)

    def _tell(self, part: Part) -> Iterator[Json]:
        match part:
            case Text(text):
                yield from self._append({"type": "text", "text": ""}, text)
            case Thought(text):
                yield from self._append({"type": "thinking", "thinking": "", "signature": ""}, text)
            case ToolCall():
                given = _as_object(part.arguments)
                yield from self._open_block({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
                self._blocks[-1]["input"] = given
                yield self._delta({"type": "input_json_delta", "partial_json": to_json(given)})

    def _append(self, empty: Json, text: str) -> Iterator[Json]:
        kind = empty["type"]  # its text goes by the same name
        if not (self._is_block_open and self._blocks[-1]["type"] == kind):
            yield from self._open_block(empty)
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open_block(self, empty: Json) -> Iterator[Json]:
        yield from self._close_block()
        self._blocks.append(dict(empty))
        self._is_block_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": empty}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close_block(self) -> Iterator[Json]:
        if self._is_block_open:
            self._is_block_open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _end(self, last: Delta) -> Iterator[Json]:
        reason = _stop_reason(last)
        stop = {"stop_reason": reason, "stop_sequence": last.piece.stop if reason == "stop_sequence" else None}
        told = {"usage": _usage(last), "brigade": figures_of(last)}
        self.message |= stop | told
        yield {"type": "message_delta", "delta": stop, **told}
        yield {"type": "message_stop"}


def _stop_reason(last: Delta) -> str:
    if last.finish_reason == "stop":
        return "end_turn" if last.piece.stop is None else "stop_sequence"
    return {"length": "max_tokens", "tool_calls": "tool_use"}[last.finish_reason or ""]


def _usage(last: Delta) -> Json:
    """Input tokens are those that were not in a cache; both together are the prompt."""
    usage = usage_of(last)
    num_cached = min(usage.num_reused, usage.num_prompt)
    return {
        "input_tokens": usage.num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.num_generated,
    }


def _as_object(arguments: str) -> Json:
    """A call's arguments; where a model gave something else than an object, as one with that in it."""
    given = parsed(arguments)
    return given if isinstance(given, dict) else {"arguments": given}
