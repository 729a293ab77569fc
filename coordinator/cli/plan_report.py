"""A plan for people (tables and whole sentences on standard output) and for programs (JSON)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.planning.fastest import Aim
from coordinator.planning.outlook import Outlook, Promise, format_ms
from coordinator.planning.plan import Plan
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import Survey
from worker.model.modelspec import ModelSpec
from worker.process.sizes import format_bytes

_PROMPT = 2000  # tokens, of which it is said how long they take
_COLUMNS = 16
_USUAL_COLUMNS = 80


@dataclass(frozen=True)
class PlanReport:
    """All that is told of a plan; `counts` are the numbers of requests at once whose speed is."""

    spec: ModelSpec
    outlook: Outlook
    survey: Survey
    aim: Aim
    counts: Sequence[int]

    @property
    def plan(self) -> Plan:
        return self.outlook.chosen.plan

    def to_json(self) -> dict[str, Any]:
        times = self.outlook.chosen.times
        return {
            "model": self.spec.name,
            "num_layers": self.spec.num_layers,
            "context": self.plan.context,
            "sessions": self.plan.num_sessions,
            "fits": self.plan.fits,
            "objective": self.aim.objective,
            "layers": self.plan.layers,
            "nodes": self._nodes(),
            "left_out": list(self.outlook.left_out),
            "ms_per_token": times.ms_per_token,
            "tokens_per_s": times.tokens_per_s(),
            "tokens_per_s_at": self._speeds(times),
            "prefill_s_2000": times.prefill_s(_PROMPT),
            "alternatives": [self._alternative(each) for each in self.outlook.alternatives],
            "advice": self.outlook.advice,
        }

    def print(self) -> None:
        """A row per node, with its layers drawn to scale, then what comes of it and what else could be done."""
        console = Console(highlight=False)
        size = format_bytes(self.spec.shard_bytes(0, self.spec.num_layers))
        sessions = f"{self.plan.num_sessions} sessions" if self.plan.num_sessions > 1 else "one session"
        console.print(
            f"{self.spec.name} ({self.spec.family}): {self.spec.num_layers} layers, {size}, "
            f"{sessions} of {self.plan.context} tokens"
        )
        console.print(self._held(console.width))
        if self.outlook.chosen.times.ms_per_token is None:  # nothing else is known
            if self.outlook.advice:
                console.print(f"\n{self.outlook.advice}")
            return
        console.print()
        console.print(self._times())
        console.print(f"\n{self._promises()}\n")
        if self.outlook.alternatives:
            console.print(self._alternatives())
            console.print()
        console.print(self.outlook.advice)

    def _alternative(self, each: Promise) -> dict[str, Any]:
        return {
            "name": each.name,
            "nodes": each.members,
            "layers": each.plan.layers,
            "fits": each.plan.fits,
            "ms_per_token": each.times.ms_per_token,
            "tokens_per_s_at": self._speeds(each.times),
            "prefill_s_2000": each.times.prefill_s(_PROMPT),
        }

    def _speeds(self, times: Prediction) -> dict[str, float | None]:
        return {str(count): times.tokens_per_s(count) for count in self.counts}

    def _nodes(self) -> list[dict[str, Any]]:
        times = self.outlook.chosen.times
        return [
            {
                "node": node.name, "start": node.start, "end": node.end, "weight_bytes": node.weight_bytes,
                "cache_bytes": node.cache_bytes, "memory_bytes": node.memory_bytes, "fits": node.fits,
                "stage_ms": stage_ms, "hop_ms": hop_ms,
            }
            for node, stage_ms, hop_ms in zip(self.plan.assignments, times.stage_ms, times.hop_ms, strict=True)
        ]  # fmt: skip

    def _held(self, width: int) -> Table:
        table = _table("node", "layers", "weights", "cache", "budget", "fits", "")
        columns = _COLUMNS if width >= _USUAL_COLUMNS else 0  # of the bars
        for node in self.plan.assignments:
            begin, end = (round(columns * edge / self.spec.num_layers) for edge in (node.start, node.end))
            table.add_row(
                node.name, f"[{node.start}, {node.end})", format_bytes(node.weight_bytes),
                format_bytes(node.cache_bytes), format_bytes(node.memory_bytes), "yes" if node.fits else "NO",
                Text(" " * begin + "━" * (end - begin)),
            )  # fmt: skip
        return table

    def _times(self) -> Table:
        """Per node what its times follow from, and they."""
        table = _table("node", "reads", "", "stage", "hop behind it")
        times = self.outlook.chosen.times
        for name, stage_ms, hop_ms in zip(self.outlook.chosen.members, times.stage_ms, times.hop_ms, strict=True):
            speed = self.survey.speeds[name]
            how = "measured" if speed.is_measured else "assumed"
            table.add_row(name, f"{speed.gbps:.3g} GB/s", how, format_ms(stage_ms or 0.0), format_ms(hop_ms or 0.0))
        return table

    def _promises(self) -> str:
        """What one request gets, and several, and a prompt."""
        times = self.outlook.chosen.times
        is_measured = all(self.survey.speeds[name].is_measured for name in self.outlook.chosen.members)
        least = "" if is_measured else "at least "  # what frames of several rows would bring is not known
        several = ", ".join(f"{least}{times.tokens_per_s(n) or 0.0:.1f} of {n} at once" for n in self.counts if n > 1)
        prefill_s = times.prefill_s(_PROMPT)
        prompt = "unknown" if prefill_s is None else f"{prefill_s:.1f} s"
        each = f"{format_ms(times.ms_per_token or 0.0)} per token after {self.plan.context} tokens"
        return (
            f"{each}: {times.tokens_per_s():.1f} tok/s of one request"
            f"{several and f', {several}'}; a prompt of {_PROMPT} tokens: {prompt}"
        )

    def _alternatives(self) -> Table:
        """By what the plan is to be good at, one request or several, and whether it fits."""
        most = self.aim.requests_at_once
        table = _table("instead", "layers", "per token", *([f"tok/s of {most}"] if most > 1 else []), "fits")
        for each in self.outlook.alternatives:
            ms, several = each.times.ms_per_token, each.times.tokens_per_s(most)
            speeds = ["-" if ms is None else format_ms(ms), "-" if several is None else f"{several:.1f}"]
            layers, fits = "+".join(map(str, each.plan.layers)), "yes" if each.plan.fits else "NO"
            table.add_row(each.name, layers, *speeds[: 1 + (most > 1)], fits)
        return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table
