"""Measure every decoder on questions that training never saw, by the product's own path.

python -m tools.eval_windows --json docs/windows.json --markdown docs/windows.md

Each answer comes from `coordinator.engine.engine` on a chain; nothing here decodes. `--from FILE` lays out an earlier
run's numbers again.
"""

import functools
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
import uvloop

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnNode
from coordinator.cluster.open import choose_plan, open_chain
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.cluster.step_timeouts import ArrivedResult
from coordinator.decoding.decode_options import Decode, suit
from coordinator.engine.engine import generate_once
from coordinator.engine.inputs import InputProcessor
from coordinator.planning.costs import ChainCosts, DraftingCosts
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Conversation, Request, check_request
from protos.brigade_pb2 import Cache, Frame, Opening, Window
from tools.demo_data import mix
from tools.demo_data.turn import Turn
from tools.eval_demo import CHECKS, MAX_TOKENS, Output
from tools.figures import load, save
from tools.windows_data import Measured, Score, Speed
from tools.windows_report import to_markdown
from worker.errors import InputError
from worker.memory.history import History
from worker.model.checkpoint import DEMO
from worker.platform.machine import machine_name
from worker.platform.run import run_command

ACCURACY = {"arithmetic": "right result", "code": "example holds", "facts": "exact text", "story": "exact text"}
WINDOWS = (4, 8, 16, 32)  # MASK rows
THRESHOLDS = (0.2, 0.4, 0.8)  # nats
AR, NGRAM, AUTO = Decode("ar"), Decode("ngram"), Decode("diffusion")
LOSSLESS = [Decode("diffusion", window) for window in WINDOWS]
FAST = [Decode("diffusion-fast", window, threshold) for window in WINDOWS for threshold in THRESHOLDS]
WANTED = [AR, Decode("diffusion", 16), Decode("diffusion-fast", 16, 0.4)]
ALL = [AR, NGRAM, *LOSSLESS, *FAST]
CHAINED = [AR, NGRAM, *WANTED[1:]]
TIMED = [AR, NGRAM, *LOSSLESS, Decode("diffusion-fast", 16, 0.4), AUTO]
DRAFTING = [Decode("draft", num_drafts=count) for count in (3, 7, 15)]
DRAFTED = [*DRAFTING, Decode("draft")]
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)
HOP_S = 0.02
PARTS = ("steps", "speeds", "wanted", "scores", "chain", "drafts", "drafting")
NUM_HOPS = 3  # of a chain of three nodes: two between them, and the tokens' way back
DELAYS_S = (0.0, NUM_HOPS * HOP_S)
_PREFIX = 128  # tokens that a timed step finds in the caches


class Sizes(NamedTuple):
    """How many questions each part asks."""

    limit: int  # of each kind, by every decoder
    wanted: int  # of arithmetic, by the three decoders of which something is wanted
    timed: int  # of each kind, for prices and on three processes


@dataclass(frozen=True)
class Prices:
    """What steps take, whatever else this machine does: seconds by rows, and `delay_s` more, as a network would."""

    by_rows: Mapping[int, float]
    delay_s: float
    by_drafts: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, num_rows: int) -> float:
        return float(np.interp(num_rows, list(self.by_rows), list(self.by_rows.values()))) + self.delay_s

    def drafting_s(self, num_drafts: int) -> float:
        return float(np.interp(num_drafts, [0, *self.by_drafts], [0.0, *self.by_drafts.values()]))


class PricedDrafting(DraftingCosts):
    """Costs of drafting that are what the prices say; no step is computed ahead and lost."""

    def __init__(self, prices: Prices) -> None:
        super().__init__()
        self._prices = prices

    def observe(self, num_drafts: int, num_slots: int, seconds: float) -> None:
        super().observe(num_drafts, num_slots, self._prices.drafting_s(num_drafts))

    def observe_start(self, num_rows: int, lost_s: float) -> None:
        super().observe_start(num_rows, 0.0)


class PricedCosts(ChainCosts):
    """Costs that are what the prices say, not what was measured; begins with those that a chain warms up with."""

    def __init__(self, num_stages: int, prices: Prices) -> None:
        super().__init__(num_stages)
        self._prices = prices
        self.drafting = PricedDrafting(prices)
        for num_rows in (64, 64, 1, 1):
            self.observe(num_rows, [0.0] * num_stages, 0.0, was_alone=True)

    def observe(
        self, num_rows: int, stages_s: Sequence[float], took_s: float, drafting_s: float = 0.0, *, was_alone: bool
    ) -> None:
        super().observe(num_rows, stages_s, self._prices.seconds(num_rows), was_alone=was_alone)


class PricedChain(Chain):
    """A chain that, once it has prices, counts the seconds that its steps would take."""

    prices: Prices | None = None
    elapsed_s = 0.0

    async def receive(self) -> ArrivedResult:
        arrival = await super().receive()
        if self.prices and arrival.sent.num_rows:
            is_waited_for = bool(arrival.result.samples or arrival.result.guesses)  # chunks follow each other
            self.elapsed_s += self.prices.seconds(arrival.sent.num_rows) - self.prices.delay_s * (not is_waited_for)
            self.elapsed_s += self.prices.drafting_s(arrival.sent.num_drafts)
        return arrival


async def score(
    chain: Chain, inputs: InputProcessor, kind: str, turns: Sequence[Turn], decodes: Iterable[Decode]
) -> list[Score]:
    """Every question by every decoder; the first of them is `ar`, with whose tokens the others are compared."""
    scores = [Score(kind, decode.kind, _size(decode), _threshold(decode)) for decode in decodes]
    for number, turn in enumerate(turns, 1):
        expected: list[int] = []
        for score, decode in zip(scores, decodes, strict=True):
            answer, has_it_right = await ask(chain, inputs, turn, decode)
            expected = expected or answer.tokens
            score.add(answer, expected, is_right=has_it_right)
        _progress(f"{len(chain.peers)} workers, {kind}: {number}/{len(turns)}")
    return scores


async def price(
    chain: PricedChain, inputs: InputProcessor, prices: Prices, limit: int, decodes: Sequence[Decode]
) -> list[Speed]:
    """Tokens per second of whole answers by every decoder, at these prices per step.

    What the chain learns of its steps begins anew with each decoder and kind.
    """
    chain.prices, delay_s = prices, prices.delay_s
    speeds = []
    for kind in mix.MEASURED:
        for decode in decodes:
            speed = Speed(kind, decode.kind, _size(decode), 1e3 * delay_s)
            chain.costs = PricedCosts(chain.num_stages, prices)
            for turn in mix.held_out(kind, limit):
                chain.elapsed_s = 0.0
                answer, _ = await ask(chain, inputs, turn, decode)
                speed.add(len(answer.tokens), chain.elapsed_s)
            speeds.append(speed)
        _progress(f"{1e3 * delay_s:g} ms: {kind}")
    chain.prices = None
    return speeds


async def ask(chain: Chain, inputs: InputProcessor, turn: Turn, decode: Decode) -> tuple[Answer, bool]:
    """Return the answer to a question by this decoder, greedy, and whether it is right."""
    assert inputs.tokenizer is not None
    prompt, stream = await inputs.prompt_ids(Conversation.of(turn.prompt)), inputs.tokenizer.stream(())
    request = Request(prompt, MAX_TOKENS, decode=suit(decode, Cache(), inputs.spec), eos=inputs.eos)
    check_request(request, inputs.spec)
    answer = await generate_once(chain, request, parser=stream)
    return answer, is_right(turn, stream.text, answer.finish_reason == "stop")


@functools.cache
def is_right(turn: Turn, text: str, has_ended: bool) -> bool:
    return CHECKS[turn.kind][ACCURACY[turn.kind]](turn, Output(text, [], has_ended))


def _size(decode: Decode) -> int | None:
    """MASK rows, or drafts."""
    return decode.num_drafts if decode.kind == "draft" else decode.window


def _threshold(decode: Decode) -> float | None:
    return decode.entropy_threshold if decode.kind == "diffusion-fast" else None


async def step_costs(chain: Chain, rounds: int) -> dict[str, float]:
    """Median milliseconds of a step by its rows: half of them tokens to verify, half MASK rows; all sizes in turn.

    Run it on the loop of the chain's thread.
    """
    history = History(5 + at % 64 for at in range(_PREFIX))
    opening = Window(slot=0, prefix_hash=history.prefix_hash(0), tokens=history.tokens)
    await _step(chain, Frame(opened=[Opening(slot=0)], windows=[opening]))
    times: dict[int, list[float]] = {rows: [] for rows in STEP_ROWS}
    for _ in range(rounds):
        for rows, taken in times.items():
            known = (rows + 1) // 2
            window = Window(
                slot=0, base=_PREFIX, prefix_hash=history.prefix_hash(_PREFIX), tokens=history.tokens[:known],
                wanted=known, masks=rows - known, guessed=rows - known,
            )  # fmt: skip
            taken.append(await _step(chain, Frame(windows=[window])))
    await _step(chain, Frame(closed=[0]))
    return {str(rows): 1e3 * statistics.median(taken) for rows, taken in times.items()}


async def drafting_costs(plain: Chain, drafted: Chain, rounds: int) -> dict[str, float]:
    """What drafting adds to a step of two rows, as a share of it, by number of drafts: medians, all in turn.

    Counted in processor time, which hardly depends on what else this machine does. `plain` has no drafter, and the rows
    of `drafted` carry what its head reads. After a step of one row the next one would be computed ahead of its frame.
    """
    counts = [decode.num_drafts or 0 for decode in DRAFTING]
    asked = {plain: [0] * len(counts), drafted: counts}
    times: dict[int, list[float]] = {count: [] for count in (0, *counts)}
    for each in asked:
        await each.thread.call(_step(each, Frame(opened=[Opening(slot=0, drafted=each is drafted)])))
    for number in range(rounds):
        for each, wanted in asked.items():
            found = await each.thread.call(_processor_s(each, number * len(counts), wanted))
            for count, seconds in zip(wanted, found, strict=True):
                times[count].append(seconds)
    for each in asked:
        await each.thread.call(_step(each, Frame(closed=[0])))
    plain_s = statistics.median(times[0])
    return {str(count): statistics.median(times[count]) / plain_s - 1 for count in counts}


async def _processor_s(chain: Chain, base: int, counts: Sequence[int]) -> list[float]:
    """Processor seconds of steps of two rows after `base` tokens, for each of these numbers of drafts in turn.

    Run it on the chain's thread.
    """
    history = History([5] * (base + len(counts) + 1))
    taken = []
    for at, count in enumerate(counts, base):
        window = Window(slot=0, base=at, prefix_hash=history.prefix_hash(at), tokens=[5, 5], wanted=2, to_draft=count)
        began = time.process_time()
        await _step(chain, Frame(windows=[window]))
        taken.append(time.process_time() - began)
    return taken


async def _step(chain: Chain, frame: Frame) -> float:
    """Seconds of one frame, alone in the chain."""
    frame.epoch, frame.step = chain.epoch, chain.last_step + 1
    chain.send(frame)
    arrival = await chain.receive()
    chain.learn(arrival)
    return arrival.took_s


@asynccontextmanager
async def open_priced(options: ClusterOptions) -> AsyncIterator[tuple[PricedChain, InputProcessor]]:
    """Open a chain of this process alone."""
    inputs = await InputProcessor.read(options)
    options = replace(options, by_speed=False, context=inputs.spec.context)
    plan, _, _ = await choose_plan(options, inputs.checkpoint, [])
    deployment = Deployment(inputs.checkpoint, plan, [])
    async with OwnNode() as own, PricedChain(own, deployment) as chain:
        await own.load(deployment)
        await chain.open()
        yield chain, inputs


async def measure(measured: Measured, parts: Sequence[str], sizes: Sizes, save: Callable[[], None]) -> None:
    """Fill in these parts, and save after each kind. The counts do not depend on the machine, the times do."""
    async with open_priced(cluster_options(None, measured.model, 0)) as (chain, inputs):
        if "steps" in parts:
            measured.step_ms = await chain.thread.call(step_costs(chain, rounds=30))
        if "speeds" in parts:
            measured.speeds = []
            for delay_s in DELAYS_S:
                measured.speeds += await price(chain, inputs, _prices(measured, delay_s), sizes.timed, TIMED)
                save()
        if "wanted" in parts:
            turns = mix.held_out("arithmetic", sizes.wanted)
            measured.wanted = await score(chain, inputs, "arithmetic", turns, WANTED)
        if "scores" in parts:
            measured.scores = []
            for kind in mix.MEASURED:
                measured.scores += await score(chain, inputs, kind, mix.held_out(kind, sizes.limit), ALL)
                save()
        if {"drafts", "drafting"} & set(parts):
            await measure_drafter(measured, parts, sizes, chain, save)
    if "chain" in parts:
        options = cluster_options(None, measured.model, 2, context=inputs.spec.context)
        async with open_chain(options, inputs.checkpoint, every_node=True) as whole:
            measured.chain = []
            for kind in mix.MEASURED:
                measured.chain += await score(whole, inputs, kind, mix.held_out(kind, sizes.timed), CHAINED)


async def measure_drafter(
    measured: Measured, parts: Sequence[str], sizes: Sizes, plain: Chain, save: Callable[[], None]
) -> None:
    """Fill in what the bundled drafter brings and takes; `plain` has none."""
    drafter = str(DEMO / "drafter")
    async with open_priced(cluster_options(None, measured.model, 0, draft_model=drafter)) as (chain, inputs):
        if "drafts" in parts:
            await score_drafts(measured, chain, inputs, sizes, save)
        if "drafting" in parts:
            shares = await drafting_costs(plain, chain, rounds=60)
            measured.load = os.getloadavg()[0]
            measured.draft_ms = {count: share * measured.step_ms["2"] for count, share in shares.items()}
            measured.drafted_speeds = []
            for delay_s in DELAYS_S:
                prices = _prices(measured, delay_s)
                measured.drafted_speeds += await price(chain, inputs, prices, sizes.timed, DRAFTED)
                save()


async def score_drafts(
    measured: Measured, chain: Chain, inputs: InputProcessor, sizes: Sizes, save: Callable[[], None]
) -> None:
    """Fill in what the bundled drafter brings, on templates left out of its training, too."""
    measured.drafts, measured.unknown = [], []
    for kind in mix.MEASURED:
        turns = mix.held_out(kind, sizes.limit)
        measured.drafts += (await score(chain, inputs, kind, turns, [AR, *DRAFTING]))[1:]
        many = mix.held_out(kind, 100 * sizes.limit)
        if unknown := [turn for turn in many if turn.is_new_to_drafter][: sizes.limit]:
            measured.unknown += (await score(chain, inputs, kind, unknown, [AR, *DRAFTING]))[1:]
        save()


def _prices(measured: Measured, delay_s: float) -> Prices:
    by_rows = {int(rows): cost / 1e3 for rows, cost in measured.step_ms.items()}
    by_drafts = {int(count): cost / 1e3 for count, cost in measured.draft_ms.items()}
    return Prices(by_rows, delay_s, by_drafts)


def _progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(
    model: Annotated[str, typer.Option(help="As for `brigade generate`; the questions suit `demo`.")] = "demo",
    limit: Annotated[int, typer.Option(min=1, help="Questions per kind for each decoder.")] = 8,
    wanted: Annotated[int, typer.Option(min=1, help="Arithmetic questions for the decoders with a goal.")] = 100,
    timed: Annotated[int, typer.Option(min=1, help="Questions per kind for speeds and three processes.")] = 3,
    earlier: Annotated[Path | None, typer.Option("--from", help="Begin with the numbers of this JSON file.")] = None,
    part: Annotated[list[str] | None, typer.Option(help=f"With --from: measure only {', '.join(PARTS)}.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file.")] = None,
) -> None:
    """Accuracy, tokens per step and cost of every decoder on the bundled model's held-out questions."""
    if unknown := set(part or ()) - set(PARTS):
        raise InputError("part", f"expected one of {', '.join(PARTS)}, got {unknown.pop()!r}")
    measured = load(Measured, earlier) if earlier is not None else Measured(machine_name(), model)

    def save_all() -> None:
        if json_file is not None:
            save(measured, json_file)

    parts = PARTS if earlier is None else part or ()
    if parts:
        measured.machine = machine_name()
        uvloop.run(measure(measured, parts, Sizes(limit, wanted, timed), save_all))
    save_all()
    if markdown is not None:
        markdown.write_text(to_markdown(measured), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
