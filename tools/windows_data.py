"""What `tools.eval_windows` measured, as plain data. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.sessions.output import Answer

Setting = tuple[str, int | None, float | None]  # decoder, window in MASK rows, threshold in nats


@dataclass
class Score:
    """One decoder on one kind of question: sums over its answers. `threshold` in nats."""

    kind: str
    decoder: str
    window: int | None
    threshold: float | None
    num_answers: int = 0
    num_right: int = 0
    num_equal: int = 0  # token for token the answer of `ar`
    num_tokens: int = 0
    num_steps: int = 0  # that were asked for tokens: the prompt's last one too
    num_rows: int = 0  # with MASK and padding rows; of the prompt only its last row, the first that can tell a token

    def add(self, answer: Answer, expected: Sequence[int], *, is_right: bool) -> None:
        """Add an answer; `expected` are the tokens of `ar`."""
        self.num_answers += 1
        self.num_right += is_right
        self.num_equal += answer.tokens == expected
        self.num_tokens += len(answer.tokens)
        self.num_steps += answer.usage.num_steps
        self.num_rows += answer.usage.num_rows - answer.usage.num_prompt + 1

    @property
    def setting(self) -> Setting:
        return self.decoder, self.window, self.threshold

    @property
    def is_checked(self) -> bool:
        """Whether it drafts, and promises the tokens of `ar`."""
        return self.decoder in ("ngram", "diffusion", "draft")

    @property
    def accuracy(self) -> float:
        """Percent."""
        return 100 * self.num_right / self.num_answers

    @property
    def equal(self) -> float:
        """Percent."""
        return 100 * self.num_equal / self.num_answers

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps

    @property
    def rows_per_token(self) -> float:
        return self.num_rows / self.num_tokens

    @property
    def round_trips(self) -> float:
        """Per 100 tokens."""
        return 100 * self.num_steps / self.num_tokens


@dataclass
class Speed:
    """One decoder on whole answers of one kind, by the prices of their steps and `delay_ms` for each round trip."""

    kind: str
    decoder: str
    window: int | None
    delay_ms: float
    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens += num_tokens
        self.seconds += seconds

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass
class Measured:
    """A whole run."""

    machine: str
    model: str
    step_ms: dict[str, float] = field(default_factory=dict)  # by rows
    scores: list[Score] = field(default_factory=list)
    wanted: list[Score] = field(default_factory=list)
    chain: list[Score] = field(default_factory=list)  # on three processes
    speeds: list[Speed] = field(default_factory=list)
    draft_ms: dict[str, float] = field(default_factory=dict)  # by drafts: what they add to a step
    load: float = 0.0  # average of the machine, with this program, when that was measured
    drafts: list[Score] = field(default_factory=list)  # `draft` by the bundled drafter; windows count drafts
    unknown: list[Score] = field(default_factory=list)  # the same on templates that its training left out
    drafted_speeds: list[Speed] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(score.kind for score in self.scores))

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(score.setting for score in [*self.scores, *self.drafts]))

    def mean(self, setting: Setting, value: Callable[[Score], float]) -> float:
        """Over the kinds, each with the same weight."""
        values = [value(score) for score in [*self.scores, *self.drafts] if score.setting == setting]
        return sum(values) / len(values)

    def tokens_per_s(self, kind: str, decoder: str, window: int | None, delay_ms: float) -> float:
        key = kind, decoder, window, delay_ms
        speeds = [*self.speeds, *self.drafted_speeds]
        return next(s.tokens_per_s for s in speeds if (s.kind, s.decoder, s.window, s.delay_ms) == key)

    def break_even(self, window: int, delay_ms: float) -> float:
        """Tokens per step from which a window beats one token per step; its 2 W rows are drafts and MASK rows."""
        return (self.step_ms[str(2 * window)] + delay_ms) / (self.step_ms["1"] + delay_ms)

    def hops_ms(self, window: int, tokens_per_step: float) -> float:
        """What a step's hops have to take for a window that yields so many tokens to beat one token per step."""
        return (self.step_ms[str(2 * window)] - tokens_per_step * self.step_ms["1"]) / (tokens_per_step - 1)
