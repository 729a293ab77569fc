"""`brigade launch` and `brigade logs` on two Macs, played by an OpenSSH server on loopback. One story, in order."""

import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.deploy.package import installed
from tests.cluster.commands import answer_here, run_here
from tests.cluster.processes import Starter
from tests.cluster.sshd import PROGRAM, SSH, WHY_NOT, Macs, macs, processes_naming
from tools.worker_process import free_port, hop_port

pytestmark = pytest.mark.skipif(not (PROGRAM and SSH and Path("/proc").exists()), reason=WHY_NOT)
PROMPT = ("--prompt", "2+3", "--max-tokens", "8", "--ignore-eos")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Macs]:
    with macs(tmp_path_factory.mktemp("machines")) as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{found.folder / 'programs'}:{os.environ['PATH']}")
        yield found


@pytest.fixture(scope="module")
def config(machines: Macs) -> Path:
    path = machines.folder / "cluster.yaml"
    entries = "".join(machines.entry(name) for name in machines.homes)
    path.write_text(f"model: demo\ncontext: 512\ntls: {{keys: own}}\nworkers:\n{entries}")
    assert run_here("keys", "init", "--config", path).code == 0
    return path


@pytest.fixture(scope="module")
def launched(machines: Macs, config: Path) -> str:
    """What the first launch printed."""
    done = run_here("launch", "--config", config)
    assert done.code == 0, done.err
    return done.out


def rows(table: str) -> dict[str, str]:
    """What was done, by node."""
    found = (re.split(r" {2,}", line.strip()) for line in table.splitlines()[1:])
    return {name: next((cell for cell in cells[1:] if cell not in (name, "daemon")), "") for name, *cells in found}


def pids(machines: Macs) -> dict[str, int | None]:
    return {name: process.pid if (process := machines.process(name)) else None for name in machines.homes}


def test_one_command_installs_and_starts_workers_that_make_the_right_tokens_and_a_second_changes_nothing(
    machines: Macs, config: Path, launched: str
) -> None:
    assert rows(launched) == dict.fromkeys(machines.homes, "installed, new certificate, started")
    alone = answer_here("--model", "demo", "--local", "0", *PROMPT)
    assert answer_here("--config", config, *PROMPT)["tokens"] == alone["tokens"]

    def files() -> dict[Path, int]:
        below = (path for home in machines.homes.values() for path in (home / ".brigade").rglob("*"))
        ours = (path for path in below if path.name != "worker.log" and "__pycache__" not in path.parts)
        return {path: path.lstat().st_mtime_ns for path in ours}

    before = pids(machines), files()
    done = run_here("launch", "--config", config)
    assert done.code == 0 and rows(done.out) == dict.fromkeys(machines.homes, "unchanged")
    assert (pids(machines), files()) == before


@pytest.mark.usefixtures("launched")
def test_a_node_gets_this_very_version_and_its_own_part_which_no_other_user_can_read(machines: Macs) -> None:
    for name, home in machines.homes.items():
        folder = machines.folder_of(name)
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {folder / "keys" / f"{name}.pem", folder / "cluster.yaml"} <= set(files)
        assert not [path for path in files if path.suffix in (".pem", ".key") and path.name != f"{name}.pem"]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
        assert stat.S_IMODE((home / ".brigade").stat().st_mode) == 0o700
        said = (folder / "cluster.yaml").read_text()
        assert re.findall(r"name: (\w+)", said) == [name] and "context" not in said and "ssh" not in said
        [worker] = processes_naming(home)
        assert worker.pid == pids(machines)[name]
        listening = [c.laddr for c in worker.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        places = {(place.ip.removeprefix("::ffff:"), place.port) for place in listening}
        port = machines.ports[name]
        assert places == {("127.0.0.1", port), ("127.0.0.1", hop_port(port))}, "nothing else listens"
    python, *_ = worker.cmdline()
    asked = "from coordinator.deploy.package import installed; print(installed().id)"
    told = subprocess.run([python, "-P", "-c", asked], cwd=home, env=worker.environ(), capture_output=True, text=True)
    assert told.stdout.strip() == installed().id == Path(python).parents[1].name, told.stderr


@pytest.mark.usefixtures("launched")
def test_only_what_changed_is_restarted_and_a_lost_mac_holds_up_no_other(machines: Macs, config: Path) -> None:
    before = pids(machines)
    with (machines.folder / "ssh_config").open("a") as more:
        more.write(f"Host gone\n  Port {free_port()}\n")
    other = config.with_name("other.yaml")
    lost = f"  - {{name: lost, address: '127.0.0.1:{free_port()}', ssh: gone}}\n"
    other.write_text(
        config.read_text().replace("context: 512", "context: 256").replace("ssh: air", "ssh: air, memory: 1GiB") + lost
    )
    certificate = machines.folder_of("mini") / "keys" / "mini.pem"
    old = certificate.read_bytes()
    assert run_here("keys", "issue", "mini", "--config", config).code == 0
    done = run_here("launch", "--config", other)
    assert done.code == 3
    assert rows(done.out) == {"mini": "new certificate", "air": "restarted", "lost": "failed"}
    [error] = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: worker lost: ssh gone said: .*Connection refused \(on that Mac: .*Remote Login\)", error)
    after = pids(machines)
    assert after["mini"] == before["mini"] and after["air"] not in (before["air"], None)
    assert certificate.read_bytes() == (config.parent / "own" / "mini.pem").read_bytes() != old


@pytest.mark.usefixtures("launched")
def test_logs_shows_what_a_worker_says_and_follows_it(machines: Macs, config: Path, start: Starter) -> None:
    told = run_here("logs", "mini", "--config", config)
    assert told.code == 0 and re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ ", told.out)
    assert f"worker mini listens on 127.0.0.1:{machines.ports['mini']}" in told.out
    following = start.brigade("logs", "mini", "-f", "-n", "1", "--config", config)
    following.out.wait_match(r"\n", 60.0)
    with (machines.folder_of("mini") / "worker.log").open("a") as log:
        log.write("one more line\n")
    following.out.wait_match("one more line\n", 60.0)
    readers = processes_naming(machines.folder_of("mini") / "worker.log")
    following.send_signal(signal.SIGINT)
    assert following.wait(60.0).code == 130
    assert readers and not psutil.wait_procs(readers, 60.0)[1]


@pytest.mark.usefixtures("launched")
def test_a_worker_that_was_stopped_or_has_ended_comes_back_with_the_next_launch_only(
    machines: Macs, config: Path
) -> None:
    before = pids(machines)
    stopped = run_here("launch", "--stop", "air", "--config", config)
    assert stopped.code == 0 and rows(stopped.out) == {"air": "stopped"}
    assert pids(machines) == {**before, "air": None}
    assert "drained" in (machines.folder_of("air") / "worker.log").read_text()
    assert rows(run_here("launch", "--stop", "air", "--config", config).out) == {"air": "was not running"}
    for _ in range(2):
        started = run_here("launch", "air", "--config", config)
        assert started.code == 0 and rows(started.out) == {"air": "started"}
        air = machines.process("air")
        assert air and pids(machines)["mini"] == before["mini"]
        air.kill()
        air.wait(30.0)


@pytest.mark.usefixtures("launched")
def test_an_update_installs_anew_and_leaves_one_version(machines: Macs, config: Path) -> None:
    versions = machines.homes["air"] / ".brigade" / "versions"
    (versions / "an-older-one").mkdir()
    before = pids(machines)
    done = run_here("launch", "air", "--update", "--config", config)
    assert done.code == 0 and rows(done.out)["air"].startswith("installed, ")
    assert pids(machines)["mini"] == before["mini"] and pids(machines)["air"] not in (before["air"], None)
    assert [path.name for path in versions.iterdir()] == [f"{installed().id}.1"]
    assert rows(run_here("launch", "air", "--config", config).out) == {"air": "unchanged"}


def test_a_configuration_that_cannot_be_launched_is_refused_before_any_contact(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    for content, message in (
        ("workers: [{name: mini, address: '127.0.0.1:50070'}]", "how to reach mini: expected `ssh: user@host`"),
        ("tls: {keys: own}\nworkers: [{name: mini, address: '127.0.0.1:1', ssh: nobody}]", "brigade keys init"),
    ):
        path.write_text(content)
        refused = run_here("launch", "--config", path)
        assert refused.code == 2 and message in refused.err
