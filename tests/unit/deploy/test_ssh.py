import asyncio
import subprocess
import tarfile
import tracemalloc
from io import BytesIO
from pathlib import Path

import pytest
import yaml

from coordinator.deploy.launch import stop
from coordinator.deploy.ssh import Remote, assigned, pack_files, text_of
from worker.config import WorkerConfig, load_cluster
from worker.errors import BrigadeError, ConfigError


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_values_and_scripts_are_such_for_any_posix_shell(shell: str) -> None:
    strange = "a'b\"c $(touch x) `y` \\ \n;& 日本"
    fed = assigned({"name": strange, "other": ""}) + b'printf "%s|%s" "$name" "$other"'
    assert subprocess.run([shell, "-s"], input=fed, capture_output=True).stdout.decode() == f"{strange}|"
    for script in ("look", "pythons", "install", "settle", "stop", "watch", "log"):
        checked = subprocess.run([shell, "-n"], input=text_of(script), capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, b"")


def test_files_travel_for_one_user_only() -> None:
    with tarfile.open(fileobj=BytesIO(pack_files({"key.pem": b"secret"}))) as tar:
        [entry] = tar.getmembers()
        assert (entry.name, entry.mode, entry.uid) == ("key.pem", 0o600, 0)
        assert tar.extractfile(entry).read() == b"secret"  # type: ignore[union-attr]


# As OpenSSH 9 prints them.
@pytest.mark.parametrize(
    ("said", "way_out"),
    [
        ("anna@mini: Permission denied (publickey,keyboard-interactive).\r\n",
         "ssh-copy-id anna@mini; if it is there, unlock it: ssh-add"),
        ("No ED25519 host key is known for mini and you have requested strict checking.\r\nHost key verification "
         "failed.\r\n", "connect once by hand, to accept its key: ssh anna@mini"),
        ("Offending ED25519 key in /Users/anna/.ssh/known_hosts:3\r\nHost key for mini has changed and you have "
         "requested strict checking.\r\nHost key verification failed.\r\n", "ssh-keygen -R"),
        ("ssh: connect to host mini port 22: Connection refused\r\n", "Remote Login"),
        ("ssh: connect to host mini port 22: Operation timed out\r\n", "is it awake"),
        ("ssh: Could not resolve hostname mini: nodename nor servname provided\r\n", "expected USER@HOST"),
        ("", "try it by hand: ssh anna@mini"),
    ],
)  # fmt: skip
def test_what_ssh_says_is_told_with_a_way_out(said: str, way_out: str) -> None:
    error = Remote("mini", "anna@mini").failure(255, said)
    assert str(error).startswith("worker mini: ssh anna@mini said: ") and way_out in str(error)
    assert error.exit_code == 3 and "\r" not in str(error)


def test_what_a_script_says_is_told_after_what_has_failed() -> None:
    failed = Remote("mini", "mini").failure
    error = failed(1, "one\ntwo\nthree\nfour\nERROR: no matching distribution\n")
    assert str(error) == "worker mini: two; three; four; ERROR: no matching distribution"
    said = "Resolved 9 packages\n  Caused by: one\n  Caused by: client error\n@brigade uv could not install it\n"
    words = "uv could not install it: Resolved 9 packages; Caused by: one; Caused by: client error"
    assert str(failed(1, said)) == f"worker mini: {words}"
    assert failed(1, "@brigade cannot write x\n").message == "cannot write x"
    for code in (1, 255):  # nor can it steer a terminal
        message = failed(code, "\x1b]0;owned\x07\x9b2J\tpip\u202e" + "x" * 9999).message
        assert message.isprintable() and "]0;owned" in message and len(message) < 600


LOUD = """\
#!/bin/sh
cat >/dev/null
case "$*" in
*loud*) head -c 1100000 /dev/zero ;;
*angry*) yes x | head -c 4000000 >&2; echo "ssh: Connection refused" >&2; exit 255 ;;
*vain*) yes "@brigade kind me" | head -c 4000000 ;;
*) echo "@brigade was running" ;;
esac
"""


@pytest.fixture
def loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    """An account that prints a line without end."""
    (tmp_path / "ssh").write_text(LOUD)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return Remote("loud", "loud")


def test_a_line_without_end_is_that_nodes_failure(loud: Remote) -> None:
    workers = [WorkerConfig(name=name, address="127.0.0.1:1", ssh=name) for name in ("loud", "mini")]
    failed, stopped = asyncio.run(stop(workers, lambda node, phase: None))
    assert str(failed.error) == "worker loud: printed a line of more than 1 MiB"
    assert (stopped.done, stopped.error) == ("stopped", None)
    with pytest.raises(BrigadeError, match=r"^worker loud: printed a line of more than 1 MiB$"):
        asyncio.run(loud.log(10, lambda line: None))


@pytest.mark.usefixtures("loud")
def test_of_what_is_said_without_end_little_is_kept() -> None:
    for place, message in (
        ("angry", r"ssh angry said: (x; ){3}ssh: Connection refused \(.*Remote Login\)"),
        ("vain", "reported more than 256 KiB about itself"),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(BrigadeError, match=f"^worker mini: {message}$"):
                asyncio.run(Remote("mini", place).run("look", 20.0))
            assert tracemalloc.get_traced_memory()[1] < 3_500_000
        finally:
            tracemalloc.stop()


def test_a_greeting_without_a_newline_hides_no_line_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nprintf 'Welcome! '\nexec /bin/sh -s\n")
    (tmp_path / "ssh").chmod(0o755)
    folder = tmp_path / ".brigade" / "worker-mini"
    folder.mkdir(parents=True)
    (folder / "worker.log").write_text("one\ntwo\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    remote, lines = Remote("mini", "mini"), list[str]()
    assert asyncio.run(remote.run("stop", 20.0)) == {"was": ["absent"]}
    assert asyncio.run(remote.run("look", 20.0))["home"] == [str(tmp_path.resolve())]
    asyncio.run(remote.log(2, lines.append))
    assert lines == ["Welcome! one", "two"]  # no empty line is printed


def test_a_place_of_ssh_is_only_that(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"

    def ssh_of(place: str) -> str | None:
        path.write_text(yaml.safe_dump({"workers": [{"name": "mini", "address": "127.0.0.1:1", "ssh": place}]}))
        return load_cluster(path).workers[0].ssh

    for place in ("mini", "anna@mini.local", "a.b-c@10.0.0.2", "_x", "anna@fe80::1%en0", "::1"):
        assert ssh_of(place) == place
    for place in (
        "-oProxyCommand=x", "-F@mini", "anna@-v", "mini:22", "a b", "mini;x", "ssh://mini", "", "$(x)", "mini\n",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"workers\[0\].ssh: expected USER@HOST"):
            ssh_of(place)
