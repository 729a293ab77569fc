"""What a plan promises, what other plans would, and what follows for the user. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from coordinator.planning.fastest import Aim, best_plan, fastest
from coordinator.planning.plan import Node, Plan, plan
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import Survey
from worker.model.modelspec import ModelSpec
from worker.process.sizes import format_bytes

_MUCH = 0.1  # of a token's time: what hops have to take before a word is lost on them


@dataclass(frozen=True)
class Promise:
    """A plan and its times; `name` says what is different about it."""

    name: str
    plan: Plan
    times: Prediction

    @property
    def members(self) -> list[str]:
        return [assignment.name for assignment in self.plan.assignments]


@dataclass(frozen=True)
class Outlook:
    """The plan that was chosen, others to compare it with, and advice in whole sentences."""

    chosen: Promise
    left_out: tuple[str, ...]
    alternatives: tuple[Promise, ...]
    advice: str


def outlook_of(
    spec: ModelSpec, nodes: Sequence[Node], survey: Survey, aim: Aim, layers: Sequence[int] | None = None
) -> Outlook:
    """Choose the plan, and say what is to be said about it.

    Raises:
        ConfigError: as `plan` does.
    """
    chosen_plan = best_plan(spec, nodes, survey, aim, layers)
    chosen = Promise("", chosen_plan, Prediction(spec, chosen_plan, survey))
    left_out = tuple(node.name for node in nodes if node.name not in chosen.members)
    others = tuple(
        Promise(name, other, Prediction(spec, other, survey)) for name, other in _others(spec, nodes, survey, aim)
    )
    outlook = Outlook(chosen, left_out, others, "")
    return replace(outlook, advice=" ".join(_advice(outlook, aim, nodes[0].name)))


def _others(spec: ModelSpec, nodes: Sequence[Node], survey: Survey, aim: Aim) -> Iterator[tuple[str, Plan]]:
    """By name: each node alone, the best chain of several, that without the slowest node, and equal parts."""
    if len(nodes) == 1:
        return
    for node in nodes:
        yield f"{node.name} alone", plan(spec, [node], aim.context, None, aim.num_sessions)
    if survey.covers(node.name for node in nodes):
        if several := fastest(spec, nodes, survey, replace(aim, may_be_alone=False)):
            yield " + ".join(assignment.name for assignment in several.assignments), several
        slowest = max(nodes, key=lambda node: sum(survey.speeds[node.name].layers_ms(spec, 1)))
        if len(nodes) > 2:
            left = [node for node in nodes if node is not slowest]
            yield f"without {slowest.name}", best_plan(spec, left, survey, aim)
    if len(nodes) <= spec.num_layers:
        each, more = divmod(spec.num_layers, len(nodes))
        even = [each + (i < more) for i in range(len(nodes))]
        yield "even split", plan(spec, nodes, aim.context, even, aim.num_sessions)


def _advice(outlook: Outlook, aim: Aim, first: str) -> Iterator[str]:
    chosen, rate = outlook.chosen, outlook.chosen.times.tokens_per_s(aim.requests_at_once)
    alone = [each for each in outlook.alternatives if len(each.members) == 1]
    if not chosen.plan.fits:
        lacking = ", ".join(
            f"{a.name} lacks {format_bytes(a.missing_bytes)}" for a in chosen.plan.assignments if not a.fits
        )
        yield f"It does not fit: {lacking}."
        yield from (f"{each.members[0]} alone would hold it: run it there." for each in alone if each.plan.fits)
        return
    if rate is None:
        yield "How fast these nodes are is not known, so the split is by bytes, as if they were equally fast."
        return
    faster = [each for each in alone if _rate(each, aim) > rate * 1.001]
    if len(chosen.members) == 1 and alone:
        yield from _about_one(outlook, aim)
    elif outlook.left_out:
        yield f"{' and '.join(outlook.left_out)} would make it no faster, and is left out."
    for each in sorted(faster, key=lambda each: -_rate(each, aim)):
        yield _about_faster(each, chosen, aim, first)
        if each.plan.fits:
            break
    yield from _about_hops(chosen)


def format_ms(ms: float) -> str:
    """Milliseconds for people."""
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"


def _about_one(outlook: Outlook, aim: Aim) -> Iterator[str]:
    [name] = outlook.chosen.members
    several = [each for each in outlook.alternatives if " + " in each.name]
    against = f", against {_figure(several[0], aim)} of {several[0].name}" if several else ""
    yield f"{name} alone is fastest: {_figure(outlook.chosen, aim)}{against}."


def _about_faster(alone: Promise, chosen: Promise, aim: Aim, first: str) -> str:
    """One Mac alone would be faster than the plan."""
    [assignment] = alone.plan.assignments
    figures = f"{_figure(alone, aim)} instead of {_figure(chosen, aim)}"
    if not assignment.fits:
        return f"{assignment.name} alone would make {figures}, but lacks {format_bytes(assignment.missing_bytes)}."
    how = "" if assignment.name == first else ": run it there"
    return f"{assignment.name} alone would be faster, {figures}{how}."


def _about_hops(chosen: Promise) -> Iterator[str]:
    whole, hops = chosen.times.ms_per_token, [ms or 0.0 for ms in chosen.times.hop_ms]
    if whole and sum(hops) > _MUCH * whole:
        longest = hops.index(max(hops))
        ends = chosen.members[longest], [*chosen.members, chosen.members[0]][longest + 1]
        yield f"Hops take {sum(hops) / whole:.0%} of a token's time, most of it from {ends[0]} to {ends[1]}."


def _rate(promise: Promise, aim: Aim) -> float:
    return promise.times.tokens_per_s(aim.requests_at_once) or 0.0


def _figure(promise: Promise, aim: Aim) -> str:
    """Its speed, by what the plan is to be good at."""
    if aim.objective == "latency":
        return f"{format_ms(promise.times.ms_per_token or 0.0)} per token"
    return f"{_rate(promise, aim):.1f} tok/s of {aim.num_requests} requests"
