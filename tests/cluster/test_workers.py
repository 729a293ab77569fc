"""Workers as processes of their own: they serve, they are lost, they end; and what the user is told."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.cluster.commands import answer_here, run_here
from tests.cluster.processes import FINISH_S, Outcome, Running, Starter, Worker, write_cluster
from tools.proxy import proxy_to
from tools.worker_process import free_port

FAILURE_S = 10.0  # from a loss to the end of the command
LONG = ("--prompt", "go", "--ignore-eos", "--max-tokens", "39000")  # lasts longer than any test
AT_ONCE = ("--recovery-timeout", "0")  # fail with the first loss: tests/cluster/test_faults.py has what goes on
SOME = ("--prompt", "go", "--ignore-eos", "--max-tokens", "24")
NAMES = ("first", "last")


class Pair:
    """Two workers on fixed ports, restarted where a test ended one."""

    def __init__(self, start: Starter, model: Path, folder: Path) -> None:
        self.model = model
        self.ports = {name: free_port() for name in NAMES}
        self.config = write_cluster(
            folder / "cluster.yaml", *((name, self.address(name)) for name in NAMES), model=str(model)
        )
        self._start = start
        self._workers: dict[str, Worker] = {}
        self.revive()

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def revive(self) -> None:
        """Start those that do not run; return once both listen."""
        for name in NAMES:
            if name not in self._workers or not self._workers[name].running.is_running:
                self._workers[name] = self._start.worker(name, "--config", self.config)
        for name in NAMES:
            assert self._workers[name].address == self.address(name)

    def generate_long(self, start: Starter) -> Running:
        """A request that goes on and on; returns when its first text is out."""
        running = start.brigade("generate", "--config", self.config, *LONG, *AT_ONCE)
        running.out.wait_match(r".", FINISH_S)
        return running

    def generate_until_lost(self, config: Path, lose: Callable[[], object] = lambda: None) -> Outcome:
        """A request that goes on and on, in this process, with a loss at its first text or later; how it ends."""
        heard: list[float] = []

        def hear(text: str) -> None:
            if not heard:
                lose()
            heard.append(time.monotonic())

        outcome = run_here("generate", "--config", config, *LONG, *AT_ONCE, hear=hear)
        assert heard and time.monotonic() - heard[-1] < FAILURE_S
        return outcome

    def generate_some(self) -> list[int]:
        """A short request; its tokens."""
        return list(answer_here("--config", self.config, *SOME)["tokens"])


@pytest.fixture(scope="module")
def shared_pair(module_start: Starter, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(module_start, talker, tmp_path_factory.mktemp("pair"))


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    shared_pair.revive()
    yield shared_pair
    for name in NAMES:
        shared_pair[name].running.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def expected(talker: Path) -> list[int]:
    """What one process answers to `Pair.generate_some`."""
    return list(answer_here("--model", talker, "--local", "0", *SOME)["tokens"])


def test_the_same_workers_serve_one_request_after_another_and_a_slow_link_changes_no_token(
    pair: Pair, expected: list[int], tmp_path: Path
) -> None:
    assert pair.generate_some() == expected
    with proxy_to(pair.address("last"), latency_s=0.02) as proxy:
        nodes = ("first", pair.address("first")), ("last", proxy.address)
        config = write_cluster(tmp_path / "cluster.yaml", *nodes, model=str(pair.model))
        answer = answer_here("--config", config, *SOME)
    assert answer["tokens"] == expected
    on_the_way = answer["waterfall"]["wire"] + answer["waterfall"]["return"]
    assert 1e3 * 2 * 0.02 * len(expected) <= on_the_way <= answer["waterfall"]["wall_ms"]
    for name in NAMES:
        status = pair[name].status()
        assert (status.node, status.slots) == (name, 0)
        assert status.weight_bytes > 100_000  # the shard stays for the next request


@pytest.mark.parametrize(
    ("name", "number"),
    [("last", signal.SIGKILL), ("first", signal.SIGSTOP), ("last", None)],
    ids=["killed", "stopped", "lost by the network"],
)
def test_a_lost_worker_ends_the_request_with_its_name_and_is_free_again_once_it_continues(
    pair: Pair, tmp_path: Path, name: str, number: signal.Signals | None
) -> None:
    with proxy_to(pair.address(name)) as proxy:
        addresses = {each: pair.address(each) for each in NAMES} | ({} if number else {name: proxy.address})
        config = write_cluster(tmp_path / "cluster.yaml", *addresses.items(), model=str(pair.model))

        def lose() -> None:
            if number:
                pair[name].send_signal(number)
            else:
                proxy.is_blackhole = True

        _assert_names(pair.generate_until_lost(config, lose), name)
    if number == signal.SIGSTOP:
        pair[name].send_signal(signal.SIGCONT)
        for each in NAMES:
            pair[each].wait_slots(0, 10.0)


def test_a_worker_with_a_blocked_event_loop_ends_the_request_with_its_name(
    pair: Pair, start: Starter, tmp_path: Path
) -> None:
    blocked = start.worker("first", "--model", pair.model, program=("-m", "tools.faults.worker", "loop@40"))
    nodes = ("first", blocked.address), ("last", pair.address("last"))
    config = write_cluster(tmp_path / "cluster.yaml", *nodes, model=str(pair.model))
    _assert_names(pair.generate_until_lost(config), "first")


@pytest.mark.parametrize(("number", "is_streaming"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_command_that_is_interrupted_leaves_no_local_worker_behind(
    start: Starter, talker: Path, number: signal.Signals, is_streaming: bool
) -> None:
    """In the middle of its answer, and while it starts."""
    running = start.brigade("generate", "--model", talker, "--local", "1", *LONG)
    if is_streaming:
        running.out.wait_match(r".", FINISH_S)
    children = start.children(running, 1 if is_streaming else 2)  # and what renders its chat template
    running.send_signal(number)
    outcome = running.wait(FAILURE_S)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err and "error" not in outcome.err
    assert is_streaming or (outcome.out, outcome.err) == ("", "")
    assert psutil.wait_procs(children, 2.0 if is_streaming else FAILURE_S)[1] == []


def test_local_workers_end_by_themselves_when_the_coordinator_is_killed(start: Starter, talker: Path) -> None:
    running = start.brigade("generate", "--model", talker, "--local", "1", *LONG)
    running.out.wait_match(r".", FINISH_S)
    children = start.children(running, 1)
    running.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(children, FAILURE_S)[1] == []


def test_workers_whose_coordinator_stands_still_drop_its_session_and_serve_the_next(
    pair: Pair, start: Starter, expected: list[int]
) -> None:
    running = pair.generate_long(start)
    assert [pair[name].status().slots for name in NAMES] == [1, 1]
    running.send_signal(signal.SIGSTOP)
    for name in NAMES:
        pair[name].wait_slots(0, FAILURE_S)
    assert pair.generate_some() == expected


def test_sigterm_lets_a_running_session_end_and_then_ends_the_worker(pair: Pair) -> None:
    ended_after: list[bool] = []

    def end(text: str) -> None:
        """Tell it to end while the session goes on."""
        if not ended_after:
            pair["last"].send_signal(signal.SIGTERM)
            _wait_draining(pair["last"])
            ended_after.append(pair["last"].running.is_running)

    request = ("--prompt", "go", "--ignore-eos", "--max-tokens", "300")  # 256 may be unread
    outcome = run_here("generate", "--config", pair.config, *request, *AT_ONCE, hear=end)
    assert outcome.code == 0 and ended_after == [True], outcome.err
    assert "300 tokens" in outcome.err
    ended = pair["last"].running.wait(FAILURE_S)
    assert ended.code == 0 and "Traceback" not in ended.err
    lines = [line.removeprefix("worker last: ") for line in ended.err.splitlines()]
    assert "draining: 1 sessions in progress or kept, at most 10 s" in lines
    assert lines[-1] == "drained" or lines[-2:] == ["drained", "left the chain of coordinator coordinator"]


def test_a_second_sigterm_ends_the_worker_at_once(pair: Pair) -> None:
    def end() -> None:
        pair["last"].send_signal(signal.SIGTERM)
        _wait_draining(pair["last"])
        pair["last"].send_signal(signal.SIGTERM)

    outcome = pair.generate_until_lost(pair.config, end)
    assert pair["last"].running.wait(2.0).code != 0
    _assert_names(outcome, "last")


def test_a_worker_with_another_configuration_is_pointed_out(pair: Pair, tmp_path: Path) -> None:
    workers = [("first", pair.address("first")), ("air", pair.address("last"))]
    other = write_cluster(tmp_path / "cluster.yaml", *workers, model="demo")
    outcome = run_here("plan", "--config", other)
    assert outcome.code == 0
    warned = [line for line in outcome.err.splitlines() if line.startswith("warning: ")]
    assert warned == [
        f"warning: worker first has another configuration: model is {pair.model} there, demo here",
        "warning: worker air calls itself last: one of both has the wrong name or address",
        f"warning: worker air has another configuration: model is {pair.model} there, demo here",
    ]
    assert "warning" not in run_here("plan", "--config", pair.config).err


def test_an_idle_worker_ends_at_once(start: Starter) -> None:
    worker = start.worker("mini")
    address = worker.address
    worker.send_signal(signal.SIGTERM)
    outcome = worker.running.wait(5.0)
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"worker mini listens on {address}\nworker mini: drained\n"


DRAINING = "is shutting down and takes no new request; running requests have ten seconds to end"


def _assert_names(outcome: Outcome, name: str) -> None:
    """A loss: exit code 3 and one or two lines that begin with the node, after it may have said that it drains."""
    assert outcome.code == 3, outcome.err
    lines = outcome.err.removeprefix(f"worker {name}: {DRAINING}\n").splitlines()
    assert len(lines) in (1, 2), outcome.err
    assert lines[0].startswith(f"error: worker {name}: "), outcome.err
    assert len(lines[0]) < 300, outcome.err
    assert "Traceback" not in outcome.err


def _wait_draining(worker: Worker) -> None:
    """Return once its health check says that it takes no more work."""
    deadline = time.monotonic() + 60.0
    with grpc.insecure_channel(worker.address) as channel:
        checks = HealthStub(channel)
        while (
            checks.Check(HealthCheckRequest(), timeout=5.0, wait_for_ready=True).status
            != HealthCheckResponse.NOT_SERVING
        ):
            assert time.monotonic() < deadline, "still says that it serves"
            time.sleep(0.02)
