"""Nodes that are lost for good, together, or again and again; and coordinators that are lost."""

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil

from coordinator.sessions.request import Request
from tools.faults.asked import FOX, MAX_TOKENS, asking_four, four, greedy
from tools.faults.case import COMES_BACK, IS_GONE, Case, num_pieces, still
from tools.faults.command import Command, generate
from tools.faults.kills import kill
from tools.faults.rig import NAMES, Rig
from tools.faults.trial import Seen
from tools.worker_process import FREED_S, until

_STORY = (FOX, "--max-tokens", str(MAX_TOKENS), "--decode", "ar")
_TOO_SMALL = 8_500_000  # bytes per node: the bundled model fits on three such nodes and not on two
_NEVER_S = 2.0
_NEVER_MOST_S = 10.0
_BRIGADE = "brigade generate"


def gone() -> Iterator[Case]:
    for name in NAMES:
        run = partial(_kill_four, name=name)
        yield Case("gone", f"kill -9 {name}, gone for good", "planned around, every stream equal", run)
    yield Case(
        "gone", f"{_BRIGADE}: kill -9 last, and the model does not fit without",
        f"exit code 3 within {_NEVER_MOST_S:g} s, --recovery-timeout being {_NEVER_S:g}; and the reason", does_not_fit,
    )  # fmt: skip
    together = "kill -9 first and last at once"
    yield Case("gone", f"{together}, gone for good", "planned around, every stream equal", partial(two, is_gone=True))
    yield Case("gone", f"{together}, started again", "every stream equal", partial(two, is_gone=False))
    yield Case(
        "gone", "kill -9 first, and last while its tokens are fed again", "every stream equal", during_replay
    )  # fmt: skip
    yield Case("gone", "SIGTERM to first", "it hands over and ends with exit code 0, every stream equal", drain)
    owns = f"{_BRIGADE} --local 2"
    yield Case("gone", f"{owns}: kill -9 worker-2", "started again, same text, no process left", kill_own)
    yield Case(
        "gone", f"{owns}: kill -9 worker-2, which from then on crashes on every start",
        "same text without it, pauses between tries grow, no process left", crashes_on_every_start,
    )  # fmt: skip


def coordinators() -> Iterator[Case]:
    free = f"workers free within {FREED_S:g} s, equal tokens for the next coordinator"
    yield Case("coordinator", f"{_BRIGADE}: kill -9", free, coordinator_killed)
    yield Case(
        "coordinator", f"{_BRIGADE} --journal: kill -9, and again", "the text goes on, as a whole equal", journal
    )
    yield Case(
        "coordinator", f"{_BRIGADE}: SIGSTOP, SIGCONT after 8 s", "goes on by itself, same text", coordinator_stops
    )


async def _kill_four(rig: Rig, name: str) -> Seen:
    return await kill(rig, four(rig, "ar"), name, "middle", comes_back=False)


async def does_not_fit(rig: Rig) -> Seen:
    await rig.make_whole()
    config = write_config(rig, memory=_TOO_SMALL)
    async with generate(
        "--config", config, "--context", "600", "--recovery-timeout", str(_NEVER_S), *_STORY
    ) as command:
        await command.wait_text()
        rig.last.kill()
        began = time.monotonic()
        ended = await command.wait()
        took_s = time.monotonic() - began
    is_named = "worker last: " in ended.loss and "the model does not fit without" in ended.loss
    return Seen(
        f"exit code {ended.code} after {took_s:.1f} s: {ended.loss}",
        is_kept=ended.code == 3 and is_named and took_s < _NEVER_MOST_S,
    )


async def two(rig: Rig, *, is_gone: bool) -> Seen:
    def kill_both() -> None:
        rig.first.kill()
        rig.last.kill()

    async with asking_four(rig, IS_GONE if is_gone else COMES_BACK) as (trial, asked, expected):
        await trial.begin(asked, num_pieces(expected[0]) // 2, kill_both)
        await trial.wait_lost()
        if not is_gone:
            rig.first.start()
            rig.last.start()
        found = await trial.answers()
        return trial.seen(found, expected, is_kept=(len(trial.layers) == 1) == is_gone)


async def during_replay(rig: Rig) -> Seen:
    async with asking_four(rig, COMES_BACK) as (trial, asked, expected):

        def lose_another() -> None:
            if len(trial.lost_at) == 1:
                rig.last.kill()

        trial.when_reopened = lose_another
        await trial.begin(asked, num_pieces(expected[0]) // 2, rig.first.kill)
        await trial.wait_lost()
        rig.first.start()
        await until(lambda: len(trial.lost_at) == 2, 60, "it is lost again")
        rig.last.start()
        found = await trial.answers()
        return trial.seen(found, expected, is_kept=len(trial.lost_at) == 2)


async def drain(rig: Rig) -> Seen:
    async with asking_four(rig, COMES_BACK) as (trial, asked, expected):
        await trial.begin(asked, num_pieces(expected[0]) // 2, lambda: rig.first.signal(signal.SIGTERM))
        found = await trial.answers()
        code = await rig.first.wait_ended(10)
        has_handed_over = "first: is about to end; going on without first" in trial.said
        return trial.seen(found, expected, is_kept=has_handed_over and code == 0, also=f"exit code {code}")


async def kill_own(rig: Rig) -> Seen:
    [expected] = await rig.expected([_story(rig)])
    async with generate("--local", "2", "--rejoin-timeout", "50", *_STORY) as command:
        await command.wait_text()
        own = _children(command)
        _worker(own, "worker-2").kill()
        ended = await command.wait()
    left = psutil.wait_procs(own, 5)[1]
    is_same, went_on = ended.out == expected.text + "\n", "; going on" in ended.err
    is_kept = ended.code == 0 and is_same and went_on and not left
    return Seen(f"{ended.loss}; {len(left)} processes left", is_kept, is_same)


async def crashes_on_every_start(rig: Rig) -> Seen:
    """The third worker that the command starts, and every later one, ends as it starts."""
    [expected] = await rig.expected([_story(rig)])
    starts = rig.folder / "starts"
    starts.write_text("")
    script = rig.folder / "python"
    python = shlex.quote(sys.executable)
    script.write_text(
        f"#!/bin/sh\ncd {shlex.quote(str(Path.cwd()))}\n"
        f'case "$*" in "-P -m worker "*) ;; *) exec {python} "$@" ;; esac\necho >> {shlex.quote(str(starts))}\n'
        f'if [ $(wc -l < {shlex.quote(str(starts))}) -le 2 ]; then exec {python} "$@"; fi\n'
        f'shift 3\nexec {python} -m tools.faults.worker start "$@"\n'
    )
    script.chmod(0o755)
    async with generate("--local", "2", "--rejoin-timeout", "6", *_STORY, executable=script) as command:
        await command.wait_text()
        own = _children(command)
        _worker(own, "worker-2").kill()
        ended = await command.wait()
    left = psutil.wait_procs(own, 5)[1]
    tries = len(starts.read_text()) - 2
    is_same = ended.out == expected.text + "\n"
    is_without = "going on without worker-2" in ended.err
    return Seen(
        f"{tries} tries in 6 s; {ended.loss}; {len(left)} processes left",
        ended.code == 0 and is_same and is_without and 1 <= tries <= 6 and not left,
        is_same,
    )


async def coordinator_killed(rig: Rig) -> Seen:
    await rig.make_whole()
    asked = [_story(rig)]
    expected = await rig.expected(asked)
    async with generate("--config", write_config(rig), *_STORY) as command:
        await command.wait_text()
        command.process.kill()
        freed_s = max([await node.wait_free() for node in rig.nodes.values()])
    async with rig.opened(rig.options(COMES_BACK)) as trial:
        await trial.begin(asked, -1, lambda: None)
        return trial.seen(await trial.answers(), expected, also=f"free after {freed_s:.2f} s")


async def journal(rig: Rig) -> Seen:
    await rig.make_whole()
    [expected] = await rig.expected([_story(rig)])
    path = rig.folder / "answer.journal"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    request = ("--config", write_config(rig), "--journal", path)
    async with generate(*request, *_STORY) as command:
        await command.wait_text(20)
        command.process.kill()
        before = (await command.wait()).out
    async with generate(*request) as command:
        ended = await command.wait()
    is_same = before + ended.out == expected.text + "\n"
    return Seen(f"{len(before)} characters, then {len(ended.out)}", ended.code == 0 and is_same, is_same)


async def coordinator_stops(rig: Rig) -> Seen:
    await rig.make_whole()
    [expected] = await rig.expected([_story(rig)])
    async with generate("--config", write_config(rig), *_STORY) as command:
        await command.wait_text()
        command.process.send_signal(signal.SIGSTOP)
        await still(8)
        command.process.send_signal(signal.SIGCONT)
        ended = await command.wait()
    is_same = ended.out == expected.text + "\n"
    return Seen(ended.loss, ended.code == 0 and is_same, is_same)


def write_config(rig: Rig, memory: int | None = None) -> Path:
    """A cluster.yaml with the rig's workers, each node with so much memory."""
    limit = f", memory: {memory}" if memory else ""
    lines = [f"model: {rig.model}", "workers:"]
    lines += [f"  - {{name: {node.name}, address: '{node.address}'{limit}}}" for node in rig.nodes.values()]
    lines += [f"coordinator: {{memory: {memory}}}"] if memory else []
    path = rig.folder / "cluster.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _story(rig: Rig) -> Request:
    return greedy(rig)


def _children(command: Command) -> list[psutil.Process]:
    return psutil.Process(command.process.pid).children(recursive=True)


def _worker(processes: list[psutil.Process], name: str) -> psutil.Process:
    return next(each for each in processes if name in each.cmdline())
