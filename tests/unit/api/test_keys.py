import os
from pathlib import Path

import pytest

from coordinator.api import auth
from worker.errors import InputError


def test_keys_are_only_read_from_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match=r"expected a file|cannot be read"):
            auth.load_keys(path)


def test_a_file_of_too_many_keys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("12345678\n")
    assert auth.load_keys(path).holder("12345678")
    monkeypatch.setattr(auth, "_MAX_FILE_BYTES", 8)
    with pytest.raises(InputError, match="at most 8 bytes"):
        auth.load_keys(path)


def test_a_key_that_no_header_can_carry_is_refused_by_its_letters(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("schlüssel-für-alle\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 1: expected KEY or NAME KEY, of 8 to 512 printable ASCII characters$"):
        auth.load_keys(path)
