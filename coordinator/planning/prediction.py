"""How fast a plan would be, by what is known of its nodes and links. What is not known is None. Pure."""

from collections.abc import Sequence

from coordinator.planning.costs import chunk_size
from coordinator.planning.plan import Plan
from coordinator.planning.speeds import Link, Survey
from worker.model.modelspec import ModelSpec

_MOST_SAMPLED = 64  # rows of a frame that all bring a token


class Prediction:
    """One plan's times, with sessions as long as it keeps memory for."""

    def __init__(self, spec: ModelSpec, plan: Plan, survey: Survey) -> None:
        names = [assignment.name for assignment in plan.assignments]
        self._spec = spec
        self._assignments = plan.assignments
        self._context = plan.context
        self._speeds = [survey.speeds.get(name) for name in names]
        self._links = [survey.link(*pair) for pair in zip(names, [*names[1:], names[0]], strict=True)]
        if len(names) == 1:
            self._links = []

    @property
    def stage_ms(self) -> list[float | None]:
        """What each stage computes for one token."""
        return [self._stage_ms(stage, 1, 1) for stage in range(len(self._speeds))]

    @property
    def hop_ms(self) -> list[float | None]:
        """The way behind each stage, the last one back to the first; none where there is but one."""
        return [*(self._hops_ms(1) or [0.0])] if self._know(1) else [None] * len(self._speeds)

    def stages_ms(self, num_rows: int) -> list[float]:
        """What each stage computes for a frame of so many rows, where that is known; long ones are of prompts."""
        return self._stages_ms(num_rows, num_rows if num_rows <= _MOST_SAMPLED else 1)

    @property
    def links(self) -> list[Link]:
        """Behind each stage, the last one back to the first; none where there is but one."""
        return self._links

    @property
    def ms_per_token(self) -> float | None:
        """Of one request."""
        return self._round_ms(1, 1)

    def tokens_per_s(self, num_requests: int = 1) -> float | None:
        """Of so many requests together, in as many lanes as are best of those whose frames can be told."""
        rounds = [self._round_ms(num_requests, lanes) for lanes in range(1, num_requests + 1)]
        known = [round_ms for round_ms in rounds if round_ms is not None]
        return 1e3 * num_requests / min(known) if known else None

    def prefill_s(self, num_prompt: int) -> float | None:
        """Until a prompt of so many tokens brings its first token, but for what attention to a long prompt adds."""
        if not self._know(num_prompt):
            return None
        chunk = min(num_prompt, chunk_size(num_prompt, lambda rows: [ms / 1e3 for ms in self._stages_ms(rows, 0)]))
        stages, hops = self._stages_ms(chunk, 0), self._hops_ms(chunk)
        num_before, last_ms = -(-num_prompt // chunk) - 1, sum(self._stages_ms(chunk, 1)) + sum(hops)
        return (num_before * self._slowest_ms(stages, chunk) + last_ms) / 1e3

    def _round_ms(self, num_requests: int, lanes: int) -> float | None:
        """Until each of the requests has its next token: after its own frame's way, or after a frame of every lane."""
        rows = -(-num_requests // lanes)
        if not self._know(rows):
            return None
        stages = self._stages_ms(rows, rows)
        return max(sum(stages) + sum(self._hops_ms(rows)), lanes * self._slowest_ms(stages, rows))

    def _know(self, num_rows: int) -> bool:
        return all(speed is not None and speed.knows(num_rows) for speed in self._speeds)

    def _stages_ms(self, num_rows: int, num_sampled: int) -> list[float]:
        """Of stages that are known."""
        return [self._stage_ms(stage, num_rows, num_sampled) or 0.0 for stage in range(len(self._speeds))]

    def _stage_ms(self, stage: int, num_rows: int, num_sampled: int) -> float | None:
        speed, held = self._speeds[stage], self._assignments[stage]
        if speed is None:
            return None
        layers_ms = sum(speed.layers_ms(self._spec, num_rows)[held.start : held.end])
        caches_ms = sum(speed.caches_ms(self._spec, self._context)[held.start : held.end])
        samples = num_sampled and held.end == self._spec.num_layers
        return layers_ms + num_sampled * caches_ms + (speed.head_ms(num_sampled) if samples else 0.0)

    def _hops_ms(self, num_rows: int) -> list[float]:
        """The way back carries tokens, which weigh nothing."""
        if not self._links:
            return []
        *ways, back = self._links
        return [*(way.ms(num_rows * self._spec.row_bytes) for way in ways), back.ms()]

    def _slowest_ms(self, stages_ms: Sequence[float], num_rows: int) -> float:
        """Of stages and links, none of which can do two frames at once."""
        return max(*stages_ms, *self._occupied_ms(num_rows), 0.0)

    def _occupied_ms(self, num_rows: int) -> Sequence[float]:
        return [way.occupied_ms(num_rows * self._spec.row_bytes) for way in self._links[:-1]]
