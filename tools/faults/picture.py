"""A picture of a stream that survives kill -9, drawn from a recording: its tokens over time, and its text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap

from coordinator.sessions.output import Output
from tools.faults.asked import greedy
from tools.faults.case import IS_GONE
from tools.faults.rig import Rig
from tools.faults.trial import Trial
from worker.platform.machine import machine_name

_MAX_TOKENS = 200  # more than the story has
_KILLED_AT = 45  # tokens

_WIDTH, _HEIGHT = 860, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 840, 70, 280  # of the diagram
_BEFORE, _AFTER, _FAULT, _QUIET, _INK = "#1f6feb", "#1a7f37", "#cf222e", "#8c959f", "#24292f"


@dataclass(frozen=True)
class Recording:
    """One answer: when each piece came, seconds since the request, and what it said."""

    times: Sequence[float]
    pieces: Sequence[Output]

    @classmethod
    def of(cls, trial: Trial) -> "Recording":
        [live] = trial.live
        return cls([at - live.began for at in live.times], live.pieces)

    @property
    def counts(self) -> list[int]:
        """How many tokens were known with each piece."""
        return list(accumulate(len(piece.tokens) for piece in self.pieces))

    @property
    def tokens(self) -> list[int]:
        return [token.token for piece in self.pieces for token in piece.tokens]

    def text(self, first: int = 0, last: int | None = None) -> str:
        return "".join(piece.text for piece in self.pieces[first:last])


@dataclass(frozen=True)
class Story:
    """What happened: the unfailed run and the other one, in which a worker was killed at this time, seconds."""

    unfailed: Recording
    failed: Recording
    killed_s: float
    noticed_s: float  # after that

    @property
    def num_before(self) -> int:
        """Pieces that had come by then."""
        return sum(at <= self.killed_s + self.noticed_s for at in self.failed.times)

    @property
    def silent_s(self) -> tuple[float, float]:
        """The last piece before and the first one after."""
        return self.failed.times[self.num_before - 1], self.failed.times[self.num_before]


async def record() -> Story:
    """The same request twice on two workers, of which the last is killed in the second run and not started again."""
    with TemporaryDirectory() as folder:
        async with Rig(Path(folder)) as rig:
            await rig.make_whole()
            unfailed = await _run(rig, -1)
            failed = await _run(rig, _KILLED_AT)
    assert failed.fault_at is not None and failed.detect_s is not None
    runs = Recording.of(unfailed), Recording.of(failed)
    assert runs[0].tokens == runs[1].tokens and runs[0].text() == runs[1].text(), "the streams differ"
    return Story(*runs, failed.fault_at - failed.live[0].began, failed.detect_s)


async def _run(rig: Rig, kill_at: int) -> Trial:
    async with rig.opened(rig.options(IS_GONE)) as trial:
        await trial.begin([greedy(rig, max_tokens=_MAX_TOKENS)], kill_at, rig.last.kill)
        await trial.answers()
    return trial


def draw(story: Story) -> str:
    """An SVG."""
    parts = "\n".join([*_heading(), *_diagram(story), *_answer(story)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="13">\n{parts}\n</svg>\n'
    )


class Axes:
    """Where seconds and tokens are in the diagram."""

    def __init__(self, story: Story) -> None:
        self.end_s = 1.02 * max(*story.failed.times, *story.unfailed.times)
        self.most = story.failed.counts[-1]

    def x(self, seconds: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * seconds / self.end_s, 1)

    def y(self, tokens: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP - 12) * tokens / self.most, 1)

    def drawn(self) -> Iterator[str]:
        for second in range(int(self.end_s) + 1):
            yield _line(self.x(second), _BOTTOM, self.x(second), _BOTTOM + 4, _QUIET)
            yield _text(self.x(second), _BOTTOM + 17, f"{second} s", _QUIET, anchor="middle")
        for tokens in range(0, self.most + 1, 25):
            yield _line(_LEFT, self.y(tokens), _RIGHT, self.y(tokens), "#eaeef2")
            yield _text(_LEFT - 8, self.y(tokens) + 4, str(tokens), _QUIET, anchor="end")
        yield _text(_LEFT - 8, _TOP + 4, "tokens", _QUIET, anchor="end")

    def curve(self, times: Sequence[float], counts: Sequence[int], color: str) -> str:
        points = " ".join(f"{self.x(at)},{self.y(count)}" for at, count in zip(times, counts, strict=True))
        return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>'


def _heading() -> Iterator[str]:
    yield f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="8" fill="#ffffff" stroke="#d0d7de"/>'
    yield _text(20, 27, "kill -9 of a worker in the middle of an answer", size=16, weight="bold")
    where = f"a recording: a coordinator and two workers on one machine ({machine_name()}), the bundled model"
    yield _text(20, 47, where, _QUIET, size=12)


def _diagram(story: Story) -> Iterator[str]:
    """Tokens over seconds: both runs, and what happened when."""
    axes, cut = Axes(story), story.num_before
    counts, times = story.failed.counts, story.failed.times
    before, after = story.silent_s
    known = counts[cut - 1]
    size = f'width="{axes.x(after) - axes.x(before):.1f}" height="{_BOTTOM - _TOP}"'
    yield f'<rect x="{axes.x(before)}" y="{_TOP}" {size} fill="#ffebe9"/>'
    yield from axes.drawn()
    yield axes.curve(story.unfailed.times, story.unfailed.counts, _QUIET)
    yield axes.curve(times[:cut], counts[:cut], _BEFORE)
    yield f'<g stroke-dasharray="3 3">{axes.curve((before, after), (known, known), _FAULT)}</g>'
    yield axes.curve(times[cut:], counts[cut:], _AFTER)
    yield _line(axes.x(story.killed_s), _TOP, axes.x(story.killed_s), _BOTTOM, _FAULT)
    yield _text(axes.x(story.killed_s) - 6, _TOP + 12, "kill -9", _FAULT, anchor="end", weight="bold")
    yield from _labels(story, axes, known)


def _labels(story: Story, axes: Axes, known: int) -> Iterator[str]:
    before, after = story.silent_s
    said = (
        f"noticed after {1e3 * story.noticed_s:.0f} ms",
        "planned over the nodes left,",
        "all tokens so far fed again",
    )
    at = axes.x(story.killed_s) + 8, axes.y(known) + 20
    for number, line in enumerate(said):
        yield _text(at[0], at[1] + 17 * number, line, _FAULT, size=12)
    yield _text(at[0], axes.y(known) - 8, f"{after - before:.2f} s without a token", _FAULT, weight="bold")
    yield _text(axes.x(story.unfailed.times[-1]) + 6, axes.y(axes.most) - 4, "unfailed run", _QUIET, anchor="end")


def _answer(story: Story) -> Iterator[str]:
    """The text, before and after the kill in the colours of the diagram."""
    text, num_before = story.failed.text().replace("\n", " "), len(story.failed.text(0, story.num_before))
    lines = wrap(text, 112, drop_whitespace=False)
    done, top = 0, _BOTTOM + 46
    for number, line in enumerate(lines):
        cut = min(max(0, num_before - done), len(line))
        spans = [f'<tspan fill="{_BEFORE}">{escape(line[:cut])}</tspan>']
        if 0 < cut < len(line):
            spans.append(f'<tspan fill="{_FAULT}" font-weight="bold">|</tspan>')
        spans.append(f'<tspan fill="{_AFTER}">{escape(line[cut:])}</tspan>')
        style = 'font-family="Menlo, Consolas, monospace" font-size="12"'
        yield f'<text x="20" y="{top + 19 * number}" {style}>{"".join(spans)}</text>'
        done += len(line)
    count = len(story.failed.tokens)
    yield _text(20, top + 19 * len(lines) + 8, f"All {count} tokens are those of the unfailed run.", weight="bold")


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="1.5"/>'


def _text(
    x: float, y: float, text: str, color: str = _INK, *, size: float = 13, weight: str = "normal", anchor: str = "start"
) -> str:
    style = f'fill="{color}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
