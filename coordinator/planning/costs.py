"""What frames take on this chain, learned as they pass, and what follows for the number of lanes. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence

StagesSeconds = Callable[[int], Sequence[float]]  # by a frame's rows: what each stage computes; nothing if unknown

_MOST_LANES = 32  # in flight: stages take 64 frames, those of prompts included
_RECHECK = 16  # choices after which to look again at what frames cost
_CHUNKS = (32, 128, 512, 2048)  # rows: far apart, so that noise does not decide and runs are alike
_CHUNK_GAIN = 1.1  # what a larger chunk has to promise
_LONGEST_CHUNK_S = 0.5  # through the whole chain: what other streams may have to wait
_WEIGHT = 0.1  # of a new observation
_WEIGHT_LESS = 0.4  # of one that is less: work takes no less than it takes, but anything may come between
_SETTLED = 8  # times that a size has to be seen before its cost is believed rather than the line between others
_WORTH = 1.15  # a change of lanes leaves a gap, and measurements are noisy: it has to promise that much more


def on_lines(points: Sequence[tuple[int, float]], num_rows: int) -> float:
    """The value at `num_rows` on straight lines through these points, ascending, and level or rising beyond them."""
    if len(points) == 1:
        return points[0][1]
    at = min(max(1, sum(rows < num_rows for rows, _ in points)), len(points) - 1)
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    slope = (high_s - low_s) / (high - low)
    if not low <= num_rows <= high:  # two neighbours may be all noise: beyond them the whole range counts, too
        slope = max(0.0, slope, (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))
    nearest, nearest_s = (low, low_s) if num_rows < high else (high, high_s)
    return max(nearest_s + slope * (num_rows - nearest), min(low_s, high_s) / 2)


def _rounded(num_rows: int) -> int:
    """Of its leading four bits: so that few sizes are told apart, however long a chain serves."""
    shift = max(0, num_rows.bit_length() - 4)
    return num_rows >> shift << shift


class StepCosts:
    """Seconds by number of rows: of whole steps, or of one stage's computing."""

    def __init__(self) -> None:
        self._seen: Counter[int] = Counter()  # how often, by number of rows
        self._step_s: dict[int, float] = {}  # seconds by number of rows

    @property
    def is_known(self) -> bool:
        return bool(self._step_s)

    def observe(self, num_rows: int, seconds: float) -> None:
        """So many rows took so long."""
        num_rows = _rounded(num_rows)
        self._seen[num_rows] += 1
        if self._seen[num_rows] == 1:
            return  # the first of a size compiles its kernels: it says nothing of the next
        known = self._step_s.get(num_rows, seconds)
        self._step_s[num_rows] = known + (_WEIGHT if seconds > known else _WEIGHT_LESS) * (seconds - known)

    def seconds(self, num_rows: int) -> float:
        """What so many rows cost, by what is known."""
        return on_lines(self._believed(), num_rows)

    def _believed(self) -> list[tuple[int, float]]:
        """Without sizes seen by chance between well-known ones: one that once took long would never be tried again."""
        settled = [rows for rows in self._step_s if self._seen[rows] >= _SETTLED] or [0]
        return sorted(
            (rows, step_s)
            for rows, step_s in self._step_s.items()
            if self._seen[rows] >= _SETTLED or not min(settled) < rows < max(settled)
        )


class ChainCosts:
    """One chain's costs: of whole steps alone in the chain, of each stage's computing, and of all hops together."""

    def __init__(self, num_stages: int) -> None:
        self.steps = StepCosts()
        self._stages = [StepCosts() for _ in range(num_stages)]
        self._hops_s = 0.0
        self._lately_s: dict[int, float] = {}  # what a passage took, by the bits of its number of rows

    def observe(self, num_rows: int, stages_s: Sequence[float], took_s: float, *, was_alone: bool) -> None:
        """A frame of so many rows: what each stage computed, and how long it took from its sending to its result."""
        for stage, seconds in zip(self._stages, stages_s, strict=True):
            stage.observe(num_rows, seconds)
        if was_alone:
            self.steps.observe(num_rows, took_s)
            hops_s = max(0.0, took_s - sum(stages_s))
            self._hops_s += (_WEIGHT if self._hops_s else 1.0) * (hops_s - self._hops_s)
        bits, passage_s = num_rows.bit_length(), took_s if was_alone else sum(stages_s)
        self._lately_s[bits] = max(passage_s, self._lately_s.get(bits, 0.0) / 2)

    def stages_s(self, num_rows: int) -> list[float]:
        """What each stage computes at so many rows; nothing while one of them is not known."""
        return [stage.seconds(num_rows) for stage in self._stages] if all(s.is_known for s in self._stages) else []

    def hops_s(self, num_rows: int) -> float:
        """What a frame spends between the stages, whatever its rows."""
        return self._hops_s

    def passage_s(self, num_rows: int) -> float:
        """What a frame of so many rows may take through the whole chain, alone; 0 without rows, or while not known.

        What it usually takes, or what such frames lately took if that is more: the very first counts, and each later
        one halves what went before.
        """
        usual_s = sum(self.stages_s(num_rows)) + self._hops_s if num_rows else 0.0
        return max(usual_s, self._lately_s.get(num_rows.bit_length(), 0.0))


class LaneChooser:
    """How many lanes a number of sessions should make.

    With N sessions in m lanes a frame has k = N / m sessions' rows. A session's next token comes after its frame has
    passed all stages and hops, or after the slowest stage has done a frame of every lane, whichever is longer; of the
    m that stages and hops can hold the one with the shortest time wins. Where rows cost nothing (weights are read
    whatever their number) that is few lanes, where they cost much or hops are slow it is as many as fill the pipe.
    """

    def __init__(self, num_stages: int, stages_s: StagesSeconds, hops_s: Callable[[int], float]) -> None:
        """`hops_s` tells by a frame's rows what all hops take together."""
        self._num_stages = num_stages
        self._stages_s = stages_s
        self._hops_s = hops_s
        self._lanes = num_stages
        self._load = (0, 0)
        self._age = 0

    def choose(self, num_sessions: int, rows_each: float) -> int:
        """Lanes for so many sessions whose windows have so many rows each."""
        if num_sessions < 2 or not self._stages_s(1):
            return self._num_stages
        self._age += 1
        if (load := (num_sessions, round(rows_each))) == self._load and self._age < _RECHECK:
            return self._lanes
        self._load, self._age = load, 0
        slowest_s = max(self._stages_s(max(1, round(rows_each))))
        on_the_way = round(self._hops_s(1) / slowest_s) if slowest_s else 0  # frames between stages at any time
        most = min(num_sessions, self._num_stages + on_the_way, _MOST_LANES)
        rounds = {lanes: self._round_s(num_sessions, rows_each, lanes) for lanes in range(1, most + 1)}
        best = min(rounds, key=lambda lanes: rounds[lanes])
        self._lanes = min(self._lanes, most)
        if rounds[best] * _WORTH < rounds[self._lanes]:
            self._lanes = best
        return self._lanes

    def _round_s(self, num_sessions: int, rows_each: float, lanes: int) -> float:
        """Until every session has stepped once."""
        rows = max(1, round(rows_each * -(-num_sessions // lanes)))
        stages_s = self._stages_s(rows)
        return max(sum(stages_s) + self._hops_s(rows), lanes * max(stages_s))


def chunk_size(num_prompt: int, stages_s: StagesSeconds) -> int:
    """Rows per prompt chunk, if the user does not say: small enough to keep every stage at work, large enough to pay.

    With c chunks on n stages a prompt takes (c + n - 1) times what a chunk takes on the slowest stage.
    """
    best = _CHUNKS[0]
    for rows in _CHUNKS[1:]:
        times = stages_s(rows)
        if (
            times
            and sum(times) <= _LONGEST_CHUNK_S
            and _prefill_s(num_prompt, rows, stages_s) * _CHUNK_GAIN < (_prefill_s(num_prompt, best, stages_s))
        ):
            best = rows
    return best


def _prefill_s(num_prompt: int, chunk: int, stages_s: StagesSeconds) -> float:
    num_chunks = -(-num_prompt // chunk)
    times = stages_s(min(chunk, num_prompt))
    return (num_chunks + len(times) - 1) * max(times)
