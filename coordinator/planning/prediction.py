"""Predictions: the times of a plan, alternative plans, and advice for the user. Unknown times are None. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from coordinator.planning.costs import chunk_size
from coordinator.planning.plan import PROMPTS, Node, Objective, Plan, without_room
from coordinator.planning.planner import LATENCY_SLACK, plan, why_not_shared
from coordinator.planning.speeds import LinkSpeed, Survey, format_ms
from worker.model.model_spec import ModelSpec
from worker.platform.text import format_bytes

_MOST_SAMPLED = 64  # rows of the longest frame in which every row is sampled
_LONG_HOPS = 0.1  # of a token's time: longer hops are worth a line of advice


class Prediction:
    """The times of one plan, for sessions of the length that it keeps memory for."""

    def __init__(self, spec: ModelSpec, plan: Plan, speeds: Survey) -> None:
        names = plan.names
        self.links: list[LinkSpeed] = []  # behind each stage, the last one back to the first; none with a single stage
        if len(names) > 1:
            self.links = [speeds.link(*pair) for pair in zip(names, [*names[1:], names[0]], strict=True)]
        self._spec = spec
        self.plan = plan
        self._alone: Prediction | None = None  # of the first node, if it holds the model and shares only prompts
        if plan.prompt_end is not None:
            self._alone = Prediction(spec, replace(plan, assignments=plan.assignments[:1], prompt_end=None), speeds)
        self._speeds = [speeds.speeds.get(name) for name in names]

    @property
    def stage_ms(self) -> list[float | None]:
        """Milliseconds that each stage computes for one step of a single request."""
        rows = self._spec.step_rows
        stages = zip(self._speeds, self._stages_ms(rows, rows), strict=True)
        return [ms if speed and speed.knows(rows) else None for speed, ms in stages]

    @property
    def hop_ms(self) -> list[float | None]:
        """Milliseconds of the hop behind each stage, the last one back to the first; 0 with a single stage."""
        rows = self._spec.step_rows
        return [*(self._step_hops_ms(rows) or [0.0])] if self._know(rows) else [None] * len(self._speeds)

    def stages_ms(self, num_rows: int, num_places: int = 0) -> list[float]:
        """Return the milliseconds of each stage for a frame of so many rows, if known.

        Long frames are prompts, of which one row is sampled, or hold a canvas of `num_places`, which all are.
        """
        return self._stages_ms(num_rows, num_rows if num_rows <= _MOST_SAMPLED else min(num_rows, max(1, num_places)))

    @property
    def of_answers(self) -> "Prediction":
        """The times of the nodes that make answers."""
        return self._alone or self

    @property
    def sizes(self) -> list[int]:
        """The rows of all frames that a node has measured, ascending."""
        columns = (column for speed in self._speeds if speed for column in (*speed.kinds, speed.head))
        return sorted({rows for column in columns for rows, _ in column})

    @property
    def chunks_s(self) -> dict[int, list[float]]:
        """The seconds of each stage by the rows of a prompt chunk, as far as all nodes have measured them."""
        sizes = [rows for rows in self.sizes if rows >= _MOST_SAMPLED and self._know(rows)]
        return {rows: [ms / 1e3 for ms in self._stages_ms(rows, 1, of_prompt=True)] for rows in sizes}

    @property
    def step(self) -> str:
        """The step of an answer: `token`, or `canvas step` where the model decodes whole canvases only."""
        return "canvas step" if self._spec.needs_canvas else "token"

    @property
    def rate(self) -> str:
        """The unit of such steps in a second."""
        return "canvas steps/s" if self._spec.needs_canvas else "tok/s"

    @property
    def ms_per_step(self) -> float | None:
        """The time between two steps of a single request."""
        return self._round_ms(1, 1)

    @property
    def ms_per_token(self) -> float | None:
        """The same of tokens. Unknown for canvases, whose steps depend on the text."""
        return None if self._spec.needs_canvas else self.ms_per_step

    def tokens_per_s(self, num_requests: int = 1) -> float | None:
        """Return the rate of tokens, as `steps_per_s`. Unknown for canvases."""
        return None if self._spec.needs_canvas else self.steps_per_s(num_requests)

    def steps_per_s(self, num_requests: int = 1) -> float | None:
        """Return the rate of so many requests together, in the best number of lanes whose frame times are known."""
        rounds = [self._round_ms(num_requests, lanes) for lanes in range(1, num_requests + 1)]
        known = [round_ms for round_ms in rounds if round_ms is not None]
        return 1e3 * num_requests / min(known) if known else None

    def prefill_s(self, num_prompt: int) -> float | None:
        """Return the seconds from a prompt of so many tokens to its first token; None if unknown or too long.

        Prompts that the first node computes sooner alone are not shared.
        """
        if num_prompt > self._spec.context or not self._know(num_prompt):
            return None
        stages_ms = partial(self._stages_ms, of_prompt=True)
        chunk = min(num_prompt, chunk_size(num_prompt, lambda rows: [ms / 1e3 for ms in stages_ms(rows, 0)]))
        *befores, last = range(0, num_prompt, chunk)
        last_ms = sum(stages_ms(chunk, 1, num_before=last)) + sum(self._prompt_hops_ms(chunk))
        whole_s = (sum(self.slowest_ms(chunk, of_prompt=True, num_before=n) for n in befores) + last_ms) / 1e3
        if self._alone is None:
            return whole_s
        alone_s = self._alone.prefill_s(num_prompt)
        assert alone_s is not None
        return min(alone_s, whole_s + self._stages_ms(1, 1)[0] / 1e3)  # the last token is the first node's

    def slowest_ms(self, num_rows: int, num_sampled: int = 0, *, of_prompt: bool = False, num_before: int = 0) -> float:
        """Return the longest time of a stage or link, each of which does one frame at a time, if they are known."""
        stages_ms = self._stages_ms(num_rows, num_sampled, of_prompt=of_prompt, num_before=num_before)
        if self.plan.prompt_end is not None:
            return max(*stages_ms, *(self._segments_ms(num_rows) if of_prompt else ()), 0.0)
        occupied_ms = (way.occupied_ms(num_rows * self._spec.row_bytes) for way in self.links[:-1])
        return max(*stages_ms, *occupied_ms, 0.0)

    def _segments_ms(self, num_rows: int) -> list[float]:
        """Return the times for which what each node but the first remembers of so many rows occupies its link."""
        return [
            way.occupied_ms(num_rows * self._spec.segment_row_bytes(start, end))
            for way, (start, end) in zip(self.links[1:], self.plan.prompt_parts[1:], strict=True)
        ]

    def _prompt_hops_ms(self, num_rows: int) -> list[float]:
        """Return the times of all hops of a prompt chunk, and of what the last node remembers of it on the way back."""
        if self.plan.prompt_end is None:
            return self._hops_ms(num_rows, 0)
        start, end = self.plan.prompt_parts[-1]
        num_back = num_rows * self._spec.segment_row_bytes(start, end) + self._spec.snapshot_bytes(start, end)
        return self._hops_ms(num_rows, num_back)

    def _round_ms(self, num_requests: int, lanes: int) -> float | None:
        """Return the time of a round: one frame's way, or a frame of every lane on the slowest stage."""
        rows = -(-num_requests // lanes) * self._spec.step_rows
        if not self._know(rows):
            return None
        way_ms = sum(self._stages_ms(rows, rows)) + sum(self._step_hops_ms(rows))
        return max(way_ms, lanes * self.slowest_ms(rows, rows))

    def _know(self, num_rows: int) -> bool:
        return all(speed is not None and speed.knows(num_rows) for speed in self._speeds)

    def _stages_ms(
        self, num_rows: int, num_sampled: int, *, of_prompt: bool = False, num_before: int = 0
    ) -> list[float]:
        """Return the milliseconds of each stage; 0 for a stage of unknown speed."""
        found = []
        parts = self.plan.prompt_parts if of_prompt else self.plan.answer_parts
        for speed, (start, end) in zip(self._speeds, parts, strict=True):
            context = self.plan.context
            up_to = speed.ms_up_to(self._spec, num_rows, num_sampled, context, num_before) if speed else None
            found.append(up_to[end] - up_to[start] if up_to else 0.0)
        return found

    def _step_hops_ms(self, num_rows: int) -> list[float]:
        """Return the times of all hops of a frame that makes answers. The hop back mostly carries token ids only."""
        if self.plan.prompt_end is not None:
            return [0.0] * len(self.links)
        return self._hops_ms(num_rows, num_rows * self._spec.soft_row_bytes)

    def _hops_ms(self, num_rows: int, num_back: int) -> list[float]:
        """Return the times of all hops of a frame that passes all nodes, with so many bytes on the way back."""
        num_bytes = num_rows * self._spec.row_bytes
        return [way.ms(num_bytes) for way in self.links[:-1]] + [back.ms(num_back) for back in self.links[-1:]]


@dataclass(frozen=True)
class PlanReport:
    """The plan that was chosen, others to compare it with, and advice in whole sentences."""

    chosen: Prediction
    left_out: tuple[str, ...]
    alternatives: Mapping[str, Prediction]  # by their names
    advice: str


def report_plan(spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective) -> PlanReport:
    """Plan, and compare the plan with others.

    Raises:
        ConfigError: as `plan` does.
    """
    chosen = plan(spec, nodes, speeds, objective)
    left_out = tuple(node.name for node in nodes if node.name not in chosen.names)
    others = _alternatives(spec, nodes, speeds, objective, chosen)
    alternatives = {name: Prediction(spec, other, speeds) for name, other in others}
    report = PlanReport(Prediction(spec, chosen, speeds), left_out, alternatives, "")
    small = without_room(spec, [node for node in nodes if node.name in left_out], objective)
    advice = [*_advice(report, objective, nodes[0].name, small)]
    if objective.goal == "prompt" and (why := why_not_shared(spec, nodes, speeds, objective, chosen)):
        advice.insert(0, f"Planned by latency, not for prompts: {why}.")
    return replace(report, advice=" ".join(advice))


def _alternatives(
    spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective, chosen: Plan
) -> Iterator[tuple[str, Plan]]:
    """Yield by name: each node alone, the best chain of several, that without the slowest node, and an even split."""
    if len(nodes) == 1:
        return
    free = replace(objective, layers=None)
    if objective.goal != "prompt" and chosen.prompt_end is None and speeds.covers(node.name for node in nodes):
        apart = plan(spec, nodes, speeds, replace(free, goal="prompt"))
        if apart.prompt_end is not None:
            yield "--objective prompt", apart
    for node in nodes:
        yield f"{node.name} alone", plan(spec, [node], speeds, replace(objective, layers=[spec.num_layers]))
    if speeds.covers(node.name for node in nodes):
        chains = replace(free, goal="latency") if objective.goal == "prompt" else free
        several = plan(spec, nodes, speeds, replace(chains, may_be_alone=False))
        if several.fits:
            yield " + ".join(several.names), several
        slowest = max(nodes, key=lambda node: speeds.speeds[node.name].ms_up_to(spec, 1)[-1])
        if len(nodes) > 2:
            yield f"without {slowest.name}", plan(spec, [n for n in nodes if n is not slowest], speeds, free)
    if len(nodes) <= spec.num_layers:
        each, more = divmod(spec.num_layers, len(nodes))
        even = [each + (i < more) for i in range(len(nodes))]
        goal = "latency" if objective.goal == "prompt" and chosen.prompt_end is None else objective.goal
        yield "even split", plan(spec, nodes, speeds, replace(objective, layers=even, goal=goal))


def _advice(report: PlanReport, objective: Objective, first: str, small: Sequence[str]) -> Iterator[str]:
    """Yield sentences on the chosen plan. `small` are the nodes left out that have no memory for any layer."""
    chosen, rate = report.chosen, report.chosen.steps_per_s(objective.requests_at_once)
    alone = [each for each in report.alternatives.values() if len(each.plan.names) == 1]
    if not chosen.plan.fits:
        yield f"It does not fit: {chosen.plan.lacking}."
        yield from (f"{each.plan.names[0]} alone would hold it: run it there." for each in alone if each.plan.fits)
        return
    if chosen.plan.prompt_end is not None:
        pairs = zip(chosen.plan.names, chosen.plan.prompt_parts, strict=True)
        parts = ", ".join(f"{name} layers [{start}, {end})" for name, (start, end) in pairs)
        yield f"{first} makes answers alone; of prompts it and the others compute a part each: {parts}."
    if lacking := report.left_out if rate is None else small:
        yield f"Left out for lack of memory: {', '.join(lacking)}."
    if rate is None:
        if len(chosen.plan.names) > 1:
            canvases = "" if chosen.step == "token" else "; canvases need `tflops`"
            yield (
                f"How fast these nodes are is not known (those of one machine are not measured{canvases}), so the "
                "split is by bytes, as if they were equally fast."
            )
        return
    if len(chosen.plan.names) == 1 and alone:
        several = next((name for name in report.alternatives if " + " in name), "")
        against = several and f", against {_figure(report.alternatives[several], objective)} of {several}"
        yield f"{chosen.plan.names[0]} alone is fastest: {_figure(chosen, objective)}{against}."
    elif slow := [name for name in report.left_out if name not in small]:
        are = "is" if len(slow) == 1 else "are"
        yield f"{' and '.join(slow)} would make it no faster, and {are} left out."
    faster = [each for each in alone if _rate(each, objective) > rate * LATENCY_SLACK]
    for each in sorted(faster, key=lambda each: -_rate(each, objective)):
        [assignment] = each.plan.assignments
        figures = f"{_figure(each, objective)} instead of {_figure(chosen, objective)}"
        if assignment.fits:
            how = "" if assignment.name == first else ": run it there"
            yield f"{assignment.name} alone would be faster, {figures}{how}."
            break
        yield f"{assignment.name} alone would make {figures}, but lacks {format_bytes(assignment.missing_bytes)}."
    apart = [each for each in (chosen, *report.alternatives.values()) if each.plan.prompt_end is not None]
    with_alone = [each for each in alone if each.plan.names[0] == first and each.plan.fits]
    if apart and with_alone:
        yield from _advice_on_prompts(apart[0], with_alone[0], first, is_chosen=apart[0] is chosen)
    whole, step, hops = chosen.ms_per_step, chosen.step, [ms or 0.0 for ms in chosen.hop_ms]
    if whole and sum(hops) > _LONG_HOPS * whole:
        longest = hops.index(max(hops))
        sender, receiver = chosen.plan.names[longest], [*chosen.plan.names, chosen.plan.names[0]][longest + 1]
        yield f"Hops take {sum(hops) / whole:.0%} of a {step}'s time, most of it from {sender} to {receiver}."


def _advice_on_prompts(apart: Prediction, alone: Prediction, first: str, *, is_chosen: bool) -> Iterator[str]:
    """Tell of the shortest prompts that nodes share, as they are computed sooner than by the first node alone."""
    names = " and ".join(apart.plan.names)
    known = [(num, alone.prefill_s(num), apart.prefill_s(num)) for num in PROMPTS]
    shared = [(num, one_s / several_s) for num, one_s, several_s in known if one_s and several_s]
    num, gain = next(((num, gain) for num, gain in shared if gain > LATENCY_SLACK), (0, 1.0))
    how = f"{gain:.1f} x faster than by {first} alone, and answers as fast as there"
    if num:
        what = (
            f"Prompts of {num} tokens are"
            if is_chosen
            else f"With --objective prompt, prompts of {num} tokens would be"
        )
        yield f"{what} computed by {names}, {how}."
    elif is_chosen and shared:
        yield f"Prompts of up to {shared[-1][0]} tokens are computed by {first} alone: {names} would take longer."


def _rate(predicted: Prediction, objective: Objective) -> float:
    return predicted.steps_per_s(objective.requests_at_once) or 0.0


def _figure(predicted: Prediction, objective: Objective) -> str:
    """Format the plan's speed by the objective's goal."""
    if objective.goal != "throughput":
        return f"{format_ms(predicted.ms_per_step or 0.0)} per {predicted.step}"
    return f"{_rate(predicted, objective):.1f} {predicted.rate} of {objective.num_requests} requests"
