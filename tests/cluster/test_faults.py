"""Real workers, killed and stopped while somebody reads: the stream goes on with the tokens it would have had."""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.commands import answer_here, parse
from tests.cluster.processes import FINISH_S, START_S, Outcome, Running, Starter, Worker, free_port, write_cluster

SAMPLED = ("--temp", "0.8", "--seed", "5")
ENDLESS = ("--prompt", "go", "--ignore-eos", *SAMPLED)
STORY = (*ENDLESS, "--max-tokens", "400")
FAR = START_S  # a deadline for what takes a moment on a machine that is not busy


@pytest.fixture(scope="module")
def story(talker: Path) -> str:
    """What one process answers."""
    return str(answer_here("--model", talker, "--local", "0", *STORY)["text"])


class Places:
    """Two workers of a cluster.yaml, of which each can be started again where it was."""

    def __init__(self, start: Starter, model: Path, folder: Path) -> None:
        self.ports = {name: free_port() for name in ("first", "last")}
        addresses = ((name, f"127.0.0.1:{port}") for name, port in self.ports.items())
        self.config = write_cluster(folder / "cluster.yaml", *addresses, model=str(model))
        self.workers: dict[str, Worker] = {}
        self._start = start
        for name in self.ports:
            self.start(name)
        for worker in self.workers.values():
            assert worker.address

    def start(self, name: str) -> None:
        self.workers[name] = self._start.worker(name, "--config", self.config)

    def start_request(self, *more: str) -> Running:
        """The request for the story, or for another number of tokens."""
        asked = ENDLESS if "--max-tokens" in more else STORY
        return self._start.brigade("generate", "--config", self.config, *asked, *more)

    def generate(self, *more: str) -> Running:
        """The same; returns when the first text is out."""
        running = self.start_request(*more)
        running.out.wait_match(r".", FINISH_S)
        return running


@pytest.fixture
def places(start: Starter, talker: Path, tmp_path: Path) -> Places:
    return Places(start, talker, tmp_path)


def assert_whole(outcome: Outcome, story: str, *said: str) -> None:
    """The stream has ended well, and standard error says these things of one loss."""
    assert outcome.code == 0, outcome.err
    assert outcome.out == story + "\n"
    [line] = re.findall(r"^worker .*; going on .*$", outcome.err, re.MULTILINE)
    for each in said:
        assert re.search(each, line), line
    assert re.search(r"the stream stood still for \d+\.\d s$", line), line
    assert "Traceback" not in outcome.err


def wait_step(worker: Worker, step: int) -> None:
    deadline = time.monotonic() + FAR
    while worker.status().step < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_worker_of_ones_own_is_started_again(start: Starter, talker: Path, story: str) -> None:
    running = start.brigade("generate", "--model", talker, "--local", "2", "--rejoin-timeout", "50", *STORY)
    running.out.wait_match(r".", FINISH_S)
    children = start.children(running, 2)
    [last] = [child for child in children if "worker-2" in child.cmdline()]
    last.kill()
    assert_whole(running.wait(), story, "^worker worker-2: ", "going on with the same nodes")
    assert psutil.wait_procs(children, 5.0)[1] == [], "nobody is left behind"


def test_a_killed_worker_that_somebody_starts_again_takes_its_place(places: Places, story: str) -> None:
    running = places.generate("--rejoin-timeout", "50")
    places.workers["first"].send_signal(signal.SIGKILL)
    places.start("first")
    outcome = running.wait()
    assert_whole(outcome, story, "^worker first: closed the connection", "going on with the same nodes")


def test_a_worker_that_is_gone_for_good_is_planned_around(places: Places, story: str) -> None:
    running = places.generate("--rejoin-timeout", "0.1")
    places.workers["last"].send_signal(signal.SIGKILL)
    assert_whole(running.wait(), story, "^worker last: ", r"without last \(coordinator \[0, 2\), first \[2, 4\)\)")


def test_a_pause_is_no_loss_and_a_stop_is_and_the_woken_worker_is_taken_back(places: Places, story: str) -> None:
    last = places.workers["last"]
    running = places.generate("--rejoin-timeout", "0.1", "--max-tokens", "30000")
    last.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    last.send_signal(signal.SIGCONT)
    running.out.wait_match(f".{{{len(running.out.text) + 50}}}", FAR)
    assert "going on" not in running.err.text
    last.send_signal(signal.SIGSTOP)
    running.err.wait_match(r"worker last: stopped answering .* going on without last", FAR)
    last.send_signal(signal.SIGCONT)
    running.err.wait_match("worker last is there again; the next chain is opened with it", FAR)
    last.wait_slots(0, FAR)
    last.running.err.wait_match("left the chain of coordinator coordinator", FAR)
    places.workers["first"].send_signal(signal.SIGKILL)
    running.err.wait_match(r"worker first: .* going on without first \(coordinator \[0, 2\), last \[2, 4\)\)", FAR)
    running.out.wait_match(f".{{{len(running.out.text) + 50}}}", FAR)
    running.send_signal(signal.SIGINT)
    outcome = running.wait()
    num_both = min(len(story), len(outcome.out) - 1)
    assert outcome.out[:num_both] == story[:num_both]


def test_a_worker_that_is_told_to_end_hands_over_and_ends_at_once(places: Places, story: str) -> None:
    running = places.generate()
    places.workers["first"].send_signal(signal.SIGTERM)
    ended = places.workers["first"].running.wait(FAR)
    assert ended.code == 0 and "worker first: drained\n" in ended.err
    assert_whole(running.wait(), story, "^worker first: is about to end; going on without first")


def test_a_worker_that_is_needed_and_stays_away_ends_the_command(start: Starter, talker: Path, tmp_path: Path) -> None:
    """Memory for a half of the model each."""
    worker = start.worker("mini", "--model", talker)
    config = write_cluster(tmp_path / "cluster.yaml", ("mini", worker.address, "900KiB"), model=str(talker))
    config.write_text(config.read_text() + "coordinator: {memory: 900KiB}\n")
    needed = ("--config", config, "--context", "600", "--recovery-timeout", "0.5")
    running = start.brigade("generate", *needed, *STORY, "--json")
    wait_step(worker, 20)  # the warm-up has fewer
    worker.send_signal(signal.SIGKILL)
    outcome = running.wait(FAR)
    assert outcome.code == 3
    said = "mini did not come back within 0.5 s, and the model does not fit without"
    assert outcome.err == f"error: worker mini: closed the connection (its process has ended); {said}\n"
    found = json.loads(outcome.out)
    assert f"error: {found['error']['message']}\n" == outcome.err
    whole = answer_here("--model", talker, "--local", "0", *STORY)
    assert 0 < len(found["tokens"]) < len(whole["tokens"]) and found["finish_reason"] is None
    assert (found["tokens"], found["text"]) == tuple(whole[key][: len(found[key])] for key in ("tokens", "text"))


def test_the_figures_tell_of_the_loss(places: Places, story: str) -> None:
    running = places.start_request("--rejoin-timeout", "0.1", "--json")
    wait_step(places.workers["last"], 20)  # the warm-up has fewer
    places.workers["last"].send_signal(signal.SIGKILL)
    answer = parse(running.wait())
    assert answer["text"] == story
    assert answer["stats"]["recoveries"] == 1 and answer["stats"]["recovery_s"] > 0.1
    assert [stage["node"] for stage in answer["stages"]] == ["coordinator", "first", "last"]
    assert [stage.get("lost", False) for stage in answer["stages"]] == [False, False, True]
    assert all(stage["compute_ms"] > 0 for stage in answer["stages"])
    waterfall = dict(answer["waterfall"])
    assert waterfall["recovery"] > 100
    assert waterfall.pop("wall_ms") == pytest.approx(sum(waterfall.values()), rel=1e-6)
