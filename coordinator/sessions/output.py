"""Output: what a session yields, step by step, and the answer that the outputs of a request add up to. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.sessions.waterfall import Leg, Passage, Waterfall, make_waterfall
from protos.brigade_pb2 import Alternative, Sample, Score, StatusReply


class Token(NamedTuple):
    """One generated token; with its logprob, and the likeliest alternatives with theirs, where they were asked for."""

    token: int
    logprob: float = 0.0
    alternatives: "tuple[Token, ...]" = ()

    @classmethod
    def of(cls, sample: Sample) -> "Token":
        """A copy: a part of a result would keep all of it in memory."""
        others = tuple(cls(other.token, other.logprob) for other in sample.alternatives)
        return cls(sample.token, sample.logprob, others)

    def to_sample(self) -> Sample:
        """The sample that it was copied from, as far as the token tells."""
        others = [Alternative(token=other.token, logprob=other.logprob) for other in self.alternatives]
        return Sample(token=self.token, logprob=self.logprob, alternatives=others)


class Scored(NamedTuple):
    """A given token of the prompt, how likely it was there, and whether no other was likelier."""

    token: Token
    is_greedy: bool

    @classmethod
    def of(cls, score: Score) -> "Scored":
        """A copy, likewise."""
        others = tuple(Token(other.token, other.logprob) for other in score.alternatives)
        return cls(Token(score.token, score.logprob, others), score.is_greedy)


@dataclass(frozen=True)
class KnownTokens:
    """The answer so far as a journal has it: enough to go on from, as if it had just become known."""

    tokens: tuple[Token, ...] = ()
    fills: tuple[tuple[int, Token], ...] = ()  # (position, token) that are decided ahead of them, ascending
    finish_reason: str | None = None


NOTHING_KNOWN = KnownTokens()


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Usage:
    """What a request took. Moments are nanoseconds on the coordinator's monotonic clock."""

    num_prompt: int
    started: int
    num_reused: int  # leading tokens of the prompt that were in the caches already
    num_steps: int  # windows that asked for tokens
    num_rows: int  # of all windows
    legs: Sequence[Leg] = ()  # of each chain the frames that carried a window of it, if they were to be kept
    num_recoveries: int = 0  # chains that were lost under it
    still_s: float = 0.0  # seconds without a token for that reason
    num_generated: int = 0  # tokens of the answer that were not known before
    begun: int = 0  # its first frame was sent then


@dataclass(slots=True)
class Output:
    """What one step made known: tokens, the text that became final, and how it divides. The last one ends the answer.

    The engine's loop makes it of a session's tokens; the reader's `TextParser` adds the text.
    """

    text: str
    tokens: Sequence[Token]
    at: int  # nanoseconds on the coordinator's monotonic clock
    finish_reason: str | None = None  # "stop", "length" or "tool_calls", with the last one
    usage: Usage | None = None  # with the last one
    fills: Sequence[tuple[int, Token]] = ()  # (position, token) that are decided ahead of the tokens
    scores: Sequence[Scored] = ()  # of the prompt's tokens, in their order, if they were asked for
    num_steps: int = 0  # windows of the session that asked for tokens, up to this one
    num_rows: int = 0  # of all its windows
    stop: str | None = None  # the stop string that ended the answer
    content: str = ""  # the text's part that is said,
    reasoning: str = ""  # the part that is thought,
    tool_calls: tuple[ToolCall, ...] = ()  # and the part that calls tools


@dataclass
class Answer:
    """What came of a request, all outputs together."""

    text: str = ""
    samples: list[Token] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)  # of the prompt's tokens, from `Request.score_from`
    token_times: list[int] = field(default_factory=list)  # nanoseconds on the coordinator's monotonic clock
    statuses: list[StatusReply] = field(default_factory=list)  # of every stage, at the end of the answer
    finish_reason: str = ""
    stop: str | None = None  # the stop string that ended it
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0, 0, 0))

    def add(self, output: Output) -> None:
        """Take the next output in."""
        self.text += output.text
        self.samples += output.tokens
        self.scores += output.scores
        self.token_times += [output.at] * len(output.tokens)
        if output.finish_reason is not None and output.usage is not None:
            self.finish_reason, self.usage, self.stop = output.finish_reason, output.usage, output.stop

    @property
    def tokens(self) -> list[int]:
        return [sample.token for sample in self.samples]

    @property
    def num_prompt(self) -> int:
        return self.usage.num_prompt

    @property
    def started(self) -> int:
        return self.usage.started

    @property
    def num_reused(self) -> int:
        return self.usage.num_reused

    @property
    def num_steps(self) -> int:
        return self.usage.num_steps

    @property
    def num_rows(self) -> int:
        return self.usage.num_rows

    @property
    def passages(self) -> Sequence[Passage]:
        return [passage for leg in self.usage.legs for passage in leg.passages]

    @property
    def ttft_s(self) -> float:
        return (self.token_times[0] - self.started) / 1e9

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return (self.token_times[-1] - self.token_times[0]) / 1e9

    def waterfall(self) -> Waterfall:
        """Where its time went, until its last token."""
        return make_waterfall(self.usage.legs, self.started, self.token_times[-1])
