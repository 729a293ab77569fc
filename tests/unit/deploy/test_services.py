"""What the services are told, and what the scripts tell the services' programs. None of Apple's was run."""

import fcntl
import os
import plistlib
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.deploy.authority import Authority, certificates
from coordinator.deploy.install import RemoteState, define_service
from coordinator.deploy.ssh import Remote
from tests.unit.deploy.machine import PROC, FakeMachine, identity
from worker.config import ClusterConfig, TlsConfig
from worker.node.certificates import Role

VERSION = "0123456789abcdef"
needs_proc = pytest.mark.skipif(not PROC.exists(), reason="no /proc here: no Linux can be played")
FOLDER = "/Users/anna/.brigade/worker-mini"


def define(kind: str, home: str = "/Users/anna") -> bytes:
    """The service of the worker mini below this home."""
    return define_service(RemoteState(home, 1, kind), "mini", VERSION)


def test_the_property_list_of_a_worker() -> None:
    found = plistlib.loads(define("launchd"))
    python = "/Users/anna/.brigade/versions/0123456789abcdef/bin/python"
    arguments = [python, "-P", "-m", "worker", "--config", f"{FOLDER}/cluster.yaml", "--name", "mini"]
    assert (found["Label"], found["ProgramArguments"]) == ("brigade.worker.mini", arguments)
    assert found["KeepAlive"] == {"SuccessfulExit": False} and found["RunAtLoad"] and found["Umask"] == 0o077
    assert found["StandardErrorPath"] == found["StandardOutPath"] == f"{FOLDER}/worker.log"


def test_the_unit_of_a_worker_is_one(tmp_path: Path) -> None:
    text = define("systemd", "/home/100% anna$").decode()
    python = "/home/100%% anna$$/.brigade/versions/0123456789abcdef/bin/python"
    assert f'ExecStart="{python}" "-P" "-m" "worker"' in text
    assert "StandardError=append:/home/100%% anna$/.brigade/worker-mini/worker.log\n" in text
    if analyze := shutil.which("systemd-analyze"):
        path = tmp_path / "brigade-worker-mini.service"
        path.write_text(text.replace(python, shutil.which("sh") or ""))
        checked = subprocess.run([analyze, "--user", "verify", path], capture_output=True, text=True)
        assert path.name not in checked.stderr, checked.stderr


def test_a_plain_process_is_told_its_words_as_they_are(tmp_path: Path) -> None:
    home = tmp_path / "Anna's $HOME"
    python = home / ".brigade" / "versions" / VERSION / "bin" / "python"
    worker = home / ".brigade" / "worker-mini"
    for folder in (python.parent, worker):
        folder.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$$" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(["sh"], input=define("daemon", str(home)), capture_output=True, check=True)
    pid = (worker / "worker.pid").read_text().strip()
    told = [str(home), pid, "-P", "-m", "worker", "--config", str(worker / "cluster.yaml"), "--name", "mini"]
    assert done.stdout.decode().splitlines() == told


# As launchctl(1) does: print ends with 113 for what it does not know, a domain or a job.
LAUNCHCTL = """\
case "$1 $2" in
"print "*/brigade.*) [ "$(cat loaded 2>/dev/null)" = "$2" ] || exit 113; printf '\\tpid = 7\\n' ;;
"print "*) case " $DOMAINS " in *" $2 "*) ;; *) exit 113 ;; esac ;;
"bootstrap "*) echo "$2/brigade.worker.mini" > loaded ;;
"bootout "*) rm loaded ;;
esac
"""
# As systemctl(1) does: is-active ends with 3 for what does not run.
SYSTEMCTL = """\
case "$*" in
*" is-active "*) [ -f loaded ] || exit 3 ;;
*" restart "*) touch loaded ;;
*" disable "*) rm loaded ;;
esac
"""


def test_a_mac_shows_its_pythons_but_apples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    mac = FakeMachine(tmp_path, "Darwin", "python3.12", "echo 3.12.4 whole")
    found = f"@brigade python 3.12.4 whole {tmp_path}/programs/python3.12"
    assert mac.run("pythons", wanted="3.12") == f"{found}\n"
    others = mac.run("pythons", wanted="9.9").splitlines()
    assert found in others and not [line for line in others if line.endswith(" /usr/bin/python3")]


def cycle(machine: FakeMachine, kind: str, service: Path, started: list[str], stopped: list[str]) -> None:
    """Start and stop the worker; the service's program is told these commands."""
    assert f"@brigade kind {kind}\n" in machine.run("look") and "alive" not in machine.run("look")
    machine.settle(kind, define(kind))
    assert machine.told() == started
    assert service.read_bytes() == define(kind) and "@brigade alive yes\n" in machine.run("look")
    machine.run("stop")
    assert machine.told() == stopped and not service.exists()
    assert "alive" not in machine.run("look") and machine.run("watch") == ""
    machine.settle(kind, define(kind))
    shutil.rmtree(machine.home / ".brigade")
    assert machine.told() == started and "@brigade was running\n" in machine.run("stop")
    assert machine.told() == stopped and not service.exists()
    assert machine.run("stop") == "@brigade was absent\n"


@pytest.mark.parametrize(("domains", "used"), [("gui/501 user/501", "gui/501"), ("user/501", "user/501")])
def test_an_agent_is_loaded_where_its_user_is(tmp_path: Path, domains: str, used: str) -> None:
    mac = FakeMachine(tmp_path, "Darwin", "launchctl", LAUNCHCTL.replace("$DOMAINS", domains))
    service = mac.home / "Library" / "LaunchAgents" / "brigade.worker.mini.plist"
    label = f"{used}/brigade.worker.mini"
    cycle(mac, "launchd", service, [f"enable {label}", f"bootstrap {used} {service}"], [f"bootout {label}"])


# As some macOS are said to refuse a list of sessions.
PICKY = """\
if [ "$1" = bootstrap ] && ! grep -A 1 LimitLoadToSessionType "$3" | grep -q "<string>$TAKES<"; then
printf 'Bootstrap failed: 5: Input/output error\\nTry re-running the command as root for richer errors.\\n' >&2
exit 5
fi
"""
PLUTIL = """\
[ "$1 $2 $3" = "-replace LimitLoadToSessionType -string" ] || exit 1
exec {python} -c '
import plistlib, sys
found = plistlib.load(open(sys.argv[2], "rb")) | {{"LimitLoadToSessionType": sys.argv[1]}}
open(sys.argv[2], "wb").write(plistlib.dumps(found))
' "$4" "$5"
"""


@pytest.mark.parametrize(("domains", "session"), [("gui/501 user/501", "Aqua"), ("user/501", "Background")])
def test_an_agent_that_launchd_refuses_is_loaded_for_the_session_of_its_domain_alone(
    tmp_path: Path, domains: str, session: str
) -> None:
    does = PICKY.replace("$TAKES", session) + LAUNCHCTL.replace("$DOMAINS", domains)
    mac = FakeMachine(tmp_path, "Darwin", "launchctl", does)
    mac.write("plutil", PLUTIL.format(python=sys.executable))
    service = mac.home / "Library" / "LaunchAgents" / "brigade.worker.mini.plist"
    copy = mac.home / ".brigade" / "worker-mini" / "agent.plist"
    mac.settle("launchd", define("launchd"))
    used = domains.split()[0]
    tries = [f"bootstrap {used} {service}", f"bootstrap {used} {copy}"]
    assert mac.told() == [f"enable {used}/brigade.worker.mini", *tries]
    assert service.read_bytes() == define("launchd"), "or the next launch would restart it"
    assert plistlib.loads(copy.read_bytes()) == plistlib.loads(define("launchd")) | {"LimitLoadToSessionType": session}
    assert "@brigade alive yes\n" in mac.run("look")
    mac.run("stop")
    assert mac.told() == [f"bootout {used}/brigade.worker.mini"]


@pytest.mark.parametrize("plutil", ["exit 0", "exit 1"])
def test_what_launchd_says_of_an_agent_that_it_refuses_is_told_for_each_domain(tmp_path: Path, plutil: str) -> None:
    does = PICKY.replace("$TAKES", "nothing") + LAUNCHCTL.replace("$DOMAINS", "gui/501 user/501")
    mac = FakeMachine(tmp_path, "Darwin", "launchctl", does)
    mac.write("plutil", plutil)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        mac.settle("launchd", define("launchd"))
    told = Remote("mini", "mini").failure(failed.value.returncode, failed.value.stderr).message
    assert re.match(r"launchd took \S+\.plist in no domain of this user: gui/501: Bootstrap failed: 5: Input/out", told)
    assert "; user/501: Bootstrap failed: 5: Input/output error Try re-running the command as root" in told


@needs_proc
def test_a_unit_is_enabled_and_disabled(tmp_path: Path) -> None:
    machine, name = FakeMachine(tmp_path, "Linux", "systemctl", SYSTEMCTL), "brigade-worker-mini.service"
    started = ["--user daemon-reload", f"--user --quiet enable {name}", f"--user restart {name}"]
    stopped = [f"--user --quiet disable --now {name}"]
    cycle(machine, "systemd", machine.home / ".config" / "systemd" / "user" / name, started, stopped)


@needs_proc
def test_what_another_launch_has_started_meanwhile_is_not_started_anew(tmp_path: Path) -> None:
    """Both looked before either had its turn; later ones restart what they are told to."""
    machine = FakeMachine(tmp_path, "Linux", "systemctl", SYSTEMCTL)
    assert "@brigade turn 0\n" in machine.run("look")
    assert "settled" not in machine.settle("systemd", define("systemd"))
    assert "@brigade turn 1\n" in machine.run("look") and machine.told()
    assert "@brigade settled yes" in machine.settle("systemd", define("systemd")) and not machine.told()
    assert "settled" not in machine.settle("systemd", define("systemd"), started="y") and machine.told()
    assert "settled" not in machine.settle("systemd", define("systemd"), started="y", seen="3") and machine.told()


@needs_proc
@pytest.mark.parametrize("script", ["settle", "stop"])
def test_a_worker_is_started_and_stopped_by_one_launch_at_a_time(tmp_path: Path, script: str) -> None:
    machine = FakeMachine(tmp_path, "Linux", "systemctl", SYSTEMCTL)
    machine.settle("systemd", define("systemd"))
    other = machine.home / ".brigade" / "turns" / "worker-mini" / "2"
    other.symlink_to(identity(os.getpid()))
    machine.write("sleep", f"rm {other}")  # it is over after a second
    again = {"kind": "systemd", "restarts": "yes", "started": "x", "version": "v"}
    assert "@brigade phase waiting for a" in machine.run(script, **again)


def test_of_several_launches_at_once_one_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, is_open = Authority.make(tmp_path), threading.Event()

    def open_it(folder: Path) -> Authority:
        is_open.set()
        return authority

    monkeypatch.setattr(Authority, "open", open_it)
    said: list[str] = []
    turn = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(turn, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(certificates, ClusterConfig(tls=TlsConfig(keys=str(tmp_path))), ["mini"], said.append)
        assert is_open.wait(10.0)
        made = authority.issue("mini", Role.WORKER)
        os.close(turn)
        assert asked.result(10.0) == {"mini": made.read_bytes()} and not said
