"""`brigade chat` as people use it, in a terminal and a pipe; `chat`, `generate` and `eval` with a server that runs."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.cluster.commands import answer_here, parse, run_here
from tests.cluster.conftest import RECITED
from tests.cluster.processes import FINISH_S, ROOT, START_S, Starter, Stream
from tests.cluster.servers import start_server
from tests.cluster.test_eval import HERE, without_times, write_questions

NUM_BYTES = len(RECITED.encode())
SHORT = ("-m", str(NUM_BYTES))
# A terminal of its own, as a shell gives it to a program: Ctrl-C is then a signal.
_WITH_TERMINAL = (
    "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "runpy.run_module('coordinator', run_name='__main__', alter_sys=True)"
)


class Screen(Stream):
    """What a terminal shows."""

    def _read(self) -> None:
        with suppress(OSError):  # on Linux: the other end is closed
            super()._read()


@contextmanager
def terminal(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Stream]]:
    """A command with a terminal: the process, what types, and what is seen."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _WITH_TERMINAL, *map(str, arguments)],
        cwd=ROOT, env=os.environ | {"TERM": "xterm", "COLUMNS": "80"}, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = Screen(os.fdopen(ours, "rb", buffering=0))
    try:
        yield process, ours, seen
    finally:
        process.kill()
        process.wait(FINISH_S)
        seen.close()


def test_interrupts_end_answers_and_not_the_program(reciter: Path) -> None:
    with terminal("chat", "--model", reciter, "--local", "0") as (process, keys, seen):
        seen.wait_match(">>> ", START_S)
        os.write(keys, b"Hi\n")
        seen.wait_match("日", START_S)
        os.write(keys, b"\x03")
        seen.wait_match(r"\(interrupted\)\s+>>> ", START_S)
        os.write(keys, b"/stats\n")
        seen.wait_match(r"answer broken off after \d+ tokens?, its first text after .*\s+>>> ", START_S)
        os.write(keys, b"/ex")
        seen.wait_match(r">>> /ex$", START_S)
        os.write(keys, b"\x03")
        seen.wait_match(r"Ctrl-C again.*\s+>>> /ex", START_S)
        if may_type_for_the_user():
            seen.wait_match(r">>> /ex.+$", START_S)  # it is deleted
            os.write(keys, b"/re")
            seen.wait_match(r"/re$", START_S)
            os.write(keys, b"\x03")  # the first one after something was typed
            seen.wait_match(r"Ctrl-C again.*\s+>>> /re.+$", START_S)
            os.write(keys, b"/ex")
        os.write(keys, b"it\n")
        assert process.wait(FINISH_S) == 0


@pytest.mark.long
def test_ctrl_c_ends_a_chat_whose_output_is_not_read(reciter: Path) -> None:
    """tests/unit/cli/test_run_async.py has other commands."""
    ours, theirs = os.pipe()
    size = fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 4096)
    asked = [sys.executable, "-m", "coordinator", "chat", "--model", reciter, "--local", "0", "-m", "99"]
    with subprocess.Popen(asked, cwd=ROOT, stdin=subprocess.PIPE, stdout=theirs, text=True) as process:
        assert process.stdin
        process.stdin.write("Hi\n/reset\n" * 99)
        process.stdin.flush()
        held = [0]
        while held[-1] < size - 100 or held[-1] != held[-2]:  # it writes no more
            time.sleep(0.5)
            held += array("i", fcntl.ioctl(ours, termios.FIONREAD, bytes(4)))
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(FINISH_S) == 130
        finally:
            process.kill()
    os.close(theirs)
    os.close(ours)


def may_type_for_the_user() -> bool:
    """Return whether the system lets a program put keys into the input of its terminal."""
    setting = Path("/proc/sys/dev/tty/legacy_tiocsti")
    return not setting.exists() or setting.read_text().strip() == "1"


def test_a_piped_conversation_keeps_what_was_said(reciter: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    typed = f'/system be brief\nHi there, how are you?\n/stats\n"""\ntwo\nlines\n"""\n/stats\n/save {saved}\n'
    outcome = run_here("chat", "--model", reciter, "--local", "0", *SHORT, stdin=typed)
    assert (outcome.code, outcome.out) == (0, f"{RECITED}\n" * 2), outcome.err
    first, second = (int(found) for found in re.findall(r"(\d+) of them reused", outcome.err))
    assert first == 0 and second > NUM_BYTES
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"] == "two\nlines" and messages[4]["content"] == RECITED
    (other := tmp_path / "other.json").write_text("mine")
    typed = f"/load {saved}\nmore\n/save {saved}\n/save {other}\n/save ~no-one/x\n/reset\n/save {saved}\n/nothing\n"
    again = run_here("chat", "--model", reciter, "--local", "0", *SHORT, stdin=typed)
    assert again.out == f"{RECITED}\n" and "loaded 5 messages" in again.err and "saved 7 messages" in again.err
    assert again.err.count("expected a new file, found") == 2 and other.read_text() == "mine"
    assert len(json.loads(saved.read_text())["messages"]) == 7
    assert again.code == 2 and "cannot write ~no-one/x" in again.err and "found /nothing" in again.err


@pytest.fixture(scope="module")
def url(module_start: Starter, reciter: Path) -> str:
    """Where a server runs."""
    return start_server(module_start, reciter, "--local", "0").url


def test_chat_and_generate_use_a_running_server_and_tell_what_it_refuses(url: str) -> None:
    outcome = run_here("chat", "--server", url, *SHORT, stdin="Hi there, how are you?\nand you?\n/stats\n")
    assert (outcome.code, outcome.out) == (0, f"{RECITED}\n" * 2), outcome.err
    assert int(re.search(r"(\d+) of them reused", outcome.err)[1]) > NUM_BYTES  # type: ignore[index]
    raw = answer_here("--server", url, *SHORT, "--raw", "--temp", "0", "user: Hi\nassistant: ")
    assert (raw["text"], raw["finish_reason"], raw["stats"]["num_tokens"]) == (RECITED, "length", NUM_BYTES)
    refused = run_here("chat", "--server", url, "-m", "4", stdin="x" * 50_000)
    assert refused.code == 2 and "shorten it" in refused.err
    gone = run_here("chat", "--server", "http://127.0.0.1:9", stdin="Hi\n")
    assert gone.code == 3 and "error: nothing answers at http://127.0.0.1:9 (" in gone.err


def test_eval_of_a_server_is_its_models(url: str, reciter: Path, tmp_path: Path) -> None:
    source = write_questions(tmp_path / "q.jsonl", 4)
    asked = ("eval", "--questions", source, "--check", "contains", "-m", "30", "--decode", "ar", "--json")
    remote, local = parse(run_here(*asked, "--server", url)), parse(run_here(*asked, *HERE, reciter))
    assert without_times(remote) == without_times(local) and remote["rows"][0]["num_right"] == 2
    (tmp_path / "docs.jsonl").write_text('{"q": "x", "options": ["no", "yz"], "gold": 1}\n')  # what it recites next
    task = tmp_path / "task.yaml"
    task.write_text(
        "{dataset_path: json, dataset_kwargs: {data_files: docs.jsonl}, output_type: multiple_choice, doc_to_text: q, "
        'doc_to_choice: options, doc_to_target: gold, target_delimiter: ""}'
    )
    for model in (("--server", url), (*HERE, reciter)):
        [row] = parse(run_here("eval", "--questions", task, "--json", *model))["rows"]
        assert (row["num"], row["num_right"]) == (1, 1)
