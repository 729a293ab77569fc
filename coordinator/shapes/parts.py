"""Parts: an answer's deltas as the texts, thoughts and calls that they make, in their order. Pure."""

from dataclasses import dataclass

from coordinator.resident.channels import Delta, ToolCall


@dataclass(frozen=True)
class Text:
    """What is said, or the next piece of it."""

    text: str


@dataclass(frozen=True)
class Thought:
    """What is thought, or the next piece of it."""

    text: str


Part = Text | Thought | ToolCall


class Parts:
    """One answer's. White space between thoughts and calls, where models leave some, is no text of its own."""

    def __init__(self) -> None:
        self._run: type[Part] | None = None  # what came last
        self._has_begun = False  # the run: something of it was told
        self._held = ""  # white space that a run began with
        self._has_called = False

    def push(self, delta: Delta) -> list[Part]:
        """What the next delta adds."""
        parts: list[Part] = [*self._say(Thought, delta.reasoning), *self._say(Text, delta.content)]
        for call in delta.tool_calls:
            parts.append(call)
            self._run, self._held, self._has_called = ToolCall, "", True
        if delta.finish_reason is not None and self._run is Text and self._held and not self._has_called:
            parts.append(Text(self._held))  # then it is the whole answer
        return parts

    def _say(self, kind: type[Text] | type[Thought], text: str) -> list[Part]:
        if not text:
            return []
        if self._run is not kind:
            self._run, self._has_begun, self._held = kind, False, ""
        said = self._held + text
        if not self._has_begun and said.isspace():
            self._held = said
            return []
        self._has_begun, self._held = True, ""
        return [kind(said)]
