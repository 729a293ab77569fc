"""Open Responses: an answer's deltas as events or as one response. Pure."""

import copy
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from coordinator.resident.channels import Delta, ToolCall
from coordinator.shapes.answers import figures_of, usage_of
from coordinator.shapes.parts import Part, Parts, Text, Thought

Json = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of ids
_ALWAYS = {
    "object": "response", "previous_response_id": None, "error": None, "incomplete_details": None, "usage": None,
    "completed_at": None, "truncation": "disabled", "top_logprobs": 0, "max_tool_calls": None, "store": False,
    "background": False, "service_tier": "default", "safety_identifier": None, "prompt_cache_key": None,
}  # fmt: skip


class ResponseAnswer:
    """How one answer is told. What the events have told so far stands in its `response`."""

    def __init__(self, id: str, model: str, created: int, echoed: Json) -> None:
        """`created` is in seconds since 1970; `echoed` is what a response tells of its request."""
        self._parts = Parts()
        self._output: list[Json] = []
        self.response: Json = {
            **_ALWAYS, **echoed, "id": id, "model": model, "created_at": created, "status": "in_progress",
            "output": self._output,
        }  # fmt: skip
        self._num_events = 0
        self._num_thought = 0  # tokens

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """All of an answer as one response."""
        for delta in deltas:
            list(self.events(delta))
        return self.response

    def events(self, delta: Delta) -> Iterator[Json]:
        """What a step adds."""
        yield from self._begin()
        if delta.reasoning and not delta.content:
            self._num_thought += len(delta.piece.tokens)
        for part in self._parts.push(delta):
            yield from self._tell(part)
        if delta.finish_reason is not None:
            yield from self._end(delta)

    def failed(self, error: Json) -> Iterator[Json]:
        """What a failure adds, of which `error` is OpenAI's object."""
        yield from self._begin()
        yield from self._close("incomplete")
        told = {"code": error["code"], "message": error["message"], "param": error["param"]}
        yield self._event("error", **told, error=error)
        code = error["code"] if error["code"] == "rate_limit_exceeded" else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error["message"]}}
        yield self._about_all("response.failed")

    def _begin(self) -> Iterator[Json]:
        if not self._num_events:
            yield self._about_all("response.created")
            yield self._about_all("response.in_progress")

    def _tell(self, part: Part) -> Iterator[Json]:
        match part:
            case Text(text):
                empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                yield from self._append({"type": "message", "role": "assistant"}, empty, text)
            case Thought(text):
                empty = {"type": "reasoning_text", "text": ""}
                yield from self._append({"type": "reasoning", "summary": []}, empty, text)
            case ToolCall():
                call = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
                yield from self._open(call)
                self._output[-1]["arguments"] = part.arguments
                yield self._about_item("response.function_call_arguments.delta", delta=part.arguments)

    def _append(self, item: Json, empty: Json, text: str) -> Iterator[Json]:
        """The next piece of a message's or a thought's one part."""
        if not self._is_open(item["type"]):
            yield from self._open(item | {"content": []})
            self._output[-1]["content"].append(dict(empty))
            yield self._about_item("response.content_part.added", content_index=0, part=empty)
        part = self._output[-1]["content"][0]
        part["text"] += text
        yield self._about_item(f"response.{part['type']}.delta", content_index=0, delta=text, **_logprobs(part))

    def _is_open(self, kind: str) -> bool:
        return bool(self._output) and self._output[-1]["type"] == kind and self._output[-1]["status"] == "in_progress"

    def _open(self, item: Json) -> Iterator[Json]:
        yield from self._close("completed")
        added = item | {"id": f"{_PREFIXES[item['type']]}_{uuid.uuid4().hex}", "status": "in_progress"}
        self._output.append(copy.deepcopy(added))
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=added)

    def _close(self, status: str) -> Iterator[Json]:
        """End the last item, if it has not ended."""
        if not (self._output and self._output[-1]["status"] == "in_progress"):
            return
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._about_item("response.function_call_arguments.done", arguments=item["arguments"])
        else:
            (part,) = item["content"]
            told = {"content_index": 0, "text": part["text"], **_logprobs(part)}
            yield self._about_item(f"response.{part['type']}.done", **told)
            yield self._about_item("response.content_part.done", content_index=0, part=copy.deepcopy(part))
        index = len(self._output) - 1
        yield self._event("response.output_item.done", output_index=index, item=copy.deepcopy(item))

    def _end(self, last: Delta) -> Iterator[Json]:
        is_cut = last.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        took_s = (last.piece.at - usage_of(last).started) // 10**9
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else self.response["created_at"] + took_s,
            "usage": self._usage(last),
            "brigade": figures_of(last),
        }
        yield self._about_all(f"response.{status}")

    def _usage(self, last: Delta) -> Json:
        usage = usage_of(last)
        num_cached = min(usage.num_reused, usage.num_prompt)
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.num_generated,
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": usage.num_prompt + usage.num_generated,
        }

    def _about_all(self, kind: str) -> Json:
        return self._event(kind, response=copy.deepcopy(self.response))

    def _about_item(self, kind: str, **told: Any) -> Json:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **told)

    def _event(self, kind: str, **told: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **told}


def _logprobs(part: Json) -> Json:
    """Of the events of a text; there are none of those of a thought."""
    return {"logprobs": []} if part["type"] == "output_text" else {}
