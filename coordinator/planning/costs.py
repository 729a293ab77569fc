"""The times of frames on a chain, learned from results, and the lanes and chunk sizes that follow. Pure."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

StagesSeconds = Callable[[int], Sequence[float]]  # seconds of each stage by a frame's rows; empty if unknown

_MOST_LANES = 32  # in flight: stages take 64 frames, those of prompts included
_RECHECK = 16  # choices after which the costs are looked at again
_CHUNKS = (32, 128, 512, 2048)  # rows: far apart, so that noise does not decide and runs are reproducible
_LEAST_ROWS = 4  # of a chunk where memory is short: a few times what each token of the answer takes anyway
_CHUNK_GAIN = 1.1  # factor by which a larger chunk has to be faster
_GROWTH = 4  # factor by which a chunk beside streams may be larger than all that are known
_TRIED = 512  # rows: a size up to which costs are tried, since the rows of a mixture of experts share their weights
_FEW = 3  # observations of a size
_ON_LINKS_S = 1.0  # for the prompt frames that wait for a link: a node counts as silent after a second
_BESIDE_STREAMS_S = 0.5  # for a chunk of more than 32 rows through the whole chain, beside streams
_WEIGHT = 0.1  # of a new observation
_FORGIVEN = 0.9  # of the time of a read that was too slow, with each one that is left out
_REMEMBERED = 15  # observations of a size; their median counts: interruptions and new kernels make single steps long
_SETTLED = 8  # observations of a size before its own cost replaces the line between others
_WEIGHT_OF_ALL = 0.02  # of a step in what the drafts of all sessions do
_PLACES = 32  # for which it is learned how often drafts hold
SURE = 0.995  # drafts that always hold
_WORTH = 1.15  # factor by which other lanes have to be faster: a change leaves a gap, and measurements are noisy


def on_lines(points: Sequence[tuple[int, float]], num_rows: int) -> float:
    """Return the value at `num_rows` on straight lines through points, ascending, and level or rising beyond them."""
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
    """Keep the leading four bits, so that a chain distinguishes few sizes however long it serves."""
    shift = max(0, num_rows.bit_length() - 4)
    return num_rows >> shift << shift


class StepCosts:
    """The seconds of whole steps or of one stage, by number of rows."""

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        """`measured` are seconds by number of rows that hold until steps of these sizes are observed."""
        self._step_s: dict[int, float] = dict(measured or {})  # seconds by number of rows
        self._observed = {
            num_rows: deque([seconds] * _SETTLED, _REMEMBERED) for num_rows, seconds in self._step_s.items()
        }
        self._compiled: set[int] = set()  # sizes whose kernels are there
        self._points: list[tuple[int, float]] = []  # those of `_believed`, ascending; empty if outdated

    @property
    def is_known(self) -> bool:
        return bool(self._step_s)

    @property
    def num_sizes(self) -> int:
        """How many sizes are known."""
        return len(self._step_s)

    @property
    def most_rows(self) -> int:
        """The largest known size; 0 without any."""
        return max(self._step_s, default=0)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn the seconds of a step of so many rows."""
        num_rows = _rounded(num_rows)
        if num_rows not in self._compiled:
            self._compiled.add(num_rows)
            return
        observed = self._observed.setdefault(num_rows, deque(maxlen=_REMEMBERED))
        observed.append(seconds)
        self._step_s[num_rows] = median(observed)
        self._points = []

    def seconds(self, num_rows: int) -> float:
        """Return the expected seconds of so many rows."""
        self._points = self._points or self._believed()
        return on_lines(self._points, num_rows)

    def _believed(self) -> list[tuple[int, float]]:
        """Return the points without rare sizes between well-known ones: a slow outlier would never be tried again."""
        settled = [rows for rows, observed in self._observed.items() if len(observed) >= _SETTLED] or [0]
        return sorted(
            (rows, step_s)
            for rows, step_s in self._step_s.items()
            if len(self._observed[rows]) >= _SETTLED or not min(settled) < rows < max(settled)
        )


class DraftShares:
    """How often the draft at each place held where all before it did; older steps fade."""

    def __init__(self, num_places: int, weight: float, usual: "DraftShares | None" = None) -> None:
        """
        Args:
            weight: of a new step.
            usual: what to expect at first, with the weight of one step; None: four fifths of the drafts hold.
        """
        self._weight = weight
        begin = usual.shares()[:num_places] if usual else [0.8]
        unseen = [0.0] * (num_places - len(begin))
        self._held = [*(weight * share for share in begin), *unseen]
        self._tried = [*[weight] * len(begin), *unseen]

    def observe(self, num_held: int, num_drafts: int) -> None:
        """Record a step's number of drafts, at least 1, and how many held before the first that did not."""
        for counts, number in (self._held, num_held), (self._tried, min(num_held + 1, num_drafts)):
            counts[:] = [
                (1 - self._weight) * count + self._weight * (place < number) for place, count in enumerate(counts)
            ]

    def shares(self) -> list[float]:
        """Return for each place how likely its draft holds if those before it do."""
        common, weight = sum(self._held) / sum(self._tried), self._weight  # of what all drafts did
        pairs = zip(self._held, self._tried, strict=True)
        return [min(SURE, (held + weight * common) / (tried + weight)) for held, tried in pairs]


class DraftingCosts:
    """What one source of drafts does for all sessions of a chain: how often its drafts hold, and what they take.

    Seconds are those of a drafter in a step, by drafts per slot and by slots that want some. MASK rows take none.
    """

    def __init__(self) -> None:
        self.shares = DraftShares(_PLACES, _WEIGHT_OF_ALL)
        self.pause = 0  # steps of sessions until drafts that do not pay may be tried again
        self._by_slots: dict[int, StepCosts] = {}
        self._starts = StepCosts()

    def observe_start(self, num_rows: int, lost_s: float) -> None:
        """Learn what drafting cost in the first step of a window beyond its rows and drafts.

        Stages compute or build steps ahead of their frames while each slot gets one token a step: those are lost.
        """
        self._starts.observe(num_rows, lost_s)

    def start_s(self, num_rows: int) -> float:
        """Return what the first step of a window is expected to lose; 0 while not known."""
        return max(0.0, self._starts.seconds(num_rows)) if self._starts.is_known else 0.0

    def observe(self, num_drafts: int, num_slots: int, seconds: float) -> None:
        """Learn the seconds of drafting in one step."""
        self._by_slots.setdefault(_rounded(num_slots), StepCosts()).observe(num_drafts, seconds)

    def seconds(self, num_drafts: int, num_slots: int) -> float:
        """Return the expected seconds; those of the nearest known number of slots, and 0 while none is known.

        While one number of drafts is known, each is taken to cost the same: most drafters make one after the other.
        """
        known = [slots for slots, costs in self._by_slots.items() if costs.is_known]
        if not num_drafts or not known:
            return 0.0
        nearest = min(known, key=lambda slots: abs(slots - num_slots))
        costs = self._by_slots[nearest]
        return costs.seconds(num_drafts) * (num_drafts / costs.most_rows if costs.num_sizes == 1 else 1)


class ScratchCosts:
    """The memory that prompt chunks take on one stage beside weights and caches: bytes per row, by length.

    Without a fused kernel, as over quantised caches, attention holds a score per row, head and token.
    """

    def __init__(self) -> None:
        self._row_bytes: dict[int, dict[int, float]] = {}  # by the kind of the cache, then by length

    def observe(self, kind: int, num_rows: int, length: int, num_bytes: int) -> None:
        """Learn from a chunk of so many rows, the last of which is token number `length` of its slot."""
        self._row_bytes.setdefault(kind, {})[_rounded(length)] = num_bytes / num_rows

    def most_rows(self, kind: int, num_before: int, num_bytes: int) -> int:
        """Return how many rows after so many tokens fit in half of these bytes: a power of two, at least _LEAST_ROWS.

        Beyond the known lengths all of the memory may grow as the length does.
        """
        usual = next(iter(self._row_bytes.values()), {})  # of the warm-up, while nothing is known of this kind
        known, rows = sorted(self._row_bytes.get(kind, usual).items()), _CHUNKS[-1]
        while known and rows > _LEAST_ROWS:
            length = num_before + rows
            longest, row_bytes = known[-1]
            row_bytes = on_lines(known, length) if length < longest else row_bytes * length / longest
            if rows * row_bytes <= num_bytes / 2:
                break
            rows //= 2
        return rows


class ChainCosts:
    """The costs of one chain: of steps, of each stage, and of all hops together."""

    def __init__(self, num_stages: int, measured: Mapping[int, Sequence[float]] | None = None) -> None:
        """`measured` are the seconds of each stage, by number of rows, if nodes have measured themselves."""
        by_rows = (measured or {}).items()
        self.steps = StepCosts()  # as if each were alone in the chain, without drafting
        self.drafting = DraftingCosts()  # by the drafter
        self.masks = DraftingCosts()
        self.scratch = [ScratchCosts() for _ in range(num_stages)]
        self._stages = [StepCosts({rows: found[stage] for rows, found in by_rows}) for stage in range(num_stages)]
        self._returns = StepCosts()  # of what prompt chunks leave in caches, on its way to the first stage
        self._token_read_s: float | None = None  # of a token's rows, from the disks of all nodes
        self._hops_s: dict[int, float] = {}  # of all hops together, by number of rows: long prompts take longer
        self._lately_on_links: dict[int, deque[float]] = {}  # the latest few of these
        self._lately_s: dict[int, float] = {}  # of recent passages, by the bits of their number of rows

    def observe(
        self, num_rows: int, stages_s: Sequence[float], took_s: float, drafting_s: float = 0.0, *, was_alone: bool
    ) -> None:
        """Learn from one frame: the seconds of each stage, those from sending to result, and those of its drafter."""
        for stage, seconds in zip(self._stages, stages_s, strict=True):
            stage.observe(num_rows, seconds)
        if was_alone:
            self.steps.observe(num_rows, took_s - drafting_s)
            hops_s, size = max(0.0, took_s - drafting_s - sum(stages_s)), _rounded(num_rows)
            known_s = self._hops_s.get(size, hops_s)
            self._hops_s[size] = known_s + _WEIGHT * (hops_s - known_s)
            for rows, found in self._lately_on_links.items() if num_rows >= _CHUNKS[0] else ():
                if found and rows > size:
                    found.popleft()  # a size that was ruled out is tried again unless smaller ones speak against it
            self._lately_on_links.setdefault(size, deque(maxlen=_FEW)).append(hops_s)
        elif self._hops_s:
            self.steps.observe(num_rows, sum(stages_s) + self.hops_s(num_rows))  # without waiting for other frames
        bits, passage_s = num_rows.bit_length(), took_s if was_alone else sum(stages_s) + drafting_s
        self._lately_s[bits] = max(passage_s, self._lately_s.get(bits, 0.0) / 2)

    def stages_s(self, num_rows: int) -> list[float]:
        """Return the seconds of each stage at so many rows; empty while one of them is not known."""
        return [stage.seconds(num_rows) for stage in self._stages] if all(s.is_known for s in self._stages) else []

    def hops_s(self, num_rows: int) -> float:
        """Return the seconds that a frame of so many rows spends between the stages; 0 while not known."""
        return on_lines(sorted(self._hops_s.items()), num_rows) if self._hops_s else 0.0

    def chunk_size(self, num_unfed: int, *, beside_streams: bool) -> int:
        """Return the rows of the next chunk of a prompt with so many rows to feed; a size is tried before it is judged.

        Beyond known sizes the line through them says nothing: 64 rows may read the weights of most experts. Streams
        do not wait for a size far beyond those.
        """
        known = min(stage.most_rows for stage in self._stages)
        if known < _TRIED <= num_unfed and not beside_streams:
            return _TRIED
        return_s = self._return_s if self._returns.is_known else None
        rows = chunk_size(num_unfed, self.stages_s, return_s, beside_streams=beside_streams)
        tried = [size for size in _CHUNKS[1:] if size <= _GROWTH * known]
        return min(rows, max(tried, default=_CHUNKS[0])) if beside_streams else rows

    def carried_rows(self, num_rows: int) -> int:
        """Return how many of these rows a prompt frame may have so that links carry signs of life behind it in time.

        As many prompt frames as there are stages may wait for one link. A single slow frame says nothing.
        """
        known = sorted((rows, min(found)) for rows, found in self._lately_on_links.items() if len(found) > 1)
        while known and num_rows > _CHUNKS[0] and on_lines(known, num_rows) * len(self._stages) > _ON_LINKS_S:
            num_rows //= 2
        return num_rows

    def pays_apart(self, num_alone: int, num_apart: int, share: float) -> bool:
        """Return whether all stages compute a prompt sooner than the first one would alone.

        Args:
            num_alone, num_apart: rows to feed in either case: nodes may hold others of them already.
            share: of the layers that the first stage computes of a prompt here.
        """
        times = self.stages_s(rows := min(num_apart, self.chunk_size(num_apart, beside_streams=False)))
        if not times:
            return True
        legs_s = [*times, self._return_s(rows)]
        alone_s = times[0] / share * num_alone / rows
        return (-(-num_apart // rows) - 1) * max(legs_s) + sum(legs_s) + self.hops_s(rows) < alone_s

    def pays_to_read(self, num_tokens: int) -> bool:
        """Return whether so many tokens' rows come sooner from the nodes' disks than they are computed."""
        computed_s = self.computed_s(num_tokens)
        if computed_s is None or self._token_read_s is None:
            return True
        pays = num_tokens * self._token_read_s < computed_s
        if not pays:
            self._token_read_s *= _FORGIVEN  # it is tried again in the end: disks are not always that busy
        return pays

    def computed_s(self, num_tokens: int) -> float | None:
        """Return the seconds in which all stages compute so many tokens of a prompt; None while not known."""
        times = self.stages_s(rows := min(num_tokens, self.chunk_size(num_tokens, beside_streams=False)))
        return (num_tokens / rows - 1) * max(times) + sum(times) + self.hops_s(rows) if times else None

    def observe_read(self, num_tokens: int, seconds: float) -> None:
        """Learn how long all nodes together took to read the rows of so many tokens from their disks."""
        known_s = seconds / num_tokens if self._token_read_s is None else self._token_read_s
        self._token_read_s = known_s + _WEIGHT * (seconds / num_tokens - known_s)

    def observe_return(self, num_rows: int, seconds: float) -> None:
        """Learn for how long what a chunk of so many rows left in caches kept the way to the first stage busy."""
        self._returns.observe(num_rows, seconds)

    def _return_s(self, num_rows: int) -> float:
        """Return the seconds that `observe_return` would learn; beyond known sizes they grow as the bytes do."""
        if not self._returns.is_known:
            return 0.0
        most = self._returns.most_rows
        return self._returns.seconds(min(num_rows, most)) * max(1.0, num_rows / most)

    def passage_s(self, num_rows: int) -> float:
        """Return the seconds that a frame may take through the whole chain, alone; 0 without rows, or while not known.

        This is its usual time, or that of recent frames of its size if longer. The first frame of a size counts too,
        and each later one halves the weight of those before it.
        """
        usual_s = sum(self.stages_s(num_rows)) + self.hops_s(num_rows) if num_rows else 0.0
        return max(usual_s, self._lately_s.get(num_rows.bit_length(), 0.0))


class LaneChooser:
    """Chooses the number of lanes for a number of sessions.

    With N sessions in m lanes a frame has the rows of k = N / m sessions. A session's next token comes after its frame
    has passed all stages and hops, or after the slowest stage has done a frame of every lane, whichever is longer. The
    m with the shortest time wins, up to what stages and hops can hold: few lanes if rows cost nothing (weights are
    read whatever their number), as many as fill the pipe if they cost much or hops are slow. On one stage a second lane
    has nothing to overlap with.
    """

    def __init__(self, num_stages: int, stages_s: StagesSeconds, hops_s: Callable[[int], float]) -> None:
        """`hops_s` returns the seconds of all hops together, by a frame's rows."""
        self._num_stages = num_stages
        self._stages_s = stages_s
        self._hops_s = hops_s
        self._lanes = 1  # until more are faster: a stage prepares its next step while others work on this one
        self._load = (0, 0)
        self._age = 0

    def choose(self, num_sessions: int, rows_each: float) -> int:
        """Return the lanes for so many sessions whose windows have so many rows each."""
        if self._num_stages == 1 or num_sessions < 2 or not self._stages_s(1):
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
        """Return the seconds until every session has stepped once."""
        rows = max(1, round(rows_each * -(-num_sessions // lanes)))
        stages_s = self._stages_s(rows)
        return max(sum(stages_s) + self._hops_s(rows), lanes * max(stages_s))


def chunk_size(
    num_unfed: int,
    stages_s: StagesSeconds,
    return_s: Callable[[int], float] | None = None,
    *,
    beside_streams: bool = False,
) -> int:
    """Return the rows of the next prompt chunk: small enough to keep every stage at work, large enough to pay.

    With c chunks on n stages a prompt takes (c + n - 1) times what a chunk takes on the slowest stage. Beside streams,
    which wait for a chunk on every stage, its time is limited.

    Args:
        return_s: what a chunk's cache segments take on their way to the first stage, which counts as one more stage.
    """
    best = _CHUNKS[0]
    for rows in _CHUNKS[1:]:
        times = stages_s(rows)
        if not times or (beside_streams and sum(times) > _BESIDE_STREAMS_S):
            continue
        here_s, best_s = (_prefill_s(num_unfed, chunk, stages_s, return_s) for chunk in (rows, best))
        if here_s * _CHUNK_GAIN < best_s:
            best = rows
    return best


def _prefill_s(num_prompt: int, chunk: int, stages_s: StagesSeconds, return_s: Callable[[int], float] | None) -> float:
    num_chunks, rows = -(-num_prompt // chunk), min(chunk, num_prompt)
    legs_s = [*stages_s(rows), *([return_s(rows)] if return_s else [])]
    return (num_chunks + len(legs_s) - 1) * max(legs_s)
