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
from tests.cluster.processes import FINISH_S, Starter, Worker, write_cluster
from tools.proxy import proxy_to
from tools.worker_process import free_port

FAILURE_S = 10.0  # from a loss to the end of the command
LONG = ("--prompt", "go", "--ignore-eos", "--max-tokens", "39000")  # lasts longer than any test
AT_ONCE = ("--recovery-timeout", "0")  # fail with the first loss: tests/cluster/test_faults.py has what goes on
SOME = ("--prompt", "go", "--ignore-eos", "--max-tokens", "24")
NAMES = ("first", "last")
DRAINING = "is shutting down and takes no new request; running requests have ten seconds to end"


class Pair:
    """Two workers on fixed ports, restarted after a test that ended one."""

    def __init__(self, start: Starter, model: Path, folder: Path) -> None:
        self.model = model
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in NAMES}
        self.config = write_cluster(folder / "cluster.yaml", *self.addresses.items(), model=str(model))
        self._start = start
        self._workers: dict[str, Worker] = {}

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def revive(self) -> None:
        """Start those that do not run; return once both listen."""
        for name in NAMES:
            if name not in self._workers or not self._workers[name].running.is_running:
                self._workers[name] = self._start.worker(name, "--config", self.config)
        for name in NAMES:
            assert self._workers[name].address == self.addresses[name]

    def with_address(self, folder: Path, name: str, address: str) -> Path:
        """A cluster.yaml in which one of them is called at another address."""
        addresses = self.addresses | {name: address}
        return write_cluster(folder / "cluster.yaml", *addresses.items(), model=str(self.model))

    def generate_some(self) -> list[int]:
        """A short request; its tokens."""
        return list(answer_here("--config", self.config, *SOME)["tokens"])


def generate_until_lost(config: Path, lose: Callable[[], object], name: str) -> None:
    """Generate without end, with a loss at the first text or later: the command ends with the name of the node."""
    heard: list[float] = []

    def hear(text: str) -> None:
        if not heard:
            lose()
        heard.append(time.monotonic())

    outcome = run_here("generate", "--config", config, *LONG, *AT_ONCE, hear=hear)
    assert heard and time.monotonic() - heard[-1] < FAILURE_S
    assert outcome.code == 3 and "Traceback" not in outcome.err, outcome.err
    said = outcome.err.removeprefix(f"worker {name}: {DRAINING}\n").splitlines()
    lines = [line for line in said if not line.endswith(" ...")]  # on a slow machine it tells of the load
    assert len(lines) in (1, 2) and len(lines[0]) < 300, outcome.err
    assert lines[0].startswith(f"error: worker {name}: "), outcome.err


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


def test_workers_serve_on_and_a_slow_link_changes_no_token(pair: Pair, expected: list[int], tmp_path: Path) -> None:
    assert pair.generate_some() == expected
    with proxy_to(pair.addresses["last"], latency_s=0.02) as proxy:
        answer = answer_here("--config", pair.with_address(tmp_path, "last", proxy.address), *SOME)
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
    with proxy_to(pair.addresses[name]) as proxy:
        config = pair.config if number else pair.with_address(tmp_path, name, proxy.address)

        def lose() -> None:
            if number:
                pair[name].send_signal(number)
            else:
                proxy.is_blackhole = True

        generate_until_lost(config, lose, name)
    if number == signal.SIGSTOP:
        pair[name].send_signal(signal.SIGCONT)
        for each in NAMES:
            pair[each].wait_slots(0, 10.0)


@pytest.mark.long
def test_a_worker_with_a_blocked_loop_ends_the_request_by_name(pair: Pair, start: Starter, tmp_path: Path) -> None:
    blocked = start.worker("first", "--model", pair.model, program=("-m", "tools.faults.worker", "loop@40"))
    generate_until_lost(pair.with_address(tmp_path, "first", blocked.address), lambda: None, "first")


@pytest.mark.parametrize(("number", "is_streaming"), [(signal.SIGTERM, False), (signal.SIGKILL, True)])
def test_a_command_that_is_ended_at_its_start_or_killed_leaves_no_local_worker_behind(
    start: Starter, talker: Path, number: signal.Signals, is_streaming: bool
) -> None:
    """tests/cluster/test_generate.py interrupts one in the middle of its answer."""
    running = start.brigade("generate", "--model", talker, "--local", "1", *LONG)
    if is_streaming:
        running.out.wait_match(r".", FINISH_S)
    children = start.children(running, 1 if is_streaming else 2)  # and what renders its chat template
    running.send_signal(number)
    outcome = running.wait(FAILURE_S)
    assert "Traceback" not in outcome.err and "error" not in outcome.err
    assert outcome.code == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    assert is_streaming or (outcome.out, outcome.err) == ("", "")
    assert psutil.wait_procs(children, FAILURE_S)[1] == []


def test_a_coordinator_that_stands_still_loses_its_session(pair: Pair, start: Starter, expected: list[int]) -> None:
    running = start.brigade("generate", "--config", pair.config, *LONG, *AT_ONCE)
    running.out.wait_match(r".", FINISH_S)
    assert [pair[name].status().slots for name in NAMES] == [1, 1]
    running.send_signal(signal.SIGSTOP)
    for name in NAMES:
        pair[name].wait_slots(0, FAILURE_S)
    assert pair.generate_some() == expected


def test_sigterm_lets_a_running_session_end_and_then_ends_the_worker(pair: Pair) -> None:
    heard: list[str] = []

    def end(text: str) -> None:
        """Tell it to end while the session goes on."""
        if not heard:
            pair["last"].send_signal(signal.SIGTERM)
        heard.append(text)

    request = ("--prompt", "go", "--ignore-eos", "--max-tokens", "100")  # on a slow machine, too, in less than 10 s
    outcome = run_here("generate", "--config", pair.config, *request, *AT_ONCE, hear=end)
    assert outcome.code == 0 and heard, outcome.err
    assert "100 tokens" in outcome.err
    ended = pair["last"].running.wait(FAILURE_S)
    assert ended.code == 0 and "Traceback" not in ended.err
    lines = [line.removeprefix("worker last: ") for line in ended.err.splitlines()]
    assert "draining: sessions in progress or kept: 1, at most 10 s" in lines
    assert lines[-1] == "drained" or lines[-2:] == ["drained", "left the chain of coordinator coordinator"]


def test_a_second_sigterm_ends_a_worker_at_once_and_the_first_one_an_idle_worker(pair: Pair) -> None:
    def end() -> None:
        pair["last"].send_signal(signal.SIGTERM)
        _wait_draining(pair["last"])
        pair["last"].send_signal(signal.SIGTERM)

    generate_until_lost(pair.config, end, "last")
    assert pair["last"].running.wait().code == 130, "it would end with 0 once its sessions have ended"
    pair["first"].wait_slots(0, FAILURE_S)
    pair["first"].send_signal(signal.SIGTERM)
    outcome = pair["first"].running.wait(5.0)
    assert (outcome.code, outcome.out) == (0, "") and outcome.err.endswith("worker first: drained\n")


def _wait_draining(worker: Worker) -> None:
    """Return once its health check says that it takes no more work."""
    deadline = time.monotonic() + 60.0
    with grpc.insecure_channel(worker.address) as channel:
        check = HealthStub(channel).Check
        while check(HealthCheckRequest(), timeout=5.0, wait_for_ready=True).status != HealthCheckResponse.NOT_SERVING:
            assert time.monotonic() < deadline, "still says that it serves"
            time.sleep(0.02)


def test_an_agent_of_launchd_waits_at_its_port_for_an_older_process_of_the_same_worker_only(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = ("--bind", f"127.0.0.1:{free_port()}")
    first = start.worker("mini", *bind)
    assert first.address
    other = start.worker("mini", *bind)
    monkeypatch.setenv("XPC_SERVICE_NAME", "brigade.worker.mini")  # as launchd does
    unlike = start.worker("mini", *bind, "--keep-alive", "60")
    twin = start.worker("mini", *bind)
    waits = rf"cannot listen on \S+: in use .*; waits until process {first.running.process.pid}, .* has ended\n"
    twin.running.err.wait_match(waits, FINISH_S)
    for each in (other, unlike):
        assert each.running.wait().code == 2 and "waits" not in each.running.err.text
    assert twin.running.is_running
    first.send_signal(signal.SIGTERM)
    assert (first.running.wait().code, twin.running.wait().code) == (0, 2), "launchd starts it again"
