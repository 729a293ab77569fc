"""Output: what a session yields at each step, and `Answer`, which all outputs of a request add up to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.sessions.waterfall import Leg, Passage, Waterfall, make_waterfall
from protos.brigade_pb2 import Alternative, Sample, Score, StatusReply

MIN_LOGPROB = -9999.0  # as in OpenAI's API: JSON has no infinity


class Token(NamedTuple):
    """One generated token, with its logprob and the likeliest alternatives if the request asked for them."""

    token: int
    logprob: float = 0.0
    alternatives: "tuple[Token, ...]" = ()

    @classmethod
    def of(cls, sample: "Sample | Score") -> "Token":
        """Copy the sample, with logprobs of at least MIN_LOGPROB.

        A reference to the sample would keep the whole result message in memory.
        """
        others = tuple(cls(other.token, max(other.logprob, MIN_LOGPROB)) for other in sample.alternatives)
        return cls(sample.token, max(sample.logprob, MIN_LOGPROB), others)

    def to_sample(self) -> Sample:
        """Return the sample that this token was copied from."""
        others = [Alternative(token=other.token, logprob=other.logprob) for other in self.alternatives]
        return Sample(token=self.token, logprob=self.logprob, alternatives=others)


class Scored(NamedTuple):
    """A token of the prompt with its logprob at its place, and whether it was the likeliest token there."""

    token: Token
    is_greedy: bool


@dataclass(frozen=True)
class KnownTokens:
    """The answer so far as a journal holds it, which is enough to continue it."""

    tokens: tuple[Token, ...] = ()
    fills: tuple[tuple[int, Token], ...] = ()  # (position, token) decided ahead of the tokens, ascending
    finish_reason: str | None = None


NO_TOKENS = KnownTokens()


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls, or a piece of that call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Usage:
    """The cost of a request. Times are nanoseconds on the coordinator's monotonic clock."""

    num_prompt: int = 0
    started: int = 0
    num_reused: int = 0  # leading tokens of the prompt that were in the caches already
    num_steps: int = 0  # windows that asked for tokens
    num_rows: int = 0  # of all windows
    legs: Sequence[Leg] = ()  # the frames that carried its windows, by chain, if the request is traced
    num_recoveries: int = 0  # chains that were lost during the request
    still_s: float = 0.0  # seconds without a token because of these losses
    num_generated: int = 0  # tokens of the answer, without those of a journal
    begun: int = 0  # when its first frame was sent
    num_drafts: Sequence[int] = ()  # by place: the steps with a draft there
    num_drafts_held: Sequence[int] = ()  # by place: those in which it held

    @property
    def drafts_held(self) -> list[float]:
        """By place, the share of steps in which the draft held, of those that had one."""
        return [held / tried for held, tried in zip(self.num_drafts_held, self.num_drafts, strict=True)]

    def prompt_tokens_per_s(self, ttft_s: float) -> float | None:
        """Return the speed of the prompt's tokens that no cache held; None if there were none."""
        num_computed = self.num_prompt - self.num_reused
        return num_computed / ttft_s if num_computed > 0 and ttft_s > 0 else None


@dataclass(slots=True)
class Output:
    """The result of one step: new tokens and the text that they complete. The last output ends the answer.

    The engine's loop makes it from a session's tokens; the reader's `TextParser` adds the text.
    """

    text: str
    tokens: Sequence[Token]
    at: int  # nanoseconds on the coordinator's monotonic clock
    finish_reason: str | None = None  # "stop", "length" or "tool_calls" on the last output
    usage: Usage | None = None  # on the last output
    fills: Sequence[tuple[int, Token]] = ()  # (position, token) decided ahead of the tokens
    scores: Sequence[Scored] = ()  # of the prompt's tokens, in their order, if the request asked for them
    num_steps: int = 0  # windows of the session that asked for tokens so far
    num_rows: int = 0  # of all its windows so far
    stop: str | None = None  # the stop string that ended the answer
    content: str = ""  # the part of the text outside thoughts and calls
    reasoning: str = ""  # the part inside thoughts
    num_reasoning: int = 0  # tokens that came inside thoughts, with the marker that ends them
    tool_calls: tuple[ToolCall, ...] = ()  # pieces of calls: those with one id, in order, make a call
    pooled: Sequence[bytes] = ()  # sums [D] float32 of the prompt's rows, if the request asked for them


def speed_after_first(token_times: Sequence[float]) -> float | None:
    """Return the tokens per unit of time after the first moment, whose tokens do not count; None if there is no other.

    Windows and canvases make several tokens in one step.
    """
    if not token_times or token_times[-1] == (first := token_times[0]):
        return None
    return sum(at > first for at in token_times) / (token_times[-1] - first)


@dataclass
class Answer:
    """All outputs of a request together."""

    text: str = ""
    samples: list[Token] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)  # of the prompt's tokens, from `Request.score_from`
    token_times: list[int] = field(default_factory=list)  # nanoseconds on the coordinator's monotonic clock
    statuses: list[StatusReply] = field(default_factory=list)  # of every stage, at the end of the answer
    finish_reason: str = ""
    stop: str | None = None  # the stop string that ended it
    usage: Usage = Usage()
    last_at: int = 0  # when its last output was made, nanoseconds
    first_steps: int = 0  # windows that asked for tokens, up to the first ones: several for a canvas
    lengths: list[int] = field(default_factory=list)  # letters of its pieces of text and of thoughts
    first_text_at: int = 0  # when the first of these was made
    _num_first: int = 0  # tokens up to then

    def add(self, output: Output) -> None:
        """Append the next output."""
        if output.tokens and not self.samples:
            self.first_steps = output.num_steps
        if not self.lengths:
            self.first_text_at, self._num_first = output.at, self._num_first + len(output.tokens)
        if length := len(output.content) + len(output.reasoning):
            self.lengths.append(length)
        self.text += output.text
        self.samples += output.tokens
        self.scores += output.scores
        self.token_times += [output.at] * len(output.tokens)
        self.last_at = output.at
        if output.finish_reason is not None and output.usage is not None:
            self.finish_reason, self.usage, self.stop = output.finish_reason, output.usage, output.stop

    @property
    def tokens(self) -> list[int]:
        return [sample.token for sample in self.samples]

    @property
    def passages(self) -> Sequence[Passage]:
        return [passage for leg in self.usage.legs for passage in leg.passages]

    @property
    def _first_and_last(self) -> tuple[int, int]:
        """When the first and the last token came; twice the end of an answer without tokens (`max_tokens` 0)."""
        return (self.token_times[0], self.token_times[-1]) if self.token_times else (self.last_at, self.last_at)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, or to the end of an answer without tokens."""
        return (self._first_and_last[0] - self.usage.started) / 1e9

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        first, last = self._first_and_last
        return (last - first) / 1e9

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens per second after those of the first step; None without any."""
        speed = speed_after_first(self.token_times)
        return None if speed is None else 1e9 * speed

    @property
    def num_later(self) -> float:
        """How many tokens came after the first text, which windows and canvases make of several.

        Where tokens are not sent, as by a server, the pieces of text share them out by their letters.
        """
        if self._num_first:
            return self.usage.num_generated - self._num_first
        return self.usage.num_generated * sum(self.lengths[1:]) / max(1, sum(self.lengths))

    @property
    def later_s(self) -> float:
        """Seconds from the first text to the end."""
        return (self.last_at - self.first_text_at) / 1e9

    def waterfall(self) -> Waterfall:
        """Return where its time went, up to its last token."""
        return make_waterfall(self.usage.legs, self.usage.started, self._first_and_last[1])
