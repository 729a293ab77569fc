"""Parts that the answers of several APIs share: stats, and answers made of blocks."""

import re
import uuid
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from coordinator.api.sse import ApiAnswer, Event
from coordinator.sessions.output import Output, ToolCall, Usage
from coordinator.sessions.waterfall import make_waterfall


class AnswerStats(TypedDict):
    """Our own block of an answer: its steps, rows, recoveries and reused tokens, and its waterfall if it was traced."""

    steps: int
    rows: int
    tokens_per_step: float | None
    recoveries: int
    recovery_s: float
    reused_tokens: int
    waterfall: dict[str, Any] | None


def usage_of(last: Output) -> Usage:
    """Return the usage of an answer, by its last output."""
    assert last.usage is not None, "only the last output of an answer has its usage"
    return last.usage


def answer_stats(last: Output) -> AnswerStats:
    """Return the stats of an answer, by its last output."""
    usage = usage_of(last)
    waterfall = make_waterfall(usage.legs, usage.started, last.at) if usage.legs else None
    return {
        "steps": usage.num_steps,
        "rows": usage.num_rows,
        "tokens_per_step": round(usage.num_generated / usage.num_steps, 2) if usage.num_steps else None,
        "recoveries": usage.num_recoveries,
        "recovery_s": round(usage.still_s, 3),
        "reused_tokens": usage.num_reused,
        "waterfall": waterfall.as_json() if waterfall else None,
    }


class OneOf:
    """Annotates a JSON object as one of several types, told apart by its `type`.

    The same annotation checks an answer in tests and describes it in /openapi.json.
    """

    def __init__(self, suffix: str, types: Mapping[str, Mapping[str, Any]], **shared: Any) -> None:
        """`types` are the fields that each `type` has beside the `shared` ones; `suffix` ends their names."""
        make: Any = TypedDict  # mypy knows it as a form of classes only
        names = {kind: "".join(word.capitalize() for word in re.split(r"[._]", kind)) + suffix for kind in types}
        self._types = [make(names[kind], {"type": Literal[kind], **shared, **fields}) for kind, fields in types.items()]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(Union[tuple(self._types)])  # noqa: UP007 - made at run time


# --- answers made of blocks -------------------------------------------------------------------------------------------

BlockKind = Literal["text", "reasoning", "call"]


@dataclass
class Block:
    """A block of an answer: adjacent text, adjacent reasoning, or one tool call."""

    kind: BlockKind
    index: int
    call: ToolCall | None = None
    text: str = ""  # so far; of a call its arguments
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class BlockAnswer(ApiAnswer):
    """An answer to one engine request, whose stream tells where each block of it starts and ends.

    Subclasses make the events; `answer` is the object that all events so far add up to.
    """

    answer: Mapping[str, Any]

    def __init__(self) -> None:
        self._has_begun = False
        self._block: Block | None = None  # the open one
        self._num_blocks = 0
        self._run: BlockKind | None = None  # the kind of the latest output
        self._held: str | None = ""  # the white space of a run that has nothing else
        self._has_called = False

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Yield the events before the first block."""

    @abstractmethod
    def open_block(self, block: Block) -> Iterator[Event]:
        """Yield the events of a block that starts; its text is empty."""

    @abstractmethod
    def extend_block(self, block: Block, text: str) -> Event:
        """Return the event of text that was added to a block."""

    @abstractmethod
    def close_block(self, block: Block, *, is_whole: bool) -> Iterator[Event]:
        """Yield the events of a block that ends, and add it to the answer."""

    @abstractmethod
    def finish(self, last: Output) -> Iterator[Event]:
        """Yield the events after the last block, and complete the answer."""

    def events(self, index: int, output: Output) -> Iterator[Event]:
        yield from self.start()
        yield from self._add_text("reasoning", output.reasoning)
        yield from self._add_text("text", output.content)
        for call in output.tool_calls:
            self._run, self._held, self._has_called = "call", "", True
            yield from self._add("call", call.arguments, call)
        if output.finish_reason is not None:
            if self._run == "text" and self._held and not self._has_called:
                yield from self._add("text", self._held)  # white space is the whole answer
            yield from self.close(is_whole=output.finish_reason != "length")
            yield from self.finish(output)

    def add(self, index: int, output: Output) -> None:
        deque(self.events(index, output), maxlen=0)

    def whole(self) -> Mapping[str, Any]:
        return self.answer

    def start(self) -> Iterator[Event]:
        """Yield the events before the first block, if they have not come yet."""
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin()

    def _add_text(self, kind: BlockKind, text: str) -> Iterator[Event]:
        """Add text, but hold white space until something visible follows: between reasoning and calls it is dropped."""
        if not text:
            return
        if kind != self._run:
            self._run, self._held = kind, ""
        if self._held is not None:
            text = self._held + text
            self._held = text if text.isspace() else None
        if self._held is None:
            yield from self._add(kind, text)

    def _add(self, kind: BlockKind, text: str, call: ToolCall | None = None) -> Iterator[Event]:
        block_id = self._block and self._block.call and self._block.call.id
        if self._block is None or self._block.kind != kind or (call and call.id != block_id):
            yield from self.close(is_whole=True)
            self._block = Block(kind, self._num_blocks, call)
            self._num_blocks += 1
            yield from self.open_block(self._block)
        if text:
            self._block.text += text
            yield self.extend_block(self._block, text)

    def close(self, *, is_whole: bool) -> Iterator[Event]:
        """Yield the events of the end of the open block, if there is one."""
        if self._block is not None:
            block, self._block = self._block, None
            yield from self.close_block(block, is_whole=is_whole)
