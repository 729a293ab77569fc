"""Real workers, killed, stopped and cut off under a stream, which continues with the tokens it would have had.

`python -m tools.faults` tries all of it; here is a part with every decoder and stage in it.
"""

import asyncio
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.commands import answer_here, parse, run_here
from tests.cluster.models import make_talker
from tests.cluster.processes import Starter, status_of, write_cluster
from tools.faults import kills, losses, pauses
from tools.faults.__main__ import all_groups
from tools.faults.asked import DECODES, four
from tools.faults.case import COMES_BACK, end_workers, num_pieces
from tools.faults.rig import Rig
from tools.faults.trial import Seen
from tools.proxy import proxy_to

ASKED = ("--prompt", "go", "--ignore-eos", "--temp", "0.8", "--seed", "5", "--max-tokens", "240")
FAR_S = 60.0  # a deadline for what takes a moment on a machine that is not busy


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two workers that all cases share; in the end nothing is left of them. A random model is quick to answer."""
    folder = tmp_path_factory.mktemp("rig")
    made = Rig(folder, str(make_talker(folder / "model", mask_token_id=0)))
    asyncio.run(made.__aenter__())
    try:
        yield made
        kept(end_workers(made))
    finally:
        asyncio.run(made.__aexit__())


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set limits that a busy machine meets, and that show in which way a loss was noticed: no other one is as quick."""
    monkeypatch.setattr(kills, "KILLED_S", 2.0)  # a worker that only falls silent is given up no sooner
    monkeypatch.setattr(pauses, "STOPPED_S", 5.0)  # a step is overdue no sooner than after six seconds
    monkeypatch.setattr(pauses, "TAKEN_BACK_S", FAR_S)


def kept(case: Coroutine[None, None, Seen]) -> Seen:
    """Return what was seen; fail if it is not what was promised."""
    seen = asyncio.run(case)
    assert seen.is_kept, seen
    return seen


@pytest.mark.parametrize(
    ("name", "moment", "comes_back"),
    [pytest.param("first", "0", False, marks=pytest.mark.long), ("last", "middle", True)],
)
def test_every_stream_continues_after_kill_9(rig: Rig, name: str, moment: str, comes_back: bool) -> None:
    """Noticed by its connection. Greedy, forked, sampled and penalised, by one decoder each."""
    asked = [four(rig, decode)[number] for number, decode in enumerate(DECODES)]
    kept(kills.kill(rig, asked, name, moment, comes_back=comes_back))


def test_a_stopped_worker_is_done_without_before_its_step_is_overdue_and_taken_back(rig: Rig) -> None:
    kept(pauses.stop(rig, "last", seconds=2))


def test_a_flipped_bit_costs_time_and_no_token(rig: Rig) -> None:
    async def flip_until_noticed() -> Seen:
        """Flip one bit on the way to a worker, and another one if that has hit nothing that counts."""
        await rig.make_whole()
        asked = four(rig, "ar")
        expected = await rig.expected(asked)
        with proxy_to(rig.last.address) as proxy:
            async with rig.opened(rig.options(COMES_BACK, via={"last": proxy.address})) as trial:
                await trial.begin(asked, -1, lambda: None)
                for count in range(5, num_pieces(expected[0])):
                    await trial.live[0].wait_pieces(count)
                    if trial.lost_at:
                        break
                    proxy.there.hop_flips = 1
                return trial.seen(await trial.answers(), expected, is_kept=1 <= len(trial.lost_at) <= 2)

    kept(flip_until_noticed())


def test_a_worker_that_is_told_to_end_hands_over_and_ends_at_once(rig: Rig) -> None:
    kept(losses.drain(rig))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        lambda rig: pauses.pause(rig, "first"),
        lambda rig: pauses.cut_link(rig, "last", pauses.both, seconds=2),
        pytest.param(losses.during_replay, marks=pytest.mark.matrix),
    ],
    ids=["a pause", "a link that is cut", "a loss while tokens are fed again"],
)
def test_every_other_fault_ends_as_promised(rig: Rig, case: Callable[[Rig], Coroutine[None, None, Seen]]) -> None:
    kept(case(rig))


@pytest.fixture(scope="module")
def unfailed(talker: Path) -> dict[str, Any]:
    """The answer of one process."""
    return answer_here("--model", talker, "--local", "0", *ASKED)


def test_a_killed_local_worker_is_started_again_and_the_command_tells_of_it(
    talker: Path, unfailed: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    own: list[psutil.Process] = []

    def kill_in_the_middle() -> None:
        """Kill the local worker once it has done more steps than a warm-up has."""
        deadline = time.monotonic() + FAR_S
        while not own and time.monotonic() < deadline:
            for child in psutil.Process().children():
                words = child.as_dict(["cmdline"])["cmdline"] or []  # None of a process that has ended
                status = status_of(child) if "worker-1" in words else None
                if status and status.step > 20:
                    child.kill()
                    own.append(child)
            time.sleep(0.1)  # to look at processes takes more than ten milliseconds

    killing = threading.Thread(target=kill_in_the_middle)
    killing.start()
    outcome = run_here("generate", "--model", talker, "--local", "1", "--rejoin-timeout", "50", "--json", *ASKED)
    killing.join()
    answer = parse(outcome)
    assert answer["text"] == unfailed["text"]
    assert answer["stats"]["recoveries"] == 1 and answer["stats"]["recovery_s"] > 0.1
    waterfall = dict(answer["waterfall"])
    assert waterfall["recovery"] > 100
    assert waterfall.pop("wall_ms") == pytest.approx(sum(waterfall.values()), rel=1e-6)
    assert [stage["node"] for stage in answer["stages"]] == ["coordinator", "worker-1"]
    [line] = re.findall(r"^.*; going on .*$", outcome.err, re.MULTILINE)
    blamed = "(worker worker-1: |this process stood still )"  # a machine that is busy enough is blamed itself
    same = rf"{blamed}.*; going on with the same nodes after .*, the stream stood still for \d+\.\d s"
    assert re.fullmatch(same, line)
    assert "Traceback" not in outcome.err + capfd.readouterr().err
    assert psutil.wait_procs(own, 5.0)[1] == []


def test_an_answer_that_breaks_off_is_printed_as_far_as_it_came(
    start: Starter, talker: Path, unfailed: dict[str, Any], tmp_path: Path
) -> None:
    """The other node alone has no room for the model. A slow link keeps the answer from being over before."""
    worker = start.worker("mini", "--model", talker)
    with proxy_to(worker.address, latency_s=0.02) as proxy:
        keys = {"model": str(talker), "coordinator": "{memory: 900KiB}"}
        config = write_cluster(tmp_path / "cluster.yaml", ("mini", proxy.address, "900KiB"), **keys)
        needed = ("--config", config, "--context", "600", "--recovery-timeout", "0.5", "--json")
        running = start.brigade("generate", *needed, *ASKED)
        deadline = time.monotonic() + FAR_S
        while worker.status().step < 20:  # the warm-up has fewer
            assert time.monotonic() < deadline
            time.sleep(0.05)
        worker.send_signal(signal.SIGKILL)
        outcome = running.wait(FAR_S)
    found = json.loads(outcome.out)
    assert outcome.code == 3 and outcome.err.splitlines()[-1] == f"error: {found['error']['message']}"
    assert "worker mini" in outcome.err and "the model does not fit without" in outcome.err
    assert 0 < len(found["tokens"]) < len(unfailed["tokens"]) and found["finish_reason"] is None
    assert (found["tokens"], found["text"]) == tuple(unfailed[key][: len(found[key])] for key in ("tokens", "text"))


def test_every_case_of_the_matrix_has_a_name_of_its_own() -> None:
    cases = [case for cases in all_groups().values() for case in cases[:-1]]
    assert len({case.done for case in cases}) == len(cases) > 100
