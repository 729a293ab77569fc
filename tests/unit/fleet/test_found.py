import re
from dataclasses import replace

import pytest

from coordinator.fleet.found import choose_python, folder_of, read_found, read_pythons, require_room
from worker.errors import BrigadeError

# As `df -Pk .` prints it on macOS, in the form that POSIX asks for.
MAC = {
    "home": ["/Users/anna"],
    "free": ["/dev/disk3s5      971350180 512345678 421234567    55%    /System/Volumes/Data"],
    "uv": ["/Users/anna/.local/bin/uv"],
    "version": ["0123456789abcdef", "fedcba9876543210"],
    "kind": ["launchd"],
    "config": [""],
    "started": ["abc"],
    "alive": ["yes"],
}


def test_a_mac_is_read() -> None:
    found = read_found(MAC)
    assert (found.home, found.kind, found.free_bytes) == ("/Users/anna", "launchd", 421234567 * 1024)
    assert found.versions == {"0123456789abcdef", "fedcba9876543210"} and found.is_alive and found.started == "abc"
    assert found.config == "" and found.key == ""


@pytest.mark.parametrize("missing", ["home", "free", "kind"])
def test_what_is_no_unix_is_refused(missing: str) -> None:
    with pytest.raises(BrigadeError, match="expected macOS or Linux there"):
        read_found({word: lines for word, lines in MAC.items() if word != missing})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"kind": [""]}, "expected launchd, systemd, daemon as the kind of service, found ''"),
        ({"kind": ["\x1b[2J"]}, r"found '\x1b[2J'"),
        ({"home": ["/Users/\x1b[2J"]}, "expected a home without control characters there, found /Users/\ufffd[2J"),
    ],
)
def test_what_cannot_be_worked_with_is_that_nodes_failure(told: dict[str, list[str]], message: str) -> None:
    with pytest.raises(BrigadeError, match=re.escape(message)):
        read_found(MAC | told)


def test_no_number_is_too_long_to_be_read() -> None:
    digits = "9" * 5000
    assert read_found(MAC | {"free": [f"x {digits} 55% /"]}).free_bytes > 0
    assert read_pythons([f"3.{digits}.1 whole /a"]) == []


def test_a_full_disk_is_told_before_anything_is_sent() -> None:
    found = read_found(MAC)
    require_room(found)
    with pytest.raises(BrigadeError, match=r"expected 2.0 GiB free at /Users/anna for the installation, found 1.5 GiB"):
        require_room(replace(found, free_bytes=3 << 29))


@pytest.mark.parametrize(
    ("lines", "chosen"),
    [
        (["3.12.4 whole /a", "3.11.9 whole /b", "3.13.0 whole /c"], "/b"),  # 3.11 runs here
        (["3.9.6 whole /old", "3.12.4 whole /a", "3.13.0 bare /c"], "/a"),
        (["nonsense", "3.11.2 whole /with a space/python3"], "/with a space/python3"),
    ],
)
def test_the_python_that_fits_best_is_taken(lines: list[str], chosen: str) -> None:
    assert choose_python(read_pythons(lines), (3, 11)).path == chosen


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], "found none"),
        (["3.9.6 whole /old"], "found Python 3.9.6"),
        (["3.11.2 bare /debian"], "found Python 3.11.2 without one of them"),
    ],
)
def test_without_a_python_it_is_said_what_to_do(lines: list[str], found: str) -> None:
    with pytest.raises(BrigadeError, match=re.escape(found) + ".*astral.sh/uv/install.sh"):
        choose_python(read_pythons(lines), (3, 11))


@pytest.mark.parametrize("name", ["mini", "..", "-rf", "~"])
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    assert folder_of(name) == f".brigade/worker-{name}"
