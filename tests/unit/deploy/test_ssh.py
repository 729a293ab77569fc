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

STRANGE = "a'b\"c $(touch x) `y` \\ \n;& 日本"


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_values_reach_the_shell_as_they_are(shell: str) -> None:
    fed = assigned({"name": STRANGE, "other": ""}) + b'printf "%s|%s" "$name" "$other"'
    assert subprocess.run([shell, "-s"], input=fed, capture_output=True).stdout.decode() == f"{STRANGE}|"


@pytest.mark.parametrize("script", ["look", "pythons", "install", "settle", "stop", "watch", "log"])
@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_the_scripts_are_such_for_any_posix_shell(shell: str, script: str) -> None:
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
        ("anna@mini: Permission denied (publickey,keyboard-interactive).\r\n", "ssh-copy-id anna@mini"),
        ("No ED25519 host key is known for mini and you have requested strict checking.\r\nHost key verification "
         "failed.\r\n", "connect once by hand, to accept its key: ssh anna@mini"),
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


def test_what_a_script_says_is_told_as_it_is() -> None:
    error = Remote("mini", "mini").failure(1, "one\ntwo\nthree\nfour\nERROR: no matching distribution\n")
    assert str(error) == "worker mini: two; three; four; ERROR: no matching distribution"


def test_what_has_failed_is_told_before_the_words_of_what_did() -> None:
    said = (
        "Resolved 9 packages\n  Caused by: one\n  Caused by: client error (Connect)\n@brigade uv could not install it\n"
    )
    words = "uv could not install it: Resolved 9 packages; Caused by: one; Caused by: client error (Connect)"
    assert str(Remote("mini", "mini").failure(1, said)) == f"worker mini: {words}"
    assert Remote("mini", "mini").failure(1, "@brigade cannot write x\n").message == "cannot write x"


@pytest.mark.parametrize("code", [1, 255])
def test_what_is_said_there_cannot_steer_a_terminal(code: int) -> None:
    message = Remote("mini", "mini").failure(code, "\x1b]0;owned\x07\x9b2J\tpip\u202e" + "x" * 9999).message
    assert message.isprintable() and "]0;owned" in message and len(message) < 600


def test_without_ssh_here_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="expected the program ssh here"):
        asyncio.run(Remote("mini", "mini").run("look", 5.0))


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


def test_a_bug_on_one_node_ends_the_work_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def run(remote: Remote, script: str, within_s: float) -> dict[str, list[str]]:
        await asyncio.sleep(0)
        if remote.node == "mini":
            raise KeyError("bug")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(remote.node)
        return {}

    async def stop_all() -> None:
        workers = [WorkerConfig(name=name, address="127.0.0.1:1", ssh=name) for name in ("mini", "air")]
        with pytest.raises(KeyError, match="bug"):
            await stop(workers, lambda node, phase: None)
        assert ended == ["air"]

    monkeypatch.setattr(Remote, "run", run)
    asyncio.run(stop_all())


def test_a_line_without_end_in_a_log_is_told(loud: Remote) -> None:
    with pytest.raises(BrigadeError, match=r"^worker loud: printed a line of more than 1 MiB$"):
        asyncio.run(loud.log(10, lambda line: None))


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("angry", r"ssh angry said: (x; ){3}ssh: Connection refused \(.*Remote Login\)"),
        ("vain", "reported more than 256 KiB about itself"),
    ],
)
def test_of_what_is_said_without_end_little_is_kept(place: str, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BrigadeError, match=f"^worker mini: {message}$"):
            asyncio.run(Remote("mini", place).run("look", 20.0))
        assert tracemalloc.get_traced_memory()[1] < 3_500_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place", ["mini", "anna@mini.local", "a.b-c@10.0.0.2", "_x", "anna@fe80::1%en0", "::1"])
def test_a_place_of_ssh(place: str, tmp_path: Path) -> None:
    assert ssh_of(tmp_path, place) == place


@pytest.mark.parametrize(
    "place", ["-oProxyCommand=x", "-F@mini", "anna@-v", "mini:22", "a b", "mini;x", "ssh://mini", "", "$(x)", "mini\n"]
)
def test_what_could_be_more_than_a_place_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workers\[0\].ssh: expected USER@HOST"):
        ssh_of(tmp_path, place)


def ssh_of(folder: Path, place: str) -> str | None:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"workers": [{"name": "mini", "address": "127.0.0.1:1", "ssh": place}]}))
    return load_cluster(path).workers[0].ssh
