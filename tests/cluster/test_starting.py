"""Processes that are lost, doubled or cut off before or while a cluster starts."""

import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.cluster.deployment import OwnNode
from tests.cluster.commands import answer_here, run_here
from tests.cluster.processes import FINISH_S, START_S, Starter, free_port, write_cluster

SOME = ("--prompt", "go", "--max-tokens", "24", "--ignore-eos")
STORY = ("--prompt", "go", "--ignore-eos", "--temp", "0.8", "--seed", "5", "--max-tokens", "400")


@pytest.mark.long
def test_a_worker_of_ones_own_that_is_killed_while_it_first_loads_is_started_again(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[psutil.Process] = []
    load = OwnNode.load

    async def kill_once(own: OwnNode, *arguments: Any) -> None:
        if not killed:
            killed.extend(child for child in psutil.Process().children() if "worker-1" in child.cmdline())
            killed[0].kill()
        await load(own, *arguments)

    expected = run_here("generate", "--model", talker, "--local", "0", *SOME)
    monkeypatch.setattr(OwnNode, "load", kill_once)
    outcome = run_here("generate", "--model", talker, "--local", "1", *SOME)
    assert outcome.code == 0 and outcome.out == expected.out, outcome.err
    assert len(killed) == 1
    assert "worker worker-1: was ended by signal 9; it is started again\n" in outcome.err
    assert re.search(r"^worker worker-1: .*; going on with.* after \d+\.\d s$", outcome.err, re.MULTILINE)


@pytest.mark.long
def test_of_two_workers_with_one_name_the_newer_takes_part_in_the_next_chain(
    start: Starter, talker: Path, tmp_path: Path
) -> None:
    """They listen on two addresses of one entry; another worker is killed, so that there is a next chain."""
    old, new, air = (f"127.0.0.1:{free_port()}" for _ in range(3))
    config = write_cluster(tmp_path / "cluster.yaml", ("mini", old), ("air", air), model=str(talker))
    config.write_text(config.read_text().replace(f"'{old}'", f"['{old}', '{new}']"))
    older = start.worker("mini", "--config", config, "--bind", old)
    other = start.worker("air", "--config", config)
    assert older.address and other.address
    newer = start.worker("mini", "--config", config, "--bind", new)
    running = start.brigade("generate", "--config", config, "--rejoin-timeout", "0.1", *STORY)
    running.out.wait_match(r".", FINISH_S)
    assert newer.address
    older_was_used = "joined" in older.running.err.text
    other.send_signal(signal.SIGKILL)
    outcome = running.wait()
    assert outcome.code == 0, outcome.err
    assert outcome.out == str(answer_here("--model", talker, "--local", "0", *STORY)["text"]) + "\n"
    told = f"worker mini: two processes have this name; the one at {new}, which was started later, takes part: end the "
    assert outcome.err.count(told + f"one at {old}\n") == 1
    newer.running.err.wait_match("joined the chain of coordinator coordinator as stage 1 of 2", START_S)
    if older_was_used:
        older.running.err.wait_match("left the chain", START_S)
    older.wait_slots(0, START_S)
